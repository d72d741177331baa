"""CUDA C++ to machine code, by NVRTC: no toolkit, no driver, no GPU.

The source and its headers are handed over in memory, so that no path of this machine can enter the image.
"""

import ctypes
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from dsv4c.errors import KernelError
from dsv4c.kernels.compile_request import CompiledKernel, CompileRequest, ConstantValue
from dsv4c.kernels.ptxas import read_resources
from dsv4c.kernels.sources import SourceText
from dsv4c.kernels.tool_versions import NVRTC_PACKAGE, NVRTC_TOOL, NVRTC_VERSION, package_file

_LIBRARY = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
_BUILTINS = "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.6"
_COMPILATION_FAILED = 6  # NVRTC_ERROR_COMPILATION

_ERROR = re.compile(r"^(\S+?)\((\d+)\): (?:catastrophic )?error", re.MULTILINE)
_MAX_THREADS = re.compile(r"\.(?:maxntid|reqntid) (\d+)(?:, (\d+))?(?:, (\d+))?")


def nvrtc_options(request: CompileRequest) -> list[str]:
    """The compiler's options, in a fixed order. No fast-math: every operation rounds as C++ says."""
    macros = [f"--define-macro={name}={_macro(name, value)}" for name, value in request.constants]
    return [
        f"--gpu-architecture={request.arch}",
        "--std=c++17",
        # Else a header that is not there would be looked for in the folder where the build happens to run.
        "--no-source-include",
        "--ptxas-options=-v",
        f"--define-macro=DSV4C_{request.arch.upper()}=1",
        *sorted(macros),
    ]


def compile_cuda(request: CompileRequest, source: SourceText) -> tuple[CompiledKernel, str]:
    """The kernel and the compiler's log. Raises KernelError with the log where the source has an error."""
    cubin, ptx, log = _compile(source.path.name, source.text, source.headers, nvrtc_options(request), source.path)
    found = read_resources(log, request.entry)
    return CompiledKernel(
        cubin=cubin,
        symbol=request.entry,
        registers=found.registers,
        shared_bytes=found.shared_bytes,
        dynamic_shared_bytes=0,
        spill_bytes=found.spill_bytes,
        local_bytes=found.local_bytes,
        threads=_max_threads(ptx, request.entry),
        tool=NVRTC_TOOL,
    ), log


def _compile(
    name: str, text: str, headers: Mapping[str, str], options: list[str], path: Path
) -> tuple[bytes, str, str]:
    """Image, PTX and log."""
    nvrtc = _load()
    program = ctypes.c_void_p()
    count = len(headers)
    texts = (ctypes.c_char_p * count)(*(header.encode() for header in headers.values()))
    names = (ctypes.c_char_p * count)(*(header.encode() for header in headers))
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), count, texts, names),
        "nvrtcCreateProgram",
    )
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _output(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status == _COMPILATION_FAILED:
            raise KernelError(f"{_place(path, log)}: NVRTC {NVRTC_VERSION} failed\n{log}")
        _check(nvrtc, status, "nvrtcCompileProgram", log)
        return _output(nvrtc, program, "CUBIN"), _output(nvrtc, program, "PTX").decode(errors="replace"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _load() -> ctypes.CDLL:
    # NVRTC opens the builtins by name; loaded first, they are found wherever LD_LIBRARY_PATH points.
    builtins, main = (package_file(NVRTC_PACKAGE, NVRTC_VERSION, name) for name in (_BUILTINS, _LIBRARY))
    try:
        ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(str(main))
    except OSError as error:
        raise KernelError(
            f"package {NVRTC_PACKAGE} {NVRTC_VERSION} cannot be loaded: {error}",
            hint=f"pip install --force-reinstall {NVRTC_PACKAGE}=={NVRTC_VERSION}",
        ) from None
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _output(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, status: int, what: str, log: str = "") -> None:
    if status:
        text = nvrtc.nvrtcGetErrorString(status).decode()
        raise KernelError(f"NVRTC {NVRTC_VERSION}: {what}: {text}\n{log}".rstrip())


def _macro(name: str, value: ConstantValue) -> str:
    """Numbers in parentheses where a sign or the precedence could matter; the kernel casts floats itself."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise KernelError(f"constant {name} is {value}, which has no literal in C++")
        return f"({value!r})"
    return str(int(value)) if value >= 0 else f"({int(value)})"


def _place(path: Path, log: str) -> str:
    """File and line of the first error."""
    found = _ERROR.search(log)
    return f"{path.with_name(Path(found[1]).name)}:{found[2]}" if found else str(path)


def _max_threads(ptx: str, entry: str) -> int:
    """What __launch_bounds__ says; 0 where it is absent."""
    head = ptx.partition(f".entry {entry}(")[2].partition("{")[0]
    found = _MAX_THREADS.search(head)
    if not found:
        return 0
    x, y, z = (int(size or 1) for size in found.groups())
    return x * y * z
