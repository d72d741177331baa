"""What the kernel compilers are asked, and what they answer. Loads no torch: the compilers run in small processes."""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsv4c.errors import KernelError
from dsv4c.kernels.sources import KERNEL_FOLDER

ConstantValue = int | float | str


@dataclass(frozen=True)
class CompileRequest:
    """A kernel's source with all that specialises it (as KernelVariant has it), and the chip."""

    language: Literal["cuda", "triton"]
    source: str
    entry: str
    constants: tuple[tuple[str, ConstantValue], ...]
    warps: int
    stages: int
    arch: str


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code, and what its launch must know."""

    cubin: bytes
    symbol: str
    registers: int  # of a thread
    shared_bytes: int  # static: in the image, not asked for at launch
    dynamic_shared_bytes: int  # what a Triton kernel needs at launch; 0 for CUDA C++, where the call says it
    spill_bytes: int
    local_bytes: int  # stack of a thread, spills included
    threads: int  # of a block: exactly in Triton, at most in CUDA C++ (__launch_bounds__; 0 where it has none)
    tool: str


def repeat_command(request: CompileRequest, folder: Path) -> str:
    """The command line that compiles it again, alone."""
    command = ["python", "-m", "dsv4c.kernels.compile", request.language, request.source, request.entry]
    command += [f"{name}={_constant_text(value)}" for name, value in request.constants]
    if request.language == "triton":
        command += ["--warps", str(request.warps), "--stages", str(request.stages)]
    command += ["--arch", request.arch]
    if folder != KERNEL_FOLDER:
        command += ["--folder", str(folder)]
    return shlex.join(command)


def parse_constant(text: str) -> tuple[str, ConstantValue]:
    """`NAME=VALUE`: an integer, a float, or a string, which may be quoted: NAME="5" is one."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise KernelError(f"{text!r} is not NAME=VALUE")
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return name, value[1:-1]
    return name, _number(value)


def ptx_number(arch: str) -> int:
    """`sm_90a` -> 90."""
    matched = re.fullmatch(r"sm_(\d+)a?", arch)
    if not matched:
        raise KernelError(f"{arch!r} is no CUDA architecture")
    return int(matched[1])


def _number(text: str) -> ConstantValue:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def _constant_text(value: ConstantValue) -> str:
    if isinstance(value, str):
        return value if isinstance(_number(value), str) and not value.startswith('"') else f'"{value}"'
    return repr(value)
