"""Triton kernels ahead of time: what comes out, and what is refused. Triton itself runs in a worker process."""

from dataclasses import replace
from pathlib import Path

import pytest

from dsv4c.errors import KernelError
from dsv4c.kernels.compile import compile_kernels
from dsv4c.kernels.compile_request import CompiledKernel
from dsv4c.kernels.sources import KernelSources
from dsv4c.plan.execution_plan import KernelVariant
from tests.kernels.kernel_sources import ARCH, SCALED, TIMES, TRITON_VARIANT, elf_abi, with_constants, write_sources

MATMUL = """\
import triton
import triton.language as tl


@triton.jit
def matmul(a, b, y, step, N: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    tl.store(y + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))
"""
DESCRIPTOR = """\
import triton
import triton.language as tl


@triton.jit
def described(x, y, step):
    rows = tl.make_tensor_descriptor(x, [64, 64], [64, 1], [64, 64])
    tl.store(y + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :], rows.load([0, 0]))
"""


def compile_one(variant: KernelVariant, folder: Path) -> CompiledKernel:
    return compile_kernels([variant], ARCH, None, jobs=1, folder=folder)[variant]


@pytest.mark.triton
def test_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    # A variable that would give other code, if it were seen.
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/bin/false")
    monkeypatch.setenv("PTXAS_OPTIONS", "-O0")
    kernel = compile_one(TRITON_VARIANT, write_sources(tmp_path / "kernels"))
    # Its own assembler for this chip would give (0x41, 8), which needs a driver of CUDA 13.
    assert elf_abi(kernel.cubin) == (0x33, 7)
    assert kernel.symbol == "scaled" and b".text.scaled" in kernel.cubin
    assert 0 < kernel.registers <= 64 and kernel.threads == 128
    assert kernel.dynamic_shared_bytes == kernel.shared_bytes == kernel.spill_bytes == 0
    assert kernel.tool == "triton 3.9.0, ptxas 12.9.86"
    assert str(tmp_path).encode() not in kernel.cubin and b"scaled.py" not in kernel.cubin
    assert not list(home.iterdir())


@pytest.mark.triton
def test_shared_memory_and_tensor_cores(tmp_path: Path) -> None:
    folder = write_sources(tmp_path)
    (folder / "triton/matmul.py").write_text(MATMUL)
    variant = KernelVariant("triton", "matmul", "matmul", (("N", 64), ("SIGNATURE", "*bf16,*bf16,*fp32,*i32")), 8, 1)
    kernel = compile_one(variant, folder)
    assert kernel.dynamic_shared_bytes >= 64 * 64 * 2 and kernel.threads == 256


@pytest.mark.triton
def test_alignment_decides_the_width_of_loads(tmp_path: Path) -> None:
    folder = write_sources(tmp_path)
    variant = with_constants(TRITON_VARIANT, WIDTH=1024)
    aligned, loose = compile_one(variant, folder), compile_one(with_constants(variant, ALIGN="2,4,16"), folder)
    assert aligned.cubin != loose.cubin
    assert aligned.cubin == compile_one(with_constants(variant, ALIGN="16,256,16"), folder).cubin


@pytest.mark.triton
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("scaled.py", SCALED.replace("tl.arange(0, WIDTH)", "tl.arange(0, HEIGHT)"), "scaled.py:11: Triton 3.9.0"),
        ("factor.py", TIMES.replace("* FACTOR", "* factor"), "factor.py:7: Triton 3.9.0"),
        ("factor.py", TIMES + "def", "factor.py:8: invalid syntax"),
        ("factor.py", "import numpy\n" + TIMES, "factor.py:1: a Triton kernel may not import numpy"),
        (
            "factor.py",
            "from dsv4c.errors import KernelError\n",
            "factor.py:1: a Triton kernel may not import dsv4c.err",
        ),
        ("scaled.py", SCALED.replace("def scaled", "def scale"), "scaled.py has no @triton.jit function scaled"),
    ],
)
def test_error_names_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = write_sources(tmp_path)
    (folder / "triton" / name).write_text(text)
    with pytest.raises(KernelError) as raised:
        compile_one(TRITON_VARIANT, folder)
    assert f"{folder}/triton/{message}" in raised.value.message


@pytest.mark.triton
@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"SIGNATURE": "*bf16,*i32"}, "do not begin as SIGNATURE says"),
        ({"SIGNATURE": "*bf16,*fp32,*i64"}, "do not begin as SIGNATURE says"),
        ({"ALIGN": "16,16"}, "ALIGN has 2 numbers for 3 pointers"),
        ({"HEIGHT": 4}, "has no parameter HEIGHT"),
    ],
)
def test_constants_must_fit_the_parameters(
    tmp_path: Path, constants: dict[str, int | float | str], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        compile_one(with_constants(TRITON_VARIANT, **constants), write_sources(tmp_path))


@pytest.mark.triton
def test_missing_constant_and_scratch_memory(tmp_path: Path) -> None:
    folder = write_sources(tmp_path)
    without = tuple(pair for pair in TRITON_VARIANT.constants if pair[0] != "WIDTH")
    with pytest.raises(KernelError, match="constant WIDTH is not given"):
        compile_one(replace(TRITON_VARIANT, constants=without), folder)
    (folder / "triton/described.py").write_text(DESCRIPTOR)
    variant = KernelVariant("triton", "described", "described", (("SIGNATURE", "*bf16,*bf16,*i32"),), 4, 1)
    with pytest.raises(KernelError, match="global_scratch_size; the runtime gives none"):
        compile_one(variant, folder)


def test_imports_are_part_of_the_source(tmp_path: Path) -> None:
    folder = write_sources(tmp_path)
    assert set(KernelSources(folder).find("triton", "scaled").files) == {"scaled.py", "factor.py"}
    for line in ("from dsv4c.kernels.triton import factor", "import dsv4c.kernels.triton.factor as f"):
        (folder / "triton/other.py").write_text(line)
        assert set(KernelSources(folder).find("triton", "other").files) == {"other.py", "factor.py"}
