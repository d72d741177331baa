"""The process that compiles kernels, one after the other, for `compile.py`: requests come on stdin, answers go out on
stdout, both pickled. It loads neither torch nor, before the first Triton kernel, Triton."""

import os
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from dsv4c.errors import KernelError
from dsv4c.kernels.compile_request import CompiledKernel, CompileRequest
from dsv4c.kernels.nvrtc import compile_cuda
from dsv4c.kernels.sources import KernelSources
from dsv4c.kernels.triton_aot import compile_triton


@dataclass(frozen=True)
class Compiled:
    kernel: CompiledKernel
    log: str


@dataclass(frozen=True)
class Refused:
    """What a KernelError said."""

    message: str
    hint: str | None


@dataclass(frozen=True)
class Crashed:
    """A bug in dsv4c."""

    traceback: str


Answer = Compiled | Refused | Crashed


def main() -> None:
    """Answers until stdin ends, which it does at the latest when the process that asks ends, however it does."""
    answers = os.fdopen(os.dup(1), "wb")
    # What the compilers print must not mix with the answers.
    os.dup2(2, 1)
    sources = KernelSources(Path(sys.argv[1]))
    requests: SimpleQueue[CompileRequest] = SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        pickle.dump(_answer(requests.get(), sources), answers)
        answers.flush()


def _read(requests: SimpleQueue[CompileRequest]) -> None:
    while True:
        try:
            requests.put(pickle.load(sys.stdin.buffer))
        except EOFError:
            # In the middle of a compilation: nobody waits for it any more.
            os._exit(0)


def _answer(request: CompileRequest, sources: KernelSources) -> Answer:
    compiler = compile_cuda if request.language == "cuda" else compile_triton
    try:
        return Compiled(*compiler(request, sources.find(request.language, request.source)))
    except KernelError as error:
        return Refused(error.message, error.hint)
    except Exception:  # noqa: BLE001 - raised again in the process that asked
        return Crashed(traceback.format_exc())
