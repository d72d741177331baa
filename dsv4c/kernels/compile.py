"""Kernel variants to machine code, in parallel and through the cubin cache.

    python -m dsv4c.kernels.compile cuda SOURCE ENTRY NAME=VALUE...

compiles one kernel without the cache and says what it takes; so do the hints of failed compiles.
"""

import argparse
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from dsv4c.cubin_cache import CachedCubin, CubinCache, cache_key
from dsv4c.errors import KernelError
from dsv4c.kernels.compile_request import CompiledKernel, CompileRequest, parse_constant, repeat_command
from dsv4c.kernels.nvrtc import nvrtc_options
from dsv4c.kernels.scratch import scratch_folder
from dsv4c.kernels.sources import KERNEL_FOLDER, KernelSources
from dsv4c.kernels.tool_versions import NVRTC_TOOL, TRITON_TOOL
from dsv4c.kernels.triton_aot import triton_environment, triton_options
from dsv4c.kernels.worker import Answer, Compiled, Crashed, Refused
from dsv4c.target import Target
from dsv4c.wording import counted

if TYPE_CHECKING:  # it loads torch, and the command above should start at once
    from dsv4c.plan.execution_plan import KernelCall, KernelVariant

_REGISTERS_PER_BLOCK = 65536

Progress = Callable[[int, int], None]


def compile_kernels(
    variants: Iterable["KernelVariant"],
    arch: str,
    cache: CubinCache | None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    folder: Path = KERNEL_FOLDER,
) -> dict["KernelVariant", CompiledKernel]:
    """The machine code of every distinct variant, in the order given.

    What the cache has is not compiled; the rest is, by `jobs` processes (as many as this one has processors). Raises
    KernelError, with the compiler's text and a command that repeats it, and then compiles no more.
    """
    requests = {variant: _request(variant, arch) for variant in variants}
    sources = KernelSources(folder)
    keys = {variant: _key(request, sources) for variant, request in requests.items()}
    done: dict[KernelVariant, CompiledKernel] = {}
    for variant, key in keys.items():
        if cache and (kernel := _from_cache(cache.get(key))):
            done[variant] = kernel
    if progress:
        progress(len(done), len(requests))
    missing = {request: variant for variant, request in requests.items() if variant not in done}
    # Closed here and not when it is collected: an interrupt may come while this loop has the turn.
    with closing(_compile(list(missing), folder, jobs or len(os.sched_getaffinity(0)))) as results:
        for request, compiled in results:
            variant = missing[request]
            kernel = done[variant] = compiled.kernel
            if cache:
                facts = asdict(kernel)
                del facts["cubin"]
                cache.put(keys[variant], kernel.cubin, facts)
            if progress:
                progress(len(done), len(requests))
    return {variant: done[variant] for variant in requests}


def require_launchable(call: "KernelCall", kernel: CompiledKernel, target: Target) -> None:
    """Raise KernelError where the card would refuse the call: what only the compiled kernel tells."""
    where = f"{call.variant.source}: {call.variant.entry}, {counted(call.block, 'thread')} a block"
    if call.block > kernel.threads > 0 or (call.variant.language == "triton" and call.block != kernel.threads):
        raise KernelError(f"{where}: it is compiled for {kernel.threads}")
    # A warp's registers come in units of 8 a thread.
    registers = -(-call.block // 32) * 32 * (-(-kernel.registers // 8) * 8)
    if registers > _REGISTERS_PER_BLOCK:
        raise KernelError(f"{where} of {kernel.registers} registers each are {registers}, a block can have 65,536")
    shared = kernel.shared_bytes + (call.shared_bytes or kernel.dynamic_shared_bytes)
    if shared > target.smem_per_block:
        raise KernelError(f"{where}: {shared} bytes of shared memory, a block can have {target.smem_per_block}")


def _request(variant: "KernelVariant", arch: str) -> CompileRequest:
    return CompileRequest(
        variant.language,
        variant.source,
        variant.entry,
        variant.constants,
        variant.warps,
        variant.stages,
        arch,
    )


def _key(request: CompileRequest, sources: KernelSources) -> str:
    """Nothing of this machine enters it: no path, no environment."""
    is_cuda = request.language == "cuda"
    return cache_key(
        {
            "language": request.language,
            "source": request.source,
            "files": sources.find(request.language, request.source).digests,
            "entry": request.entry,
            "constants": [[name, type(value).__name__, value] for name, value in request.constants],
            "options": nvrtc_options(request) if is_cuda else triton_options(request),
            "arch": request.arch,
            "tool": NVRTC_TOOL if is_cuda else TRITON_TOOL,
        }
    )


def _from_cache(entry: CachedCubin | None) -> CompiledKernel | None:
    names = {field.name for field in fields(CompiledKernel)} - {"cubin"}
    if entry is None or entry.facts.keys() != names:
        return None
    return CompiledKernel(cubin=entry.cubin, **entry.facts)  # type: ignore[arg-type]


def _compile(
    requests: list[CompileRequest], folder: Path, jobs: int
) -> Generator[tuple[CompileRequest, Compiled], None, None]:
    """In the order they become ready. However it ends, no process stays."""
    if not requests:
        return
    jobs = min(jobs, len(requests))
    with scratch_folder() as scratch:
        idle: SimpleQueue[_Worker] = SimpleQueue()
        workers = [_Worker(folder, scratch / str(index)) for index in range(jobs)]
        for worker in workers:
            idle.put(worker)

        def compile_one(request: CompileRequest) -> Compiled:
            worker = idle.get()
            try:
                return worker.compile(request)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(jobs)
        try:
            # Triton takes longer: a late one would set the finish time.
            ordered = sorted(requests, key=lambda request: request.language != "triton")
            running = {pool.submit(compile_one, request): request for request in ordered}
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            for worker in workers:
                worker.stop()
            pool.shutdown(cancel_futures=True)


class _Worker:
    """A process that compiles; see worker.py. It starts with its first request."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._starting = threading.Lock()

    def compile(self, request: CompileRequest) -> Compiled:
        answer = self._ask(request)
        if isinstance(answer, Compiled):
            return answer
        if isinstance(answer, Crashed):
            raise RuntimeError(f"compiling {request} failed\n{answer.traceback}")
        raise KernelError(answer.message, hint=answer.hint or f"repeat with: {repeat_command(request, self.folder)}")

    def _ask(self, request: CompileRequest) -> Answer:
        with self._starting:
            if self._stopped:
                return Refused("stopped", None)
            process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            answer: Answer = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            self.stop()
            printed = Path(self.scratch, "stderr").read_text(errors="replace")[-2000:].strip()
            message = f"the compiler of {request.source}: {request.entry} ended with status {process.returncode}"
            return Refused(f"{message}\n{printed}".rstrip(), None)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self.scratch.mkdir()
        # Nothing else of the caller's environment: variables of Triton and CUDA would change the code.
        environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        environment |= {
            "HOME": str(self.scratch),
            "TMPDIR": str(self.scratch),
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **triton_environment(self.scratch),
        }
        with Path(self.scratch, "stderr").open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", "from dsv4c.kernels.worker import main; main()", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops these
            )

    def stop(self) -> None:
        """Ends it, whatever it does; from then on it takes nothing."""
        with self._starting:
            self._stopped = True
            if self._process is None:
                return
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Compiles one kernel and prints what it takes."""
    parser = argparse.ArgumentParser(prog="python -m dsv4c.kernels.compile", description="Compile one kernel.")
    parser.add_argument("language", choices=("cuda", "triton"))
    parser.add_argument("source", help="the file's stem")
    parser.add_argument("entry")
    parser.add_argument("constants", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--warps", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=KERNEL_FOLDER, help="where cuda/ and triton/ are")
    parser.add_argument("--output", type=Path, help="where to write the cubin")
    options = parser.parse_intermixed_args(arguments)
    try:
        request = CompileRequest(
            options.language,
            options.source,
            options.entry,
            tuple(sorted(map(parse_constant, options.constants))),
            options.warps if options.language == "triton" else 0,
            options.stages if options.language == "triton" else 0,
            options.arch,
        )
        ((_, compiled),) = _compile([request], options.folder, 1)
    except KernelError as error:
        print(error.to_text(), file=sys.stderr)
        return error.exit_code
    if compiled.log:
        print(compiled.log, file=sys.stderr)
    kernel = compiled.kernel
    for name, value in asdict(kernel).items():
        print(f"{name:<20} {f'{len(value)} bytes' if name == 'cubin' else value}")
    if options.output is not None:
        options.output.write_bytes(kernel.cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
