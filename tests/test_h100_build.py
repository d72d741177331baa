"""`dsv4c build --target h100` where there is no GPU: all kernels are machine code, the same build gives the same bytes.

What the engines compute is tested on the card (tests/gpu) and, kernel by kernel, on the emulator (tests/kernels).
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dsv4c.kernels.compile as kernel_compiler
from dsv4c.cli.main import main
from dsv4c.compiler import BuildReport, build_engine
from dsv4c.cubin_cache import default_cache
from dsv4c.engine.format import Bucket, Kernel, Launch, Record, SectionType
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.errors import EngineFormatError, KernelError
from dsv4c.graph.annotations import Numerics
from dsv4c.kernel_section import spill_warnings
from dsv4c.kernels.compile_request import CompiledKernel, CompileRequest
from dsv4c.kernels.registry import SELECTORS
from dsv4c.plan.execution_plan import KernelVariant
from dsv4c.recipe import Recipe
from dsv4c.runtime.engine import Engine
from dsv4c.step_abi import LaunchFlag
from tests.fixtures import TINY_OFFICIAL

pytestmark = [pytest.mark.nvrtc, pytest.mark.triton]

ELF_MAGIC = b"\x7fELF"


def recipe(numerics: Numerics = "reference") -> Recipe:
    chosen = Recipe.for_target("h100", None).with_overrides(numerics=numerics)
    return replace(chosen, decode_buckets=(1,), mixed_buckets=(16,))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSV4C_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def built(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BuildReport]:
    path = tmp_path_factory.mktemp("engine") / "tiny.dsv4c"
    return path, build_engine(TINY_OFFICIAL, recipe(), path, goldens=False)


def records(reader: EngineReader, kind: type[Record], offset: int, count: int) -> list[Any]:
    plan = reader.section(SectionType.PLAN)
    return [kind.unpack(plan, offset + index * kind.LAYOUT.size) for index in range(count)]


def test_every_kernel_is_in_the_engine(built: tuple[Path, BuildReport]) -> None:
    path, report = built
    reader = read_engine(path)
    header = reader.plan_header
    images = reader.section(SectionType.KERNELS)
    kernels = records(reader, Kernel, header.kernels, header.kernel_count)
    assert kernels and reader.arch == "sm_90a"
    for kernel in kernels:
        image = images[kernel.image_offset : kernel.image_offset + kernel.image_bytes]
        assert bytes(image[:4]) == ELF_MAGIC
    launches = records(reader, Launch, header.launches, header.launch_count)
    assert all(launch.grid_x and launch.block_x and launch.cluster for launch in launches)
    buckets = records(reader, Bucket, header.buckets, header.bucket_count)
    assert {bucket.sm_count for bucket in buckets} == {132, 114} and len(buckets) == 4
    # The last call of an operator has its outputs, the ones before it hand over to it.
    for launch, following in pairwise(launches):
        if launch.flags & LaunchFlag.STAGE:
            assert launch.output_count == 0 and following.name == launch.name
    assert report.calls_per_step >= report.launches_per_step


def test_the_manifest_says_what_every_kernel_takes(built: tuple[Path, BuildReport]) -> None:
    manifest = read_engine(built[0]).manifest
    kernels = manifest["machine_code"]
    assert {kernel["operator"] for kernel in kernels} == set(manifest["kernels"]) <= set(SELECTORS["sm_90a"])
    for kernel in kernels:
        assert 0 < kernel["registers"] <= 255 and kernel["block"] % 32 == 0 and kernel["parameters"]
        assert kernel["compiler"].startswith(("nvrtc", "triton"))
    assert not any("spills" in warning for warning in built[1].warnings)


def test_a_second_build_compiles_nothing_and_gives_the_same_bytes(
    built: tuple[Path, BuildReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiling(requests: list[CompileRequest], *_: object) -> Iterator[None]:
        assert not requests, "a cached kernel was compiled again"
        yield from ()

    monkeypatch.setattr(kernel_compiler, "_compile", compiling)
    for name in ("CUDA_HOME", "TRITON_CACHE_DIR", "NVCC_APPEND_FLAGS", "TRITON_PTXAS_PATH", "LANG", "SOME_VARIABLE"):
        monkeypatch.setenv(name, str(tmp_path))
    again = build_engine(TINY_OFFICIAL, recipe(), tmp_path / "again", goldens=False)
    assert again.kernels_cached == again.kernels and "from the cache" in again.to_text()
    assert (tmp_path / "again").read_bytes() == built[0].read_bytes()
    assert default_cache().usage().entries > 0


def test_exact_numerics_build(cache: Path, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    report = build_engine(TINY_OFFICIAL, recipe("exact"), tmp_path / "e", goldens=False, dump_dir=dumps)
    images = sorted((dumps / "kernels").glob("*.cubin"))
    assert len(images) == report.kernels and images[0].read_bytes()[:4] == ELF_MAGIC
    assert report.kernels > 0 and not any("spills" in warning for warning in report.warnings)


def test_without_a_kernel_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4C_CACHE_DIR", str(tmp_path / "empty"))

    def absent(*_: object) -> None:
        raise KernelError("target h100 needs the package x", hint="pip install 'dsv4c[h100]'")

    monkeypatch.setattr(kernel_compiler, "_compile", absent)
    with pytest.raises(KernelError, match="target h100 needs"):
        build_engine(TINY_OFFICIAL, recipe(), tmp_path / "e", goldens=False)
    assert not (tmp_path / "e").exists() and not list(tmp_path.glob(".e*"))


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is an NVIDIA device")
def test_opening_where_there_is_no_driver(built: tuple[Path, BuildReport]) -> None:
    with pytest.raises(EngineFormatError, match=r"sm_90a needs an NVIDIA driver") as raised:
        Engine.open(built[0])
    assert "dsv4c doctor" in (raised.value.hint or "")


def test_inspect_lists_the_kernels(built: tuple[Path, BuildReport], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(built[0])]) == 0
    out = capsys.readouterr().out
    assert "on 132 SMs" in out and "placed_experts" in out and "registers" in out
    assert main(["inspect", str(built[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["machine_code"]


def test_spills_are_one_warning_a_kernel() -> None:
    def compiled(spill_bytes: int) -> CompiledKernel:
        return CompiledKernel(b"", "k", 32, 0, 0, spill_bytes, 0, 256, "nvrtc")

    kernels = {
        KernelVariant("cuda", "one", "one", (("ROWS", 1),)): compiled(0),
        KernelVariant("cuda", "two", "two", (("ROWS", 1),)): compiled(0),
        KernelVariant("cuda", "two", "two", (("ROWS", 2),)): compiled(8),
        KernelVariant("cuda", "two", "two", (("ROWS", 3),)): compiled(1200),
    }
    assert spill_warnings(kernels) == ["kernel two: 2 of 3 variants spill registers, 1,200 bytes at most"]
