"""Sessions: state for sequences, with numpy arrays, over an open engine."""

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dsv4c.errors import SessionError
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


class Handle:
    """A pointer of the library, released with its last reference: a call that is running holds one."""

    def __init__(self, pointer: int | None, release: Callable[[int | None], None]) -> None:
        self.pointer = pointer
        self._release = release

    def __del__(self) -> None:
        self._release(self.pointer)


class Session:
    """State for a fixed number of slots (sequences). Used by one thread at a time."""

    def __init__(self, handle: Handle, info: EngineInfo, slots: int, context: int) -> None:
        self._handle: Handle | None = handle
        self._library = lib.load_library()
        self._vocab_size = info.vocab_size
        self._counted = info.counted_layers, info.counted_experts
        self.slots = slots
        self.context = context

    def _open(self) -> Handle:
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
