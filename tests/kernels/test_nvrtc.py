"""CUDA C++ through NVRTC: what comes out, what enters it, and what a person reads when it fails."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dsv4c.errors import KernelError
from dsv4c.kernels import nvrtc, tool_versions
from dsv4c.kernels.nvrtc import compile_cuda, nvrtc_options
from dsv4c.kernels.ptxas import Resources, read_resources
from dsv4c.kernels.sources import KernelSources
from tests.kernels.kernel_sources import CUDA_VARIANT, elf_abi, request, with_constants, write_sources

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for _Z6helperf
ptxas         .     64 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 80 bytes cumulative stack size, 1024 bytes smem, 8 bytes cmem[2]
ptxas info    : Compiling entry function 'ab' for 'sm_90a'
ptxas info    : Function properties for ab
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""


def test_resources_of_an_entry() -> None:
    assert read_resources(LOG, "a") == Resources(40, 1024, 24, 80)
    assert read_resources(LOG, "ab") == Resources(10, 0, 0, 0)
    with pytest.raises(KernelError, match="has no kernel b, only a, ab"):
        read_resources(LOG, "b")


def test_options_are_in_a_fixed_order() -> None:
    one = replace(request(CUDA_VARIANT), constants=(("B", -1), ("A", 2), ("EPS", 1e-06), ("T", "bf16")))
    assert nvrtc_options(one) == [
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        "--no-source-include",
        "--ptxas-options=-v",
        "--define-macro=DSV4C_SM_90A=1",
        "--define-macro=A=2",
        "--define-macro=B=(-1)",
        "--define-macro=EPS=(1e-06)",
        "--define-macro=T=bf16",
    ]
    assert nvrtc_options(one) == nvrtc_options(replace(one, constants=one.constants[::-1]))
    with pytest.raises(KernelError, match="constant EPS is inf"):
        nvrtc_options(replace(one, constants=(("EPS", float("inf")),)))


@pytest.mark.nvrtc
def test_compiles(tmp_path: Path) -> None:
    sources = KernelSources(write_sources(tmp_path))
    kernel, log = compile_cuda(request(CUDA_VARIANT), sources.find("cuda", "scale"))
    assert elf_abi(kernel.cubin) == (0x33, 7)
    assert kernel.symbol == "scale_rows" and b".text.scale_rows" in kernel.cubin
    assert 0 < kernel.registers <= 32 and kernel.shared_bytes == 256 * 4 and kernel.threads == 256
    assert kernel.spill_bytes == kernel.local_bytes == kernel.dynamic_shared_bytes == 0
    assert kernel.tool == "nvrtc 12.6.85" and "scale_rows" in log
    # No trace of where the source was.
    assert str(tmp_path).encode() not in kernel.cubin and b".cuh" not in kernel.cubin


@pytest.mark.nvrtc
def test_stack_is_seen(tmp_path: Path) -> None:
    sources = KernelSources(write_sources(tmp_path))
    variant = replace(with_constants(CUDA_VARIANT, SPILL=500), entry="spill")
    kernel, _ = compile_cuda(request(variant), sources.find("cuda", "scale"))
    assert kernel.local_bytes >= 2000 and kernel.threads == 0


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("name", "broken", "place"),
    [
        ("scale.cu", "row[WIDTH - 1 - thread]", "scale.cu:9: "),
        ("factor.cuh", "(float)FACTORS", "factor.cuh:4: "),
    ],
)
def test_error_names_file_and_line(tmp_path: Path, name: str, broken: str, place: str) -> None:
    path = write_sources(tmp_path) / "cuda" / name
    good = {"scale.cu": "row[WIDTH - 1 - threadIdx.x]", "factor.cuh": "(float)FACTOR"}[name]
    path.write_text(path.read_text().replace(good, broken))
    with pytest.raises(KernelError) as raised:
        compile_cuda(request(CUDA_VARIANT), KernelSources(tmp_path).find("cuda", "scale"))
    assert f"{tmp_path}/cuda/{place}" in raised.value.message and "is undefined" in raised.value.message


@pytest.mark.nvrtc
def test_absent_header_and_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_sources(tmp_path)
    with pytest.raises(KernelError, match="no kernel scale_row, only scale_rows"):
        compile_cuda(replace(request(CUDA_VARIANT), entry="scale_row"), KernelSources(folder).find("cuda", "scale"))
    # One where the build runs is another's.
    (folder / "cuda/step.cuh").rename(tmp_path / "step.cuh")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KernelError, match=r'factor.cuh:3: .*\n.*could not open source file "step.cuh"'):
        compile_cuda(request(CUDA_VARIANT), KernelSources(folder).find("cuda", "scale"))


class _Distribution:
    version = "12.9.86"

    def locate_file(self, path: str) -> Path:
        return Path("/nowhere", path)


def _absent(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (_absent, "needs the package nvidia-cuda-nvrtc-cu12 12.6.85 to compile kernels; it is not installed"),
        (lambda name: _Distribution(), "needs nvidia-cuda-nvrtc-cu12 12.6.85 to compile kernels; 12.9.86 is installed"),
    ],
    ids=["absent", "other"],
)
def test_without_the_pinned_package(find: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_versions, "distribution", find)
    nvrtc._load.cache_clear()
    source = KernelSources(write_sources(tmp_path)).find("cuda", "scale")
    with pytest.raises(KernelError, match=message) as raised:
        compile_cuda(request(CUDA_VARIANT), source)
    assert raised.value.hint == "pip install 'dsv4c[h100]'"
