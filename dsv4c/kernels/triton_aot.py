"""Triton kernels to machine code, ahead of time: no driver, no GPU.

A kernel `triton/<source>.py` has one `@triton.jit` function of its own name. Its parameters are pointers, one for each
tensor of the call, then `step`, then constexprs. The constants of the variant fill the constexprs; two more tell what
Triton takes from live tensors otherwise: SIGNATURE, the pointers' types as `*bf16,*u8,*i32`, the last for `step`, and
ALIGN, the bytes every pointer is known to be a multiple of (`16,16,1,16`; all of them 16 where it is absent).

It runs in a worker process with an environment of its own (`compile.py`), which the caller's cannot change.
"""

import contextlib
import importlib
import inspect
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsv4c.kernels.triton
from dsv4c.errors import KernelError
from dsv4c.kernels.compile_request import CompiledKernel, CompileRequest, ConstantValue, ptx_number
from dsv4c.kernels.ptxas import read_resources
from dsv4c.kernels.sources import TRITON_PACKAGE as KERNEL_PACKAGE
from dsv4c.kernels.sources import SourceText
from dsv4c.kernels.tool_versions import TRITON_PACKAGE, TRITON_TOOL, TRITON_VERSION, package_file

_PTXAS = "triton/backends/nvidia/bin/ptxas"
_OWN_CONSTANTS = {"SIGNATURE", "ALIGN"}


def triton_options(request: CompileRequest) -> dict[str, int]:
    return {"num_warps": request.warps, "num_stages": request.stages}


def triton_environment(scratch: Path) -> dict[str, str]:
    """What Triton reads from the environment; `scratch` is a folder that goes away."""
    try:
        ptxas = str(package_file(TRITON_PACKAGE, TRITON_VERSION, _PTXAS))
    except KernelError:
        return {}  # compile_triton says it, if a Triton kernel comes
    return {
        "TRITON_HOME": str(scratch),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        # Else the names and paths of sources get into the image.
        "TRITON_DISABLE_LINE_INFO": "1",
        # Its log says how many registers the kernel has.
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_PTXAS_PATH": ptxas,
        # "Blackwell" is what Triton calls the assembler for 9.0 and up; its own makes images for CUDA 13 drivers only.
        "TRITON_PTXAS_BLACKWELL_PATH": ptxas,
    }


def compile_triton(request: CompileRequest, source: SourceText) -> tuple[CompiledKernel, str]:
    """The kernel and the assembler's log. Raises KernelError where the source has an error."""
    package_file(TRITON_PACKAGE, TRITON_VERSION, _PTXAS)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError

    path = source.path
    # The folder of the sources may be another than the installed one.
    dsv4c.kernels.triton.__path__ = [str(path.parent)]
    try:
        module = importlib.import_module(f"{KERNEL_PACKAGE}.{request.source}")
    except SyntaxError as error:
        raise KernelError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    function = getattr(module, request.entry, None)
    if not isinstance(function, triton.JITFunction):
        raise KernelError(f"{path} has no @triton.jit function {request.entry}")

    parameters = _bind(request, inspect.signature(function.fn).parameters, path)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            compiled = triton.compile(
                ASTSource(function, parameters.signature, parameters.constexprs, parameters.attributes),
                target=GPUTarget("cuda", ptx_number(request.arch), 32),
                options=triton_options(request),
            )
    except CompilationError as error:
        raise KernelError(f"{_place(error, source)}: Triton {TRITON_VERSION} failed\n{error}") from error
    except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError) as error:
        log = printed.getvalue().strip()
        raise KernelError(f"{path}: Triton {TRITON_VERSION} failed: {error}\n{log}".rstrip()) from error

    metadata = compiled.metadata
    for memory in ("global_scratch_size", "profile_scratch_size"):
        if size := getattr(metadata, memory):
            raise KernelError(f"{path}: the kernel wants {size} bytes of {memory}; the runtime gives none")
    found = read_resources(printed.getvalue(), metadata.name)
    return CompiledKernel(
        cubin=compiled.asm["cubin"],
        symbol=metadata.name,
        registers=found.registers,
        shared_bytes=found.shared_bytes,
        dynamic_shared_bytes=metadata.shared,
        spill_bytes=found.spill_bytes,
        local_bytes=found.local_bytes,
        threads=32 * metadata.num_warps,
        tool=TRITON_TOOL,
    ), printed.getvalue()


@dataclass(frozen=True)
class _Parameters:
    """As ASTSource wants them."""

    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], ConstantValue]
    attributes: dict[tuple[int, ...], list[list[Any]]]


def _bind(request: CompileRequest, parameters: Mapping[str, inspect.Parameter], path: Path) -> _Parameters:
    constants = dict(request.constants)
    pointers = str(constants.get("SIGNATURE", "")).split(",")
    aligned = [int(bytes_) for bytes_ in str(constants.get("ALIGN", "16" + ",16" * (len(pointers) - 1))).split(",")]
    names = list(parameters)
    if len(names) < len(pointers) or names[len(pointers) - 1] != "step" or pointers[-1] != "*i32":
        raise KernelError(f"{path}: parameters {names} do not begin as SIGNATURE says: {','.join(pointers)}")
    if len(aligned) != len(pointers):
        raise KernelError(f"{path}: ALIGN has {len(aligned)} numbers for {len(pointers)} pointers")
    signature = dict(zip(names, pointers, strict=False))
    constexprs: dict[tuple[int, ...], ConstantValue] = {}
    for index, name in enumerate(names[len(pointers) :], len(pointers)):
        signature[name] = "constexpr"
        value = constants.get(name, parameters[name].default)
        if value is inspect.Parameter.empty:
            raise KernelError(f"{path}: constant {name} is not given")
        constexprs[index,] = value
    if unknown := constants.keys() - signature.keys() - _OWN_CONSTANTS:
        raise KernelError(f"{path}: {request.entry} has no parameter {', '.join(sorted(unknown))}")
    attributes: dict[tuple[int, ...], list[list[Any]]] = {
        (index,): [["tt.divisibility", 16]] for index, bytes_ in enumerate(aligned) if bytes_ % 16 == 0
    }
    return _Parameters(signature, constexprs, attributes)


def _place(error: BaseException, source: SourceText) -> str:
    """File and line: an error of a called function hangs below that of its caller, and lines count from its `def`."""
    place = str(source.path)
    cause: BaseException | None = error
    while cause is not None:
        text, node = getattr(cause, "src", None), getattr(cause, "node", None)
        if text and node is not None:
            for name, content in source.files.items():
                before, found, _ = content.partition(text.rstrip())
                if found:
                    place = f"{source.path.with_name(name)}:{before.count(chr(10)) + node.lineno}"
        cause = cause.__cause__
    return place
