"""Triton kernels on the CPU, by Triton's interpreter.

It must be chosen before Triton is imported, so it runs in a process of its own (this module as a program), which stays
for the next kernel. The memory travels as a file that both map.

Where a kernel has a constexpr INTERPRET it is true: the interpreter multiplies the bits of bf16 operands of `tl.dot`,
and truncates where it should round.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import Tensor

from dsv4c.plan.execution_plan import KernelVariant

ROOT = Path(__file__).parents[2]
_TYPES = {
    "*fp32": torch.float32,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*u8": torch.uint8,
    "*i8": torch.int8,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
_OWN_CONSTANTS = {"SIGNATURE", "ALIGN"}


class InterpreterError(Exception):
    """A kernel failed in the interpreter."""


def run_interpreted(variant: KernelVariant, grid: tuple[int, int, int], memory: Tensor, offsets: Sequence[int]) -> None:
    """Runs a grid on `memory`, uint8, in place; the parameters point to `offsets` in it."""
    process = _process()
    with tempfile.NamedTemporaryFile(dir=_shared_folder()) as file:
        file.write(memory.numpy().data)
        file.flush()
        assert process.stdin and process.stdout
        pickle.dump((variant, grid, file.name, len(memory), list(offsets)), process.stdin)
        process.stdin.flush()
        try:
            error = pickle.load(process.stdout)
        except EOFError:
            _process.cache_clear()
            error = f"the interpreter ended with {process.wait()}, as after an access to an illegal address"
        if error is not None:
            raise InterpreterError(f"{variant.source}.py: {error}")
        file.seek(0)
        memory.copy_(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8))


def _shared_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@functools.cache
def _process() -> subprocess.Popen[bytes]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("package triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )


def stop_interpreter() -> None:
    """Ends the process, where one was started: a worker of pytest may end without Python's own clean-up."""
    if _process.cache_info().currsize:
        process = _process()
        process.kill()
        process.wait()
        _process.cache_clear()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            variant, grid, path, size, offsets = pickle.load(requests)
        except EOFError:
            return
        error = None
        try:
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            _interpret(variant, grid, memory, offsets)
            del memory
        except Exception as failure:  # noqa: BLE001  (the other process raises it)
            error = f"{type(failure).__name__}: {failure}"
        pickle.dump(error, answers)
        answers.flush()


def _interpret(variant: KernelVariant, grid: tuple[int, int, int], memory: Tensor, offsets: Sequence[int]) -> None:
    constants: dict[str, Any] = dict(variant.constants)
    types = constants["SIGNATURE"].split(",")
    assert len(types) == len(offsets), f"{len(types)} types in SIGNATURE, {len(offsets)} pointers"
    module = importlib.import_module(f"dsv4c.kernels.triton.{variant.source}")
    kernel = getattr(module, variant.entry)
    given = {name: value for name, value in constants.items() if name not in _OWN_CONSTANTS}
    if "INTERPRET" in inspect.signature(kernel.fn).parameters:
        given["INTERPRET"] = True
    kernel[grid](*(_typed(memory, offset, kind) for offset, kind in zip(offsets, types, strict=True)), **given)


def _typed(memory: Tensor, offset: int, kind: str) -> Tensor:
    dtype = _TYPES[kind]
    end = offset + (len(memory) - offset) // dtype.itemsize * dtype.itemsize
    return memory[offset:end].view(dtype)


if __name__ == "__main__":
    stdout = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever else prints does not disturb the answers
    _serve(sys.stdin.buffer, stdout)
