"""Variants to machine code: in parallel, through the cache, the same bytes anywhere, and stopping when told."""

import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4c.cubin_cache import CubinCache
from dsv4c.errors import KernelError
from dsv4c.kernels import compile as compile_module
from dsv4c.kernels.compile import compile_kernels, main, require_launchable
from dsv4c.kernels.compile_request import CompiledKernel, parse_constant, repeat_command
from dsv4c.kernels.sources import KERNEL_FOLDER, KernelSources
from dsv4c.kernels.tool_versions import NVRTC_PACKAGE, NVRTC_VERSION, TRITON_PACKAGE, TRITON_VERSION
from dsv4c.plan.execution_plan import KernelCall
from dsv4c.target import TARGETS
from tests.kernels.kernel_sources import (
    ARCH,
    CUDA_VARIANT,
    TRITON_VARIANT,
    request,
    with_constants,
    write_sources,
)

ROOT = Path(__file__).parent.parent.parent
SLOW_VARIANT = replace(CUDA_VARIANT, source="slow", entry="slow", constants=())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "kernels")


def key_of(variant: object, folder: Path) -> str:
    return compile_module._key(request(variant), KernelSources(folder))  # type: ignore[arg-type]


@pytest.mark.nvrtc
@pytest.mark.triton
def test_cold_then_warm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [TRITON_VARIANT, *(with_constants(CUDA_VARIANT, WIDTH=32 * n) for n in (4, 2, 3))]
    progress: list[tuple[int, int]] = []
    cold = compile_kernels(
        [*variants, variants[1]],
        ARCH,
        CubinCache(tmp_path / "cubins"),
        jobs=2,
        progress=lambda done, total: progress.append((done, total)),
        folder=folder,
    )
    assert list(cold) == variants and progress == [(done, 4) for done in range(5)]
    assert [cold[variant].threads for variant in variants] == [128, 128, 64, 96]
    assert compile_kernels(variants[1:], ARCH, None, jobs=1, folder=folder) == {v: cold[v] for v in variants[1:]}

    def no_worker(*arguments: object) -> None:
        raise AssertionError("a worker for a warm cache")

    # Warm, it needs no compiler at all.
    monkeypatch.setattr(subprocess, "Popen", no_worker)
    progress.clear()
    warm = compile_kernels(
        variants,
        ARCH,
        CubinCache(tmp_path / "cubins"),
        progress=lambda done, total: progress.append((done, total)),
        folder=folder,
    )
    assert warm == cold and list(warm) == variants and progress == [(4, 4)]


@pytest.mark.nvrtc
def test_damaged_entry_is_compiled_again(folder: Path, tmp_path: Path) -> None:
    def compile_with(cache: CubinCache) -> CompiledKernel:
        return compile_kernels([CUDA_VARIANT], ARCH, cache, jobs=1, folder=folder)[CUDA_VARIANT]

    cache = CubinCache(tmp_path / "cubins")
    first = compile_with(cache)
    (path,) = (tmp_path / "cubins").glob("*/*.cubin")
    path.write_bytes(path.read_bytes()[:-1])
    assert compile_with(cache) == first and path.read_bytes() == first.cubin
    (record,) = (tmp_path / "cubins").glob("*/*.json")
    # Whole, but written by something that recorded less.
    cache.put(record.stem, first.cubin, {"symbol": "scale_rows"})
    assert compile_with(cache) == first
    # The folder is of no use: the build works, and says so once.
    (tmp_path / "file").write_text("")
    useless = CubinCache(tmp_path / "file")
    assert compile_with(useless) == first and useless.warning is not None


def test_key_holds_what_decides_the_code(folder: Path) -> None:
    cuda, triton = key_of(CUDA_VARIANT, folder), key_of(TRITON_VARIANT, folder)
    others = [
        with_constants(CUDA_VARIANT, WIDTH=128),
        with_constants(CUDA_VARIANT, FACTOR=1),
        with_constants(CUDA_VARIANT, FACTOR=1.0),
        replace(CUDA_VARIANT, entry="spill"),
        replace(TRITON_VARIANT, warps=8),
        replace(TRITON_VARIANT, stages=3),
    ]
    assert len({cuda, triton, *(key_of(variant, folder) for variant in others)}) == 8
    for name in ("cuda/scale.cu", "cuda/factor.cuh", "cuda/dtype.cuh", "triton/scaled.py", "triton/factor.py"):
        path = folder / name
        before = path.read_text()
        path.write_text(before + ("// " if name.startswith("cuda") else "# ") + "a comment\n")
        changed = key_of(CUDA_VARIANT, folder) != cuda, key_of(TRITON_VARIANT, folder) != triton
        assert changed == (name.startswith("cuda"), name.startswith("triton")), name
        path.write_text(before)
    (folder / "cuda/unrelated.cuh").write_text("")
    (folder / "triton/unrelated.py").write_text("")
    assert (key_of(CUDA_VARIANT, folder), key_of(TRITON_VARIANT, folder)) == (cuda, triton)


@pytest.mark.nvrtc
@pytest.mark.triton
def test_same_key_and_bytes_elsewhere(folder: Path, tmp_path: Path) -> None:
    """Another folder, another home, other variables, another working folder."""
    variants = [CUDA_VARIANT, TRITON_VARIANT]
    here = compile_kernels(variants, ARCH, CubinCache(tmp_path / "one"), jobs=1, folder=folder)
    elsewhere = write_sources(tmp_path / "somebody" / "else" / "checkout")
    script = f"""
import sys
from pathlib import Path
from dsv4c.cubin_cache import CubinCache, default_cache
from dsv4c.kernels.compile import compile_kernels
from tests.kernels.kernel_sources import CUDA_VARIANT, TRITON_VARIANT
compile_kernels([TRITON_VARIANT, CUDA_VARIANT], {ARCH!r}, default_cache(), jobs=1, folder=Path({str(elsewhere)!r}))
"""
    (tmp_path / "home").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "two"),
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_DEFAULT_FP_FUSION": "0",
        "DISABLE_PTXAS_OPT": "1",
        "NVRTC_DISABLE_CONCURRENT_NVVM": "1",
        "LANG": "de_DE",
    }
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=tmp_path)

    def entries(cache: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in cache.glob("*/*.*")}

    assert entries(tmp_path / "one") == entries(tmp_path / "two/dsv4c/cubins")
    assert {kernel.cubin for kernel in here.values()} <= set(entries(tmp_path / "one").values())
    assert not list((tmp_path / "home").iterdir())


@pytest.mark.nvrtc
def test_failure_stops_the_rest_and_can_be_repeated(folder: Path, tmp_path: Path) -> None:
    broken = with_constants(CUDA_VARIANT, X_TYPE="bf17", NAME="5")
    start = time.monotonic()
    with pytest.raises(KernelError, match=r"scale.cu:3: NVRTC 12.6.85 failed\n.*bf17") as raised:
        compile_kernels([SLOW_VARIANT, broken], ARCH, CubinCache(tmp_path / "cubins"), jobs=2, folder=folder)
    assert time.monotonic() - start < 20
    assert_no_children()
    hint = raised.value.hint
    assert hint is not None and hint.startswith("repeat with: python -m dsv4c.kernels.compile cuda scale scale_rows ")
    command = [sys.executable, *shlex.split(hint.removeprefix("repeat with: "))[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == KernelError.exit_code and not again.stdout
    assert again.stderr == raised.value.to_text() + "\n"


@pytest.mark.nvrtc
def test_interrupt_stops_at_once(folder: Path, tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_kernels([SLOW_VARIANT, CUDA_VARIANT], ARCH, cache, jobs=2, progress=interrupt, folder=folder)
    assert time.monotonic() - start < 20
    assert_no_children()
    assert cache.usage().entries == 1  # what was ready is kept


@pytest.mark.nvrtc
def test_worker_that_dies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(KernelError, match="the compiler of scale: scale_rows ended with status 1") as raised:
        compile_kernels([CUDA_VARIANT], ARCH, None, jobs=1, folder=folder)
    assert raised.value.hint is not None and "repeat with" in raised.value.hint


@pytest.mark.nvrtc
def test_killed_build_leaves_no_compiler(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsv4c.kernels.compile", "cuda", "slow", "slow", "--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    build = subprocess.Popen(command, env=environment)
    _wait_until(lambda: bool(children(build.pid)))
    (worker,) = children(build.pid)
    build.kill()
    build.wait()
    _wait_until(lambda: not _runs(worker))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Workers started by any thread of a process."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [
        int(child)
        for part in found
        for child in part
        if b"kernels.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def assert_no_children() -> None:
    assert children(os.getpid()) == []


def test_unknown_source(folder: Path) -> None:
    with pytest.raises(KernelError, match=r"no kernel source .*/cuda/unknown\.cu"):
        compile_kernels([replace(CUDA_VARIANT, source="unknown")], ARCH, None, folder=folder)


@pytest.mark.nvrtc
def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "kernel.cubin"
    constants = [f"{name}={value}" for name, value in CUDA_VARIANT.constants]
    assert main(["cuda", "scale", "scale_rows", *constants, "--folder", str(folder), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert re.search(r"^registers +\d+$", printed.out, re.MULTILINE) and "shared_bytes         1024" in printed.out
    assert output.read_bytes()[:4] == b"\x7fELF"
    assert main(["cuda", "scale", "scale_rows", "WIDTH", "--folder", str(folder)]) == KernelError.exit_code
    assert "'WIDTH' is not NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("value", [1, -1, 0, 1.0, 1e-06, "bf16", "5", "1e3", "inf", '"a"', "*bf16,*i32", "a b", ""])
def test_constants_survive_the_command_line(value: int | float | str) -> None:
    one = replace(request(CUDA_VARIANT), constants=(("NAME", value),))
    words = shlex.split(repeat_command(one, KERNEL_FOLDER))
    (word,) = (word for word in words if word.startswith("NAME="))
    name, parsed = parse_constant(word)
    assert (name, parsed, type(parsed)) == ("NAME", value, type(value))


def test_launch_that_the_card_would_refuse() -> None:
    target = TARGETS["h100"]
    kernel = CompiledKernel(b"", "scale_rows", 128, 1024, 0, 0, 0, 0, "nvrtc")
    call = KernelCall(CUDA_VARIANT, (1, 1, 1), 512, ())
    require_launchable(call, kernel, target)
    with pytest.raises(KernelError, match="544 threads a block of 128 registers each are 69632"):
        require_launchable(replace(call, block=544), kernel, target)
    with pytest.raises(KernelError, match="it is compiled for 256"):
        require_launchable(call, replace(kernel, threads=256), target)
    with pytest.raises(KernelError, match="bytes of shared memory"):
        require_launchable(replace(call, shared_bytes=target.smem_per_block - 1023), kernel, target)
    triton = KernelCall(TRITON_VARIANT, (1, 1, 1), 64, ())
    with pytest.raises(KernelError, match="it is compiled for 128"):
        require_launchable(triton, replace(kernel, threads=128), target)


def test_pins_are_the_projects() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    nvrtc = f"{NVRTC_PACKAGE}=={NVRTC_VERSION}"
    assert extras["h100"] == [nvrtc, f"{TRITON_PACKAGE}=={TRITON_VERSION}"]
    assert nvrtc in extras["orin"]
    assert nvrtc in (ROOT / "constraints.txt").read_text().splitlines()
