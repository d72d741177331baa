"""Runs one CPU kernel of the runtime library on torch tensors, the way a launch of a plan would.

The library is the installed one or that of `DSV4C_LIBRARY`; where there is none, the kernels are compiled once per run.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsv4c.graph.expert_ops
import dsv4c.graph.fused_ops
import dsv4c.graph.ops
import dsv4c.graph.sampling
import dsv4c.graph.state_ops  # noqa: F401  (all of them register operators)
from dsv4c.errors import SessionError
from dsv4c.runtime.library import library_path
from dsv4c.step_abi import ArgKind, DType

RUNTIME = Path(__file__).parents[2] / "dsv4c" / "runtime"
DTYPES = {
    torch.float32: DType.F32,
    torch.bfloat16: DType.BF16,
    torch.float16: DType.F16,
    torch.float8_e4m3fn: DType.F8E4M3,
    torch.float8_e8m0fnu: DType.F8E8M0,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.float4_e2m1fn_x2: DType.F4E2M1X2,
}
# Bytes after every output that a kernel must not touch.
GUARD_BYTES = 256
POISON = 0xFF  # a NaN in every float format


class _Arg(ctypes.Structure):
    """dsv4c_testing_arg."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32),
        ("ndim", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    with contextlib.suppress(SessionError):
        return _declared(ctypes.CDLL(str(library_path())))
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("neither the runtime library nor a C++ compiler is installed")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/libdsv4c_kernels.so"
        core = [str(RUNTIME / "src" / name) for name in ("testing.cc", "thread_pool.cc")]
        kernels = sorted(str(source) for source in (RUNTIME / "src" / "cpu").rglob("*.cc"))
        flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
        includes = [f"-I{RUNTIME / 'include'}", f"-I{RUNTIME / 'src'}"]
        subprocess.run([compiler, *flags, *includes, *core, *kernels, "-o", path], check=True)
        return _declared(ctypes.CDLL(path))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.dsv4c_testing_run_kernel.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(_Arg),
        ctypes.c_uint32,
        ctypes.c_uint32,
    ]
    library.dsv4c_testing_simd_name.argtypes = [ctypes.c_uint32]
    library.dsv4c_testing_simd_name.restype = ctypes.c_char_p
    library.dsv4c_testing_use_simd.argtypes = [ctypes.c_char_p]
    library.dsv4c_testing_topology.argtypes = [ctypes.POINTER(ctypes.c_int32), *[ctypes.c_uint64] * 4]
    library.dsv4c_testing_error.restype = ctypes.c_char_p
    return library


def topology_fault(values: Sequence[int], experts: int, groups: int, sm_count: int) -> str | None:
    """What the runtime finds wrong with a topology table."""
    array = (ctypes.c_int32 * len(values))(*values)
    if not _library().dsv4c_testing_topology(array, len(values), experts, groups, sm_count):
        return None
    found: bytes = _library().dsv4c_testing_error()
    return found.decode()


def simd_variants() -> list[str]:
    """Names of the variants of the inner loops that this processor runs, best first."""
    names = []
    while (name := _library().dsv4c_testing_simd_name(len(names))) is not None:
        names.append(name.decode())
    return names


def use_simd(name: str | None) -> None:
    """Make every kernel of the process use that variant; None: the best."""
    if _library().dsv4c_testing_use_simd(None if name is None else name.encode()):
        raise RuntimeError(f"this processor has no variant {name!r}; it has {', '.join(simd_variants())}")


def _operator(name: str) -> Any:
    return getattr(torch.ops.dsv4, name).default


def _tensor_arg(tensor: Tensor) -> _Arg:
    dims = tensor.dim()
    return _Arg(
        kind=ArgKind.TENSOR,
        dtype=DTYPES[tensor.dtype],
        ndim=dims,
        data=tensor.data_ptr(),
        size=(ctypes.c_int64 * 4)(*tensor.shape, *[1] * (4 - dims)),
        stride=(ctypes.c_int64 * 4)(*tensor.stride(), *[0] * (4 - dims)),
    )


def _arg(value: Any) -> _Arg:
    if value is None:
        return _Arg(kind=ArgKind.NONE)
    if isinstance(value, Tensor):
        return _tensor_arg(value)
    if isinstance(value, torch.dtype):
        return _Arg(kind=ArgKind.INT, integer=DTYPES[value])
    if isinstance(value, float):
        return _Arg(kind=ArgKind.FLOAT, real=value)
    return _Arg(kind=ArgKind.INT, integer=int(value))


def _output_shapes(name: str, args: Sequence[Any]) -> list[tuple[torch.Size, torch.dtype]]:
    """From the operator's fake, as in a plan."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = _operator(name)(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    if results is None:
        return []
    return [(result.shape, result.dtype) for result in (results if isinstance(results, tuple) else (results,))]


def _records(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
    """The arguments of a launch."""
    arguments = _operator(name)._schema.arguments
    assert len(arguments) == len(args), f"{name} takes {len(arguments)} arguments"
    values = [
        float(value) if str(argument.type) == "float" else value
        for argument, value in zip(arguments, args, strict=True)
    ]
    records = [_arg(value) for value in (*values, *outputs)]
    return (_Arg * len(records))(*records)


def _launch(name: str, records: Any, threads: int) -> None:
    library = _library()
    if library.dsv4c_testing_run_kernel(name.encode(), records, len(records), threads):
        raise RuntimeError(f"{name}: {library.dsv4c_testing_error().decode()}")


def run_kernel(name: str, *args: Any, threads: int = 2) -> tuple[Tensor, ...]:
    """The outputs of kernel `name`; arguments that its operator mutates are written in place."""
    buffers, outputs = [], []
    for shape, dtype in _output_shapes(name, args):
        size = shape.numel() * dtype.itemsize
        buffers.append(torch.full((size + GUARD_BYTES,), POISON, dtype=torch.uint8))
        outputs.append(buffers[-1][:size].view(dtype).view(shape))
    _launch(name, _records(name, args, outputs), threads)
    for buffer in buffers:
        assert bool((buffer[-GUARD_BYTES:] == POISON).all()), f"{name} wrote behind an output"
    return tuple(outputs)


def kernel_call(name: str, *args: Any, threads: int = 2) -> Callable[[], None]:
    """Kernel `name` with everything but the launch itself done: for measuring."""
    outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in _output_shapes(name, args)]
    records = _records(name, args, outputs)
    kept = (args, outputs)  # the records only point at them

    def call() -> None:
        assert kept
        _launch(name, records, threads)

    return call


def reference(name: str, *args: Any) -> tuple[Tensor, ...]:
    results = _operator(name)(*args)
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    # Sums in another order differ by rounding relative to the size of their terms, for which the largest result stands.
    scale = float(expected.float().abs().max()) if expected.numel() else 0.0
    # One unit in the last place of a bfloat16 is up to 2^-7 of it: values at a rounding border may flip.
    relative = 2.0**-7 if expected.dtype is torch.bfloat16 else tolerance
    torch.testing.assert_close(actual.float(), expected.float(), rtol=relative, atol=tolerance * scale + 1e-30)
    if expected.dtype is torch.bfloat16:
        flipped = (actual != expected).float().mean()
        assert flipped < 0.05, f"{flipped:.1%} of the bfloat16 values differ"


def check_kernel(
    name: str,
    *args: Any,
    exact: bool = False,
    tolerance: float = 1e-5,
    rows: Sequence[int] = (),
    expected: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Compares a kernel without state with its reference body, bit for bit if `exact`; returns the kernel's outputs.

    `expected` stands for the reference's results where it does not take the arguments.

    Also: 1, 2 and 3 threads give the same bits, and so does a step of one row, for the first, a middle and the last
    one. `rows` are the arguments with a row per row of the step.
    """
    expected = reference(name, *args) if expected is None else expected
    actual = run_kernel(name, *args)
    for ours, theirs in zip(actual, expected, strict=True):
        if exact:
            assert same_bits(ours, theirs)
        else:
            assert_close(ours, theirs, tolerance)
    for threads in (1, 3):
        for a, b in zip(run_kernel(name, *args, threads=threads), actual, strict=True):
            assert same_bits(a, b), f"{name} depends on the number of threads"
    count = args[rows[0]].shape[0] if rows else 0
    for row in sorted({0, count // 2, count - 1}) if count > 1 else []:
        alone = [arg[row : row + 1] if i in rows else arg for i, arg in enumerate(args)]
        for a, b in zip(run_kernel(name, *alone), actual, strict=True):
            assert same_bits(a, b[row : row + 1]), f"row {row} of {name} depends on the rows beside it"
    return actual
