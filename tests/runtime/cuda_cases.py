"""What the CUDA backend must do, on the fake driver: functions that test_cuda_backend.py runs, a process each.

The process finds fake_cuda as libcuda.so.1; `python -m tests.runtime.cuda_cases NAME FOLDER` runs one. Most compare
with the cpu engine of the same plan, to the bit: the fake driver computes with the same kernels.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4c.errors import Dsv4cError, EngineFormatError, SessionError
from dsv4c.graph.topology import ExpertShapes, place
from dsv4c.runtime import library as lib
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import Sampling, Session
from dsv4c.runtime.trace import TraceOutput
from dsv4c.step_abi import LaunchFlag
from tests.runtime.hand_cuda_engine import SMS, add_placed_experts, cuda_parts
from tests.runtime.hand_engine import BLOCK_TOKENS, CONTEXT, VOCAB, Parts, hand_parts, write_engine

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, CONTEXT)]
CASES: dict[str, tuple[Callable[[Path], None], dict[str, str]]] = {}
OUT_OF_MEMORY, INVALID_HANDLE = 2, 400
TABLES = ("buckets", "launches", "args", "tensors", "states", "kernels")


def case(**environment: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a function; the environment says what the fake machine is."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES[function.__name__] = function, environment
        return function

    return register


def driver(compute: bool = True) -> Any:
    """The fake driver, which computes with the library's own kernels."""
    fake = ctypes.CDLL("libcuda.so.1")
    fake.fake_allocated.restype = ctypes.c_uint64
    assert not compute or fake.fake_use_kernels(os.fsencode(lib.library_path())) == 0
    return fake


def open_gpu(folder: Path, parts: Parts | None = None, **options: Any) -> Engine:
    return Engine.open(write_engine(folder / "gpu.dsv4c", parts or cuda_parts()), **options)


def open_pair(folder: Path) -> tuple[Engine, Engine]:
    return Engine.open(write_engine(folder / "cpu.dsv4c"), threads=1), open_gpu(folder)


def feed(session: Session, slot: int, start: int, count: int, rows: list[int] | None = None) -> bytes:
    positions = range(start, start + count)
    return session.step([TOKENS[p] for p in positions], [slot] * count, list(positions), rows).tobytes()


def same(sessions: list[Session], call: Callable[[Session], object]) -> None:
    results = [call(session) for session in sessions]
    assert all(result == results[0] for result in results[1:])


@case()
def steps(folder: Path) -> None:
    """Decode and prefill in buckets of every size, several slots in one step, chosen rows; with and without graphs."""
    fake = driver()
    cpu, gpu = open_pair(folder)
    info = gpu.info
    assert (info.arch, info.device, info.sm_count) == ("sm_90a", "GPU 0 (Fake H100)", 132)
    assert (cpu.info.device, cpu.info.sm_count) == (None, 0)
    for poison in (False, True):
        sessions = [engine.session(slots=3, poison=poison) for engine in (cpu, gpu)]
        sessions.append(gpu.session(slots=3, poison=poison, graphs=False))
        for start, count in ((0, 1), (1, 1), (2, 3), (5, 4), (9, 7), (16, 8), (24, 20), (44, 2)):
            same(sessions, lambda s, at=start, n=count: feed(s, 0, at, n))
        for rows in ([], [5], [5, 2, 3], [0, 4]):
            same(sessions, lambda s, r=rows: feed(s, 1, s.length(1), 6, r))
        same(sessions, lambda s: s.step(TOKENS[:6], [2, 1, 2, 2, 1, 2], [0, 24, 1, 2, 25, 3]).tobytes())
    for kind in ("cooperative", "cluster", "programmatic", "programmatic in a graph"):
        assert fake.fake_launches(kind.encode()) > 0, kind


@case(FAKE_CUDA_VERSION="12020")
def a_driver_without_programmatic_graphs(folder: Path) -> None:
    """Launches that could overlap the one before follow it."""
    fake = driver()
    cpu, gpu = open_pair(folder)
    sessions = [cpu.session(slots=1), gpu.session(slots=1), gpu.session(slots=1, graphs=False)]
    for start in range(3):
        same(sessions, lambda s, at=start: feed(s, 0, at, 1))
    assert fake.fake_launches(b"programmatic") == fake.fake_launches(b"programmatic in a graph") == 0


@case()
def sampling(folder: Path) -> None:
    driver()
    cpu, gpu = open_pair(folder)
    sessions = [cpu.session(slots=2), gpu.session(slots=2), gpu.session(slots=2, graphs=False)]
    arguments = TOKENS[:20], [0] * 20, list(range(20))
    each = [Sampling(temperature=2.0, top_k=5, seed=-3), Sampling(), Sampling(temperature=5.0, top_p=0.5, seed=2**63)]
    masks = np.zeros((3, VOCAB), np.bool_)
    masks[0, 33] = masks[1, 4] = True
    for _ in range(2):
        # First without a mask, then with one, then again without.
        for mask in (None, masks, None):
            same(sessions, lambda s, m=mask: s.sample(*arguments, [17, 2, 11], each, m).tolist())
            same(sessions, lambda s: s.reset(0))
        same(sessions, lambda s: s.sample(*arguments, [], Sampling()).tolist())
        same(sessions, lambda s: s.truncate(0, 0))
    assert list(gpu.generate(TOKENS[:5], 20, stop_ids=[])) == list(cpu.generate(TOKENS[:5], 20, stop_ids=[]))


@case()
def state(folder: Path) -> None:
    driver()
    cpu, gpu = open_pair(folder)
    sessions = [cpu.session(slots=3), gpu.session(slots=3), gpu.session(slots=3, poison=True)]
    same(sessions, lambda s: feed(s, 0, 0, 19))
    same(sessions, lambda s: feed(s, 2, 0, 30))
    same(sessions, lambda s: s.fork(0, 2))
    same(sessions, lambda s: s.truncate(2, 17))
    same(sessions, lambda s: feed(s, 2, 17, 20))
    same(sessions, lambda s: feed(s, 0, 19, 5))
    same(sessions[1:], lambda s: s.save(0))  # the engines' digests differ
    saved = sessions[1].save(0)
    assert saved[64:] == sessions[0].save(0)[64:]
    for session in sessions[1:]:
        session.restore(1, saved)
        assert session.length(1) == 24
    sessions[0].fork(0, 1)
    same(sessions, lambda s: feed(s, 1, 24, 9))
    same(sessions, lambda s: s.reset(1))
    same(sessions, lambda s: feed(s, 1, 0, 9))


@case()
def counts(folder: Path) -> None:
    """A replayed graph counts once a step, in the memory of its session; recording it counts nothing."""
    fake = driver()
    cpu = Engine.open(write_engine(folder / "cpu.dsv4c", hand_parts(counting=True)), threads=1)
    gpu = open_gpu(folder, cuda_parts(counting=True))
    assert (gpu.info.counted_layers, gpu.info.counted_experts) == (2, 8)

    def counted(session: Session) -> list[list[int]]:
        found = session.routing_counts()
        assert found.layers == (0, 2)
        numbers: list[list[int]] = found.counts.tolist()
        return numbers

    sessions = [cpu.session(slots=3), gpu.session(slots=3), gpu.session(slots=3, poison=True)]
    sessions.append(gpu.session(slots=3, graphs=False))
    same(sessions, counted)
    assert counted(sessions[1]) == [[0] * 8] * 2
    rows = 0
    for start, count in ((0, 1), (1, 1), (2, 1), (3, 3), (6, 20), (26, 8)):
        same(sessions, lambda s, at=start, n=count: feed(s, 0, at, n))
        rows += count
        same(sessions, counted)
        assert [sum(row) for row in counted(sessions[1])] == [2 * rows] * 2
    same(sessions, lambda s: s.step(TOKENS[:6], [2, 1, 2, 2, 1, 2], [0, 0, 1, 2, 1, 3], []).tobytes())
    same(sessions, counted)
    before = counted(sessions[1])
    for change in (lambda s: s.fork(0, 1), lambda s: s.truncate(0, 33), lambda s: s.reset(2)):
        same(sessions, change)
        assert counted(sessions[1]) == counted(sessions[2]) == before
    same(sessions, lambda s: s.reset_routing_counts())
    assert counted(sessions[1]) == [[0] * 8] * 2 and counted(sessions[3]) == [[0] * 8] * 2
    # Of a graph that was recorded before.
    same(sessions, lambda s: feed(s, 0, 33, 1))
    same(sessions, counted)
    for session in sessions[1:]:
        session.close()
    gpu.close()
    assert fake.fake_objects() == 0
    plain = open_gpu(folder)
    with pytest.raises(SessionError, match="the engine does not count its routing"):
        plain.session().routing_counts()


@case()
def graphs_are_recorded_once(folder: Path) -> None:
    fake = driver()
    session = open_gpu(folder).session(slots=2)
    begun = fake.fake_calls(b"cuStreamBeginCapture_v2")
    for start in range(8):
        feed(session, 0, start, 1)
    assert fake.fake_calls(b"cuStreamBeginCapture_v2") == begun + 1
    assert fake.fake_calls(b"cuGraphLaunch") == 8
    launched = fake.fake_calls(b"cuLaunchKernel") + fake.fake_calls(b"cuLaunchKernelEx")
    feed(session, 0, 8, 1, [])  # a graph of its own: without logits
    session.sample([1], [0], [9], None, Sampling())
    assert fake.fake_calls(b"cuStreamBeginCapture_v2") == begun + 3
    feed(session, 0, 10, 3)  # more logits than ever: all graphs hold an old address
    feed(session, 0, 13, 1)
    assert fake.fake_calls(b"cuStreamBeginCapture_v2") == begun + 5
    feed(session, 0, 14, 2)  # the mixed bucket that three rows had
    feed(session, 0, 16, 1)
    assert fake.fake_calls(b"cuStreamBeginCapture_v2") == begun + 5
    assert fake.fake_calls(b"cuLaunchKernel") + fake.fake_calls(b"cuLaunchKernelEx") > launched
    launches = fake.fake_launches(b"embedding_kernel")
    feed(session, 0, 17, 1)
    assert fake.fake_launches(b"embedding_kernel") == launches + 1


@case()
def traces(folder: Path) -> None:
    driver()
    cpu, gpu = open_pair(folder)
    order = [0, 1, 0, 0, 1]
    positions = [0, 0, 1, 2, 1]
    events: list[list[tuple[int, str, str, int | None, list[TraceOutput]]]] = []
    for engine in (cpu, gpu):
        events.append([])
        with engine.session(slots=2) as session:
            session.trace(TOKENS[:5], order, positions, lambda *event: events[-1].append(event))
            assert session.length(0) == 3
    expected, found = events
    assert [event[1:4] for event in found if event[1] != "runs"] == [event[1:4] for event in expected]
    for event, like in zip([event for event in found if event[1] != "runs"], expected, strict=True):
        assert [o.data.tobytes() for o in event[4]] == [o.data.tobytes() for o in like[4]], event[2]
        assert [(o.dtype, o.data.shape) for o in event[4]] == [(o.dtype, o.data.shape) for o in like[4]]
    (runs,) = (event[4][0].data for event in found if event[1] == "runs")
    # first position, where the run begins, its length, and all rows run after run
    assert runs.tolist() == [[0, 0, 3, 0], [0, 3, 2, 2], [0, 0, 3, 3], [0, 0, 3, 1], [0, 3, 2, 4]]
    for graphs in (True, False):
        with gpu.session(graphs=graphs) as session:
            times = session.profile(TOKENS[:20], [0] * 20, list(range(20)), logits_rows=[19])
            assert [time.rows for time in times] == [8] * 5 + [8] * 5 + [4] * 7
            seconds = {time.kernel: time.seconds for time in times}
            # The fake's clock counts kernels: attention takes two.
            assert seconds["embedding"] == pytest.approx(1e-3) and seconds["attention"] == pytest.approx(2e-3)
            assert {time.kernel: time.flops for time in times}["attention"] == 400
            with cpu.session() as other:
                feed(other, 0, 0, 20)
                assert feed(session, 0, 20, 4) == feed(other, 0, 20, 4)

    def stop(*event: object) -> None:
        raise KeyError("stop")

    with gpu.session() as session, cpu.session() as other:
        for each in (session, other):
            feed(each, 0, 0, 9)
            with pytest.raises(KeyError):
                each.trace([1, 2], [0, 0], [9, 10], stop)
            assert each.length(0) == 9
        assert feed(session, 0, 9, 3) == feed(other, 0, 9, 3)


@case()
def weights(folder: Path) -> None:
    """Several threads and pieces, in the engine and beside it."""
    fake = driver()
    for external in ("", "gpu.weights"):
        parts = cuda_parts()
        size = len(parts.weights)
        parts.weights += np.random.default_rng(3).bytes((37 << 20) + 5)
        parts.weights += parts.weights[:size]
        offset = len(parts.weights) - size  # the weights that count lie at the very end, after odd bytes
        shift = -offset % 64
        parts.weights[offset:offset] = bytes(shift)
        offset += shift
        parts.tensors = [replace(t, offset=t.offset + offset) if t.space == 2 else t for t in parts.tensors]
        parts.external_name = external
        if external:
            (folder / external).write_bytes(parts.weights)
        parts.chunk_header = {}
        pieces = -(-len(parts.weights) // (2 << 20))  # kPieceBytes of weight_loader.cc
        for threads in (1, 3):
            copies = fake.fake_calls(b"cuMemcpyHtoDAsync_v2")
            with open_gpu(folder, parts, threads=threads) as gpu, gpu.session() as session:
                assert fake.fake_calls(b"cuMemcpyHtoDAsync_v2") == copies + pieces
                with Engine.open(write_engine(folder / "cpu.dsv4c")) as cpu, cpu.session() as other:
                    assert feed(session, 0, 0, 9) == feed(other, 0, 0, 9)
    fake.fake_fail(b"cuMemcpyHtoDAsync_v2", 2, 999)
    with pytest.raises(SessionError, match=r"CUDA error 999, loading the weights"):
        open_gpu(folder, parts, threads=3)


@case()
def nothing_is_left_behind(folder: Path) -> None:
    fake = driver()
    path = write_engine(folder / "gpu.dsv4c", cuda_parts())
    for close_first in (False, True):
        engine = Engine.open(path, threads=2)
        session = engine.session(slots=2)
        if close_first:
            engine.close()
        feed(session, 0, 0, 20)
        session.sample([1], [1], [0], None, Sampling(), np.ones((1, VOCAB), np.bool_))
        session.profile([1], [1], [1])
        session.trace([1], [1], [2], lambda *event: None)
        assert fake.fake_allocated() > 0
        session.close()
        engine.close()
        del session, engine
        assert fake.fake_allocated() == 0 and fake.fake_objects() == 0
    messages: set[str] = set()
    for number in range(12):
        # Whatever call fails while opening and stepping, all is given back.
        for name in (b"cuMemAlloc_v2", b"cuMemHostAlloc", b"cuModuleLoadData", b"cuStreamCreate", b"cuEventCreate"):
            fake.fake_fail(name, number, OUT_OF_MEMORY)
            try:
                with Engine.open(path, threads=1) as engine, engine.session() as session:
                    feed(session, 0, 0, 8)
                    session.sample([1], [0], [8], None, Sampling(), np.ones((1, VOCAB), np.bool_))
            except Dsv4cError as error:
                messages.add(error.message)
            fake.fake_fail(name, -1, 0)
            assert fake.fake_objects() == 0, (name, number)
    assert len(messages) > 10
    assert all("memory" in message or "OUT_OF_MEMORY" in message for message in messages), messages


@case(FAKE_CUDA_CAPABILITY="8.7")
def another_architecture(folder: Path) -> None:
    fake = driver()
    with pytest.raises(EngineFormatError, match=r"engine is for sm_90a, GPU 0 \(Fake H100\) is sm_87 \(compute cap"):
        open_gpu(folder)
    assert fake.fake_calls(b"cuDevicePrimaryCtxRetain") == 0 and fake.fake_calls(b"cuMemAlloc_v2") == 0


@case(FAKE_CUDA_SMS="78")
def another_sm_count(folder: Path) -> None:
    fake = driver()
    message = r"engine is for GPUs with 114, 132 streaming multiprocessors; GPU 0 \(Fake H100\) has 78"
    with pytest.raises(EngineFormatError, match=message):
        open_gpu(folder)
    assert fake.fake_calls(b"cuDevicePrimaryCtxRetain") == 0
    with open_gpu(folder, cuda_parts((0,))) as gpu, gpu.session() as session:  # buckets for any number
        feed(session, 0, 0, 9)
    parts = cuda_parts((0,))
    parts.plan_header["sm_count"] = 132
    with pytest.raises(EngineFormatError, match="engine is for GPUs with 132 streaming"):
        open_gpu(folder, parts)


@case(FAKE_CUDA_SMS="114")
def the_table_of_the_sm_count(folder: Path) -> None:
    fake = driver()
    parts = cuda_parts(SMS)
    half = len(parts.buckets) // 2
    # The launches of the other product are broken: they must not even be loaded.
    first = parts.buckets[half - 1].first_launch
    for bucket in parts.buckets[half:]:
        assert bucket.sm_count == 132
    broken = [replace(launch, kernel=len(parts.kernels)) for launch in parts.launches]
    parts.kernels.append(replace(parts.kernels[0], entry=parts.string("no_such_entry")))
    count = len(parts.launches)
    parts.launches += broken
    parts.buckets[half:] = [replace(b, first_launch=b.first_launch + count) for b in parts.buckets[half:]]
    assert first < count
    with open_gpu(folder, parts) as gpu, gpu.session() as session:
        assert gpu.info.sm_count == 114
        feed(session, 0, 0, 9)
    assert fake.fake_launches(b"embedding_kernel") == 2


@case(FAKE_CUDA_DEVICES="2")
def devices(folder: Path) -> None:
    driver()
    with open_gpu(folder, device=1) as gpu:
        assert gpu.info.device == "GPU 1 (Fake H100)"
    with pytest.raises(SessionError, match="GPU 2 does not exist; this machine has 2"):
        open_gpu(folder, device=2)
    with pytest.raises(SessionError, match="device is -1"):
        open_gpu(folder, device=-1)
    Engine.open(write_engine(folder / "cpu.dsv4c"), device=7).close()


@case(FAKE_CUDA_DEVICES="0")
def no_device(folder: Path) -> None:
    driver()
    message = "needs an NVIDIA GPU: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected, from cuInit"
    for _ in range(2):
        with pytest.raises(EngineFormatError, match=message):
            open_gpu(folder)
    Engine.open(write_engine(folder / "cpu.dsv4c")).close()


@case(FAKE_CUDA_MEMORY="300000")
def out_of_memory(folder: Path) -> None:
    fake = driver()
    parts = cuda_parts()
    parts.weights += bytes(400_000)
    with pytest.raises(SessionError) as caught:
        open_gpu(folder, parts)
    assert caught.value.message.endswith(
        "gpu.dsv4c: no memory for the weights of engine gpu.dsv4c: 0.40 MB needed on GPU 0 (Fake H100), "
        "0.30 MB free of 0.30 MB"
    )
    assert caught.value.hint == "free memory there, or use a machine that has more"
    engine = open_gpu(folder)
    with pytest.raises(
        SessionError, match=r"no memory for the state of 999 slots with 64 positions: .* needed on GPU 0"
    ):
        engine.session(slots=999)
    assert fake.fake_objects() > 0
    session = engine.session(slots=2)
    # Room for the logits of three rows, and for what the first step needs besides.
    filler, table = ctypes.c_uint64(), 2 * (CONTEXT // BLOCK_TOKENS) * 4
    left = 300_000 - fake.fake_allocated()
    fake.cuMemAlloc_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with_context(fake, lambda: fake.cuMemAlloc_v2(ctypes.byref(filler), left - table - 3 * VOCAB * 4))
    feed(session, 0, 0, 2)
    feed(session, 0, 2, 3, [1, 2])
    with pytest.raises(SessionError, match=r"no memory for the logits of 8 rows: 1280 bytes needed on GPU 0 .*, 480"):
        feed(session, 0, 5, 8)
    assert session.length(0) == 5
    feed(session, 0, 5, 3)  # four rows are too many, three are not
    feed(session, 0, 8, 1)


def with_context(fake: Any, call: Callable[[], int]) -> None:
    context = ctypes.c_void_p()
    fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    fake.cuCtxPushCurrent_v2(context)
    assert call() == 0
    fake.cuCtxPopCurrent_v2(ctypes.byref(context))
    fake.cuDevicePrimaryCtxRelease_v2(0)


@case()
def a_launch_that_the_driver_refuses(folder: Path) -> None:
    fake = driver()
    engine = open_gpu(folder)
    session = engine.session()
    feed(session, 0, 0, 2)
    for name, where in (
        (b"cuLaunchKernelEx", r"at launch %attention_node of kernel attention"),
        (b"cuStreamBeginCapture_v2", "beginning to record a graph"),
        (b"cuStreamEndCapture", "recording a graph"),
        (b"cuGraphInstantiateWithFlags", "making a graph ready"),
    ):
        fake.fake_fail(name, 0, INVALID_HANDLE)
        with pytest.raises(SessionError, match=rf"CUDA_ERROR_INVALID_HANDLE: text of the driver, {where}") as caught:
            feed(session, 0, 2, 3, [])
        assert "nvidia-smi" in (caught.value.hint or "")
        assert session.length(0) == 2
        if name == b"cuStreamEndCapture":  # the fake's stream stays in capture: nothing more to learn from it
            session = engine.session()
            feed(session, 0, 0, 2)
    with Engine.open(write_engine(folder / "cpu.dsv4c")) as cpu, cpu.session() as other:
        feed(other, 0, 0, 2)
        assert feed(session, 0, 2, 5) == feed(other, 0, 2, 5)


@case()
def a_kernel_that_crashes(folder: Path) -> None:
    fake = driver()
    engine = open_gpu(folder)
    session, other = engine.session(slots=2), engine.session()
    feed(session, 0, 0, 4)
    fake.fake_break(b"attention_kernel")
    error = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    with pytest.raises(SessionError, match=f"{error}, after launch %attention_node"):
        session.trace([1], [0], [4], lambda *event: None)
    assert session.length(0) == 4
    # The device is lost: everything says so, and nothing hangs or crashes.
    for call in (
        lambda: feed(session, 0, 4, 1),
        lambda: feed(other, 0, 0, 1),
        lambda: session.fork(0, 1),
        lambda: session.save(0),
        lambda: session.profile([1], [0], [4]),
        engine.session,
        lambda: Engine.open(engine.path),
    ):
        with pytest.raises(SessionError, match=error):
            call()
    assert session.length(0) == 4


@case()
def a_kernel_that_crashes_in_a_graph(folder: Path) -> None:
    fake = driver()
    session = open_gpu(folder).session()
    feed(session, 0, 0, 4)
    fake.fake_break(b"attention_kernel")
    message = "CUDA_ERROR_ILLEGAL_ADDRESS: .*, in a step of 2 rows; a traced step tells after which launch"
    with pytest.raises(SessionError, match=message):
        feed(session, 0, 4, 2)


@case()
def threads(folder: Path) -> None:
    """Sessions of one engine, opened and stepped in several threads at once."""
    driver()
    cpu, gpu = open_pair(folder)
    with cpu.session() as session:
        expected = [feed(session, 0, start, 3) for start in range(0, 30, 3)]
    failures: list[object] = []

    def run() -> None:
        try:
            for _ in range(3):
                with gpu.session(slots=2) as session:
                    found = [feed(session, 1, start, 3) for start in range(0, 30, 3)]
                    assert found == expected
                    session.fork(1, 0)
                    assert feed(session, 0, 30, 1) == feed(session, 1, 30, 1)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


@case()
def damaged_plans(folder: Path) -> None:
    """Every index and extent of a launch of machine code is checked before anything is loaded."""
    fake = driver()
    stage = next(i for i, launch in enumerate(cuda_parts().launches) if launch.flags & LaunchFlag.STAGE)

    def launch(index: int, **changes: Any) -> Callable[[Parts], None]:
        return lambda parts: parts.edit("launches", index, **changes)

    def kernel(**changes: Any) -> Callable[[Parts], None]:
        return lambda parts: parts.edit("kernels", 1, **changes)

    first_argument = cuda_parts().launches[0].first_arg
    damages: list[tuple[Callable[[Parts], None], str]] = [
        (launch(0, grid_x=0), "grid of 0 x 1 x 1"),
        (launch(0, grid_y=65536), "grid of 4 x 65536 x 1"),
        (launch(0, grid_x=2**31), "has a grid of"),
        (launch(0, cluster=3), "in clusters of 3"),
        (launch(0, cluster=32, grid_x=32), "in clusters of 32"),
        (launch(0, block_x=0), "blocks of 0 x 1 x 1 threads"),
        (launch(0, block_x=1024, block_y=2), "blocks of 1024 x 2 x 1 threads"),
        (launch(0, block_x=1, block_z=65), "blocks of 1 x 1 x 65 threads"),
        (launch(0, shared_bytes=2**31), "with 2147483648 bytes of shared memory"),
        (launch(0, shared_bytes=232_000), "needs 233024 bytes of shared memory a block; GPU 0"),
        (launch(0, flags=32), "unknown flags 32"),
        (launch(0, kernel=99), "has kernel 99 of"),
        (launch(0, arg_count=2**31), "has arguments"),
        (launch(0, arg_count=501), "has arguments|takes at most 500"),
        (
            launch(0, arg_count=2, output_count=1),
            "takes 6 parameters or more; its launches give it 2 tensors|read-only",
        ),
        (launch(0, output_count=4), "has 4 outputs among 3 arguments"),
        (launch(stage, output_count=1), "has outputs, but more calls"),
        (launch(stage + 1, name=0), "is not followed by the other calls of its operator"),
        (launch(stage + 1, flags=LaunchFlag.HEAD), "is not followed by the other calls of its operator"),
        (lambda p: p.edit("buckets", 0, launch_count=stage + 1), "is not followed by the other calls"),
        (launch(0, flags=LaunchFlag.PROGRAMMATIC), "may overlap the call before it, which is none of its operator"),
        (launch(stage + 2, flags=LaunchFlag.PROGRAMMATIC), "may overlap the call before it"),
        (lambda p: p.edit("args", first_argument, kind=2), "is not a tensor; a kernel of a GPU takes pointers"),
        (lambda p: p.edit("args", first_argument, kind=9), "has unknown kind 9"),
        (lambda p: p.edit("args", first_argument, value=9999), "is tensor 9999 of"),
        (lambda p: p.edit("buckets", 0, arena_bytes=64), "lies outside the arena of 64 bytes"),
        (kernel(image_offset=2**63), "lies outside the"),
        (kernel(image_bytes=2**63), "lies outside the"),
        (kernel(image_bytes=0), "lies outside the"),
        (kernel(entry=2**31), "the name of the entry of kernel 1 lies outside the strings"),
        (kernel(image_offset=1), "CUDA_ERROR_INVALID_IMAGE: text of the driver, loading the image of kernel"),
        (lambda p: p.edit("kernels", 1, entry=p.string("nobody")), r"CUDA_ERROR_NOT_FOUND: .* \(nobody\)"),
        (lambda p: setattr(p, "images", b""), "lies outside the 0 bytes of KERNELS"),
    ]
    for damage, message in damages:
        parts = cuda_parts((132,))
        damage(parts)
        with pytest.raises((EngineFormatError, SessionError), match=message):
            open_gpu(folder, parts)
        assert fake.fake_objects() == 0, message
    # What the cpu backend refuses of a plan for a GPU.
    for flags in (LaunchFlag.STAGE, LaunchFlag.COOPERATIVE, LaunchFlag.PROGRAMMATIC, 32):
        parts = hand_parts()
        parts.edit("launches", 0, flags=flags)
        with pytest.raises(EngineFormatError, match=f"unknown flags {int(flags)}"):
            Engine.open(write_engine(folder / "bad.dsv4c", parts))
    parts = hand_parts()
    parts.buckets = [replace(bucket, sm_count=132) for bucket in parts.buckets]
    with pytest.raises(EngineFormatError, match="has buckets for 132 streaming multiprocessors on the cpu target"):
        Engine.open(write_engine(folder / "bad.dsv4c", parts))


@case()
def topology_tables(folder: Path) -> None:
    """The tables that say which SM computes which expert are looked at before anything is loaded."""
    fake = driver()
    found = place(ExpertShapes(16, 256, 128), 132, "pinned", 16)
    good = [*found.table(), 0, 0]

    def engine(values: Sequence[int], groups: int = found.groups, experts: int = 16) -> Engine:
        parts = cuda_parts((132,))
        add_placed_experts(parts, values, experts, groups)
        return open_gpu(folder, parts)

    with engine(good):
        pass
    where = (
        r"expert topology of layer 3 \(launch l3_placed_experts, 132 streaming multiprocessors, offset \d+ of WEIGHTS\)"
    )
    small = place(ExpertShapes(16, 256, 128), 114, "pinned", 14).table()
    for values, groups, experts, message in (
        ([16, *good[1:]], 8, 16, "an expert is missing or there twice"),
        ([*good[:17], 2**31 - 1, *good[18:]], 8, 16, "the ranks of the groups do not cover the experts"),
        ([*good[:25], 8, *good[26:]], 8, 16, "the seats of the SMs do not follow the groups"),
        ([*good[:-1], 1], 8, 16, "behind it are numbers that belong to nothing"),
        (good[:-3], 8, 16, "it is too short"),
        ([], 8, 16, "it is too short"),
        (good, 7, 16, "the ranks of the groups do not cover the experts"),
        (good, 9, 16, "the ranks of the groups do not cover the experts"),
        (good, 8, 15, "the ranks of the groups do not cover the experts"),
        (good, 8, 14, "an expert is missing or there twice"),
        ([*small, *[0] * 54], 8, 16, "the seats of the SMs do not follow the groups"),
        ([0] * (1 << 17), 8, 16, "it is too long"),
        (good, 0, 16, "its operator does not say of how many experts and groups"),
    ):
        with pytest.raises(EngineFormatError, match=f"{where} is damaged: {message}") as refused:
            engine(values, groups, experts)
        assert refused.value.hint is not None and "dsv4c build" in refused.value.hint
        assert fake.fake_objects() == 0, message


@case()
def random_damage(folder: Path) -> None:
    """Engines with random bits of the plan's records changed: refused, or run without a crash of the runtime."""
    # A kernel that gets other pointers than it expects may do anything; the runtime may not.
    fake = driver(compute=False)
    random = np.random.default_rng(11)
    path = folder / "bad.dsv4c"
    opened, messages = 0, set()
    for _ in range(400):
        parts = cuda_parts((132,))
        for _ in range(int(random.integers(1, 3))):
            records = getattr(parts, TABLES[int(random.integers(len(TABLES)))])
            index = int(random.integers(len(records)))
            record = type(records[index])
            data = bytearray(records[index].pack())
            data[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
            records[index] = record.unpack(data)
        try:
            with Engine.open(write_engine(path, parts), threads=1) as engine, engine.session(2, 24) as session:
                opened += 1
                session.step([1] * 9, [0] * 9, list(range(9)))
                session.step([1, 2], [0, 1], [9, 0])
                session.trace([1], [0], [10], lambda *event: None)
        except (Dsv4cError, RuntimeError) as error:
            messages.add(str(error))
        fake.fake_revive()
    assert opened > 50 and len(messages) > 20


if __name__ == "__main__":
    CASES[sys.argv[1]][0](Path(sys.argv[2]))
