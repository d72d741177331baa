"""Engines and sessions: the runtime library with numpy arrays. Needs neither torch nor the compiler.

with Engine.open("model.dsv4c") as engine:
    for token in engine.generate(prompt_ids, max_new_tokens=32):
        ...
"""

import ctypes
import json
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dsv4c.engine.format import SectionType
from dsv4c.errors import EngineFormatError, SessionError
from dsv4c.runtime import library as lib
from dsv4c.runtime.step_arrays import INT32_MAX, Ids, IntArray, StepArrays, address_of, int32_array, mask_words
from dsv4c.runtime.trace import LaunchTime, TraceOutput, layer_of, read_trace_output


@dataclass(frozen=True)
class EngineInfo:
    arch: str
    vocab_size: int
    max_context: int
    layer_count: int
    hidden_size: int
    block_tokens: int
    rollback_rows: int  # how far below its highest position a slot can be truncated
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    world_size: int
    rank: int
    weight_bytes: int
    threads: int
    device: str | None = None  # the GPU that holds the weights, such as "GPU 0 (NVIDIA H200)"; None on the cpu
    sm_count: int = 0  # its streaming multiprocessors; 0 on the cpu
    weight_seconds: float = 0.0  # that opening took to bring the weights to the GPU; 0 on the cpu, which maps them
    counted_layers: int = 0  # whose routing `Session.routing_counts` tells; 0: the engine was built without
    counted_experts: int = 0  # of each of them


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0  # 0: the largest logit
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class RoutingCounts:
    """How often each expert was chosen: row i of `counts` [layers, experts] is of layer `layers[i]`."""

    layers: tuple[int, ...]
    counts: npt.NDArray[np.uint64]


TraceCallback = Callable[[int, str, str, int | None, list[TraceOutput]], None]


class _Handle:
    """A pointer of the library, released with its last reference: a call that is running holds one."""

    def __init__(self, pointer: int | None, release: Callable[[int | None], None]) -> None:
        self.pointer = pointer
        self._release = release

    def __del__(self) -> None:
        self._release(self.pointer)


class Session:
    """State for a fixed number of slots (sequences). Used by one thread at a time."""

    def __init__(self, handle: _Handle, info: EngineInfo, slots: int, context: int) -> None:
        self._handle: _Handle | None = handle
        self._library = lib.load_library()
        self._vocab_size = info.vocab_size
        self._counted = info.counted_layers, info.counted_experts
        self.slots = slots
        self.context = context

    def _open(self) -> _Handle:
        if self._handle is None:
            raise SessionError("the session is closed")
        return self._handle

    def close(self) -> None:
        """Give the memory back; a call that runs in another thread ends first."""
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(
        self, token_ids: Ids, slots: Ids, positions: Ids, logits_rows: Ids | None = None
    ) -> npt.NDArray[np.float32]:
        """Run token rows; float32 logits [rows, vocab] of `logits_rows` (None: every row; empty: none)."""
        handle = self._open()
        arrays = StepArrays(token_ids, slots, positions, logits_rows)
        logits = np.empty((arrays.output_rows, self._vocab_size), np.float32)
        status = self._library.dsv4c_session_step(handle.pointer, arrays.pointer(), logits.ctypes.data, logits.size)
        lib.check(status)
        return logits

    def sample(
        self,
        token_ids: Ids,
        slots: Ids,
        positions: Ids,
        logits_rows: Ids | None,
        sampling: Sampling | Sequence[Sampling],
        masks: npt.NDArray[Any] | None = None,
    ) -> IntArray:
        """Run token rows; one token id per row of `logits_rows`, -1 where its mask allows none.

        `sampling` is one for all rows or one each. `masks`: bool [rows, vocab], or int32 [rows, ceil(vocab/32)] with
        the lowest bit first; true = allowed.
        """
        handle = self._open()
        arrays = StepArrays(token_ids, slots, positions, logits_rows)
        rows = arrays.output_rows
        each = [sampling] * rows if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != rows:
            raise SessionError(f"{len(each)} samplings for {rows} logits rows")
        with np.errstate(over="ignore"):  # infinite then, which the session refuses
            temperature = np.array([s.temperature for s in each], np.float32)
        top_k = int32_array([s.top_k for s in each], "top_k")
        top_p = np.array([s.top_p for s in each], np.float32)
        seed = np.array([s.seed & 0xFFFFFFFFFFFFFFFF for s in each], np.uint64)
        words = None if masks is None else mask_words(masks, rows, self._vocab_size)
        struct = lib.SamplingArrays(
            struct_size=ctypes.sizeof(lib.SamplingArrays),
            temperature=address_of(temperature),
            top_k=address_of(top_k),
            top_p=address_of(top_p),
            seed=address_of(seed),
            mask=address_of(words),
        )
        ids = np.empty(rows, np.int32)
        status = self._library.dsv4c_session_sample(
            handle.pointer, arrays.pointer(), ctypes.byref(struct), ids.ctypes.data
        )
        lib.check(status)
        return ids

    def _run_traced(self, arrays: StepArrays, visit: Callable[[lib.TraceEvent], None]) -> None:
        handle = self._open()
        raised: list[BaseException] = []

        def on_launch(_: object, event: Any) -> int:
            try:
                visit(event.contents)
            except BaseException as error:  # noqa: BLE001 (raised below, past the C frames)
                raised.append(error)
                return 1
            return 0

        function = lib.TRACE_FUNCTION(on_launch)
        status = self._library.dsv4c_session_trace(handle.pointer, arrays.pointer(), function, None)
        if raised:
            raise raised[0]
        lib.check(status)

    def trace(self, token_ids: Ids, slots: Ids, positions: Ids, callback: TraceCallback) -> None:
        """A step with the logits of every row that calls `callback` after every operator.

        `callback(launch index in its bucket, kernel, graph node, layer or None, outputs)`. An exception of the
        callback stops the step and is raised here; the step then counts as not run.
        """

        def visit(event: lib.TraceEvent) -> None:
            outputs = [read_trace_output(event.outputs[i]) for i in range(event.output_count)]
            callback(event.launch, event.kernel.decode(), event.node.decode(), layer_of(event), outputs)

        self._run_traced(StepArrays(token_ids, slots, positions, None), visit)

    def profile(self, token_ids: Ids, slots: Ids, positions: Ids, logits_rows: Ids | None = None) -> list[LaunchTime]:
        """A step that returns the time of every launch; on a GPU that of every operator, which may take several."""
        times = []

        def visit(event: lib.TraceEvent) -> None:
            times.append(
                LaunchTime(
                    event.launch,
                    event.kernel.decode(),
                    event.node.decode(),
                    layer_of(event),
                    event.row_count,
                    event.seconds,
                    event.bytes_moved,
                    event.flops,
                )
            )

        self._run_traced(StepArrays(token_ids, slots, positions, logits_rows, lib.TIMES_ONLY), visit)
        return times

    def length(self, slot: int) -> int:
        """Positions of the slot so far: the next row's position."""
        length = ctypes.c_uint32()
        lib.check(self._library.dsv4c_session_length(self._open().pointer, _slot(slot), ctypes.byref(length)))
        return length.value

    def reset(self, slot: int) -> None:
        lib.check(self._library.dsv4c_session_reset(self._open().pointer, _slot(slot)))

    def truncate(self, slot: int, position: int) -> None:
        """Forget positions from `position` on: 0, or at most `rollback_rows` below the highest position reached."""
        position = operator.index(position)
        if not 0 <= position < 2**32:
            raise SessionError(f"slot {slot} cannot be truncated to position {position}")
        lib.check(self._library.dsv4c_session_truncate(self._open().pointer, _slot(slot), position))

    def fork(self, src: int, dst: int) -> None:
        """Make slot `dst` a copy of slot `src`."""
        lib.check(self._library.dsv4c_session_fork(self._open().pointer, _slot(src), _slot(dst)))

    def save(self, slot: int) -> bytes:
        """The slot's state, for `restore` into any session of the same engine."""
        handle = self._open()
        size = ctypes.c_uint64()
        lib.check(self._library.dsv4c_session_save_size(handle.pointer, _slot(slot), ctypes.byref(size)))
        data = np.empty(size.value, np.uint8)
        lib.check(self._library.dsv4c_session_save(handle.pointer, _slot(slot), data.ctypes.data, data.size))
        return data.tobytes()

    def restore(self, slot: int, data: bytes) -> None:
        array = np.frombuffer(data, np.uint8)
        address = array.ctypes.data
        lib.check(self._library.dsv4c_session_restore(self._open().pointer, _slot(slot), address, array.size))

    def routing_counts(self) -> RoutingCounts:
        """How often each expert was chosen by the rows of all slots, since the session began or the last reset.

        Every choice of every row that a step has run counts once, whatever becomes of the row's slot afterwards; a step
        that failed or was stopped may have been counted in part. Raises SessionError where the engine does not count.
        """
        handle = self._open()
        require_counts(self._counted[0])
        layers, counts = np.empty(self._counted[0], np.uint32), np.empty(self._counted, np.uint64)
        status = self._library.dsv4c_session_routing_counts(
            handle.pointer, layers.ctypes.data, counts.ctypes.data, counts.size
        )
        lib.check(status)
        return RoutingCounts(tuple(layers.tolist()), counts)

    def reset_routing_counts(self) -> None:
        """Count from zero again. Raises SessionError where the engine does not count."""
        handle = self._open()
        require_counts(self._counted[0])
        lib.check(self._library.dsv4c_session_reset_routing_counts(handle.pointer))


def require_counts(counted_layers: int) -> None:
    """Raise SessionError for an engine that counts the routing of no layer."""
    if not counted_layers:
        raise SessionError(
            "the engine does not count its routing",
            hint="build it with `counts = true` in the recipe's table `[experts]`",
        )


def _slot(slot: int) -> int:
    slot = operator.index(slot)
    if not 0 <= slot <= INT32_MAX:
        raise SessionError(f"slot {slot} does not exist")
    return slot


class Engine:
    """An open engine file, shared by sessions and threads. `Engine.open` makes one."""

    def __init__(self, handle: _Handle, path: str) -> None:
        self._handle: _Handle | None = handle
        self._library = lib.load_library()
        self.path = path
        self.info = self._read_info()

    @classmethod
    def open(cls, path: str | os.PathLike[str], threads: int | None = None, device: int = 0) -> Self:
        """Open and check an engine; the weights themselves are checked by `verify_weights`.

        `threads`: how many a step on the cpu uses, or read the weights of a GPU; None: one per processor. `device`:
        which GPU runs an engine that needs one, counted as the driver does ($CUDA_VISIBLE_DEVICES).
        """
        library = lib.load_library()
        if threads is not None and not 1 <= threads <= 4096:
            raise SessionError(f"threads is {threads}, expected 1 to 4096")
        if b"\0" in os.fsencode(path):
            raise EngineFormatError(f"{os.fspath(path)!r} holds a zero byte and names no file")
        if not 0 <= device <= INT32_MAX:
            raise SessionError(f"device is {device}, expected the index of a GPU")
        options = lib.EngineOptions(struct_size=ctypes.sizeof(lib.EngineOptions), threads=threads or 0, device=device)
        pointer = ctypes.c_void_p()
        status = library.dsv4c_engine_open(os.fsencode(path), ctypes.byref(options), ctypes.byref(pointer))
        lib.check(status, os.fspath(path))
        return cls(_Handle(pointer.value, library.dsv4c_engine_close), os.fspath(path))

    def _open(self) -> _Handle:
        if self._handle is None:
            raise SessionError("the engine is closed")
        return self._handle

    def close(self) -> None:
        """Close the engine; its sessions stay usable."""
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_info(self) -> EngineInfo:
        info = lib.Info(struct_size=ctypes.sizeof(lib.Info))
        lib.check(self._library.dsv4c_engine_get_info(self._open().pointer, ctypes.byref(info)))
        return EngineInfo(
            arch=info.arch.decode(),
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            layer_count=info.layer_count,
            hidden_size=info.hidden_size,
            block_tokens=info.block_tokens,
            rollback_rows=info.rollback_rows,
            bos_token_id=None if info.bos_token_id < 0 else info.bos_token_id,
            eos_token_ids=tuple(info.eos_token_ids[: info.eos_count]),
            world_size=info.world_size,
            rank=info.rank,
            weight_bytes=info.weight_bytes,
            threads=info.threads,
            device=info.device.decode(errors="replace") or None,
            sm_count=info.sm_count,
            weight_seconds=info.weight_seconds,
            counted_layers=info.counted_layers,
            counted_experts=info.counted_experts,
        )

    def _section(self, section: SectionType) -> bytes | None:
        handle = self._open()
        data, size = ctypes.c_void_p(), ctypes.c_uint64()
        lib.check(self._library.dsv4c_engine_section(handle.pointer, section, ctypes.byref(data), ctypes.byref(size)))
        return None if data.value is None else ctypes.string_at(data.value, size.value)

    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self._section(SectionType.MANIFEST) or b"{}")
        return manifest

    def tokenizer_files(self) -> dict[str, str]:
        """File name -> text."""
        files: dict[str, str] = json.loads(self._section(SectionType.TOKENIZER) or b"{}")
        return files

    def goldens(self) -> dict[str, Any] | None:
        section = self._section(SectionType.GOLDENS)
        return None if section is None else json.loads(section)

    def verify_weights(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every weight and compare it with its digest; `progress(done bytes, total bytes)` now and then."""
        handle = self._open()
        raised: list[BaseException] = []

        def on_progress(_: object, done: int, total: int) -> int:
            try:
                if progress is not None:
                    progress(done, total)
            except BaseException as error:  # noqa: BLE001 (raised below, past the C frames)
                raised.append(error)
                return 1
            return 0

        function = lib.PROGRESS_FUNCTION(on_progress)
        status = self._library.dsv4c_engine_verify_weights(handle.pointer, function, None)
        if raised:
            raise raised[0]
        lib.check(status, self.path)

    def session(
        self, slots: int = 1, context: int | None = None, *, poison: bool = False, graphs: bool = True
    ) -> Session:
        """State for `slots` sequences of up to `context` positions (None: as many as the engine allows).

        On the cpu memory is taken as positions are filled, on a GPU at once. For debugging: `poison` fills fresh memory
        with NaN instead of zeros, and without `graphs` a GPU is given every launch by itself.
        """
        handle = self._open()
        context = self.info.max_context if context is None else context
        if not 1 <= slots <= INT32_MAX:
            raise SessionError(f"a session of {slots} slots is not possible")
        if not 1 <= context <= self.info.max_context:
            raise SessionError(f"context of {context} positions; the engine allows 1 to {self.info.max_context}")
        options = lib.SessionOptions(
            struct_size=ctypes.sizeof(lib.SessionOptions),
            slots=slots,
            context=context,
            flags=(lib.POISON if poison else 0) | (0 if graphs else lib.NO_GRAPHS),
        )
        pointer = ctypes.c_void_p()
        status = self._library.dsv4c_session_create(handle.pointer, ctypes.byref(options), ctypes.byref(pointer))
        lib.check(status)
        release = self._library.dsv4c_session_destroy
        return Session(_Handle(pointer.value, release), self.info, slots, context)

    def generate(
        self,
        prompt_ids: Ids,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop_ids: Sequence[int] | None = None,
        context: int | None = None,
    ) -> Iterator[int]:
        """Continue a prompt token by token, up to a stop token, which is not yielded (None: the model's end tokens)."""
        prompt = int32_array(prompt_ids, "prompt_ids")
        if len(prompt) == 0:
            raise SessionError("the prompt is empty", hint="give at least one token, such as the begin token")
        session = self.session(1, len(prompt) + max(max_new_tokens, 0) if context is None else context)
        stops = frozenset(self.info.eos_token_ids if stop_ids is None else stop_ids)
        return _generate(session, prompt, max_new_tokens, sampling, stops)


def _generate(
    session: Session, prompt: IntArray, max_new_tokens: int, sampling: Sampling, stops: frozenset[int]
) -> Iterator[int]:
    with session:
        for token in continue_prompt(session, prompt, max_new_tokens, sampling):
            if token in stops:
                return
            yield token


def continue_prompt(session: Session, prompt: IntArray, max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
    """The tokens that follow `prompt`, which the empty slot 0 takes."""
    rows = prompt
    position = 0
    for _ in range(max_new_tokens):
        count = len(rows)
        positions = np.arange(position, position + count, dtype=np.int32)
        token = int(session.sample(rows, np.zeros(count, np.int32), positions, [count - 1], sampling)[0])
        yield token
        rows = np.array([token], np.int32)
        position += count
