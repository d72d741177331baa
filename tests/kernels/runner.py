"""Runs the compiled kernels of one operator on torch tensors: on the CPU (emulation.py), or on a GPU (device.py).

`run_operator` turns the arguments of `torch.ops.dsv4.<name>` into a launch, asks the target's selector for its calls,
runs them over poisoned memory and checks that nothing but the results was written.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4c.graph.builder import OPERATOR_MODULES
from dsv4c.kernels.registry import SELECTORS
from dsv4c.kernels.select.selection import Selection, Selector
from dsv4c.plan.execution_plan import DTYPES, Arg, KernelCall, Launch, TensorRef
from dsv4c.step_abi import Dim, LaunchFlag, Space
from dsv4c.target import TARGETS
from tests.kernels import device_kernels
from tests.kernels.device import device
from tests.kernels.device_kernels import Mode
from tests.kernels.emulation import run_emulated
from tests.kernels.interpreted import run_interpreted
from tests.kernels.step_header import HEADER_BYTES, StepSizes, find_runs, pack_header
from tests.kernels.step_memory import GUARD_BYTES, POISON, StepMemory, bits, view

assert OPERATOR_MODULES  # they register the operators

Runner = Literal["emulator", "device"]

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)

# The first dimension of an argument by its name; any other tensor has a row per row of the step.
_FIXED = {
    *("weight", "table", "scales", "inv_freq", "fn", "scale", "base", "norm_weight", "ape", "sink", "bias"),
    *("w13", "w13_scales", "w2", "w2_scales"),
    *("experts", "topology", "counts"),
}
_STATE = {
    **dict.fromkeys(("ring", "ring_scales", "group_state"), Dim.SLOTS),
    **dict.fromkeys(("entries", "entry_scales", "keys", "key_scales"), Dim.BLOCKS),
}
_LOGITS_ROWS = {
    "sample": {"logits", "rows", "temperature", "top_k", "top_p", "seed", "mask"},
    "gather_rows": {"rows"},
}


@dataclass
class _Prepared:
    launch: Launch
    calls: list[KernelCall]
    memory: StepMemory
    sizes: StepSizes
    buffer: Tensor
    header: TensorRef
    runs: list[TensorRef]
    results: list[tuple[TensorRef, torch.Size]]
    scratch: tuple[int, int]  # bytes of the buffer
    fixed_bytes: int  # the buffer starts with what no operator writes


def run_operator(
    name: str,
    *args: Any,
    tokens: int | None = None,
    logits_rows: int | None = None,
    capacity: int | None = None,
    sm_count: int = 132,
    on: Runner = "emulator",
    rows: Dim = Dim.TOKENS,
) -> tuple[Tensor, ...]:
    """The operator's outputs, then the new contents of the arguments that it mutates; `args` stay as they are.

    The bucket has `capacity` rows, by default more than the step. `tokens` and `logits_rows` are T and R where no
    argument says them; fewer `tokens` than an argument has rows leave the last of them to no token. `rows` is the
    dimension of row tensors: behind `gather_rows` a plan has R rows.
    """
    prepared = _prepare(name, args, tokens, logits_rows, capacity, sm_count, rows)
    if on == "device":
        mode = device_kernels.mode()
        return _run_on_device(prepared) if mode is Mode.RUN else _compile_only(name, prepared, args, mode)
    after = _emulate(prepared, backwards=False)
    results = _results(prepared, after)
    if all(call.variant.language == "cuda" for call in prepared.calls):
        # A result that depends on the order of threads lacks a barrier.
        again = _emulate(prepared, backwards=True)
        for number, (one, other) in enumerate(zip(results, _results(prepared, again), strict=True)):
            assert torch.equal(bits(one), bits(other)), f"result {number} of {name} depends on the order of threads"
    return results


def run_first_calls(
    name: str,
    *args: Any,
    capacity: int | None = None,
    sm_count: int = 132,
    backwards: bool = False,
    times: int = 1,
) -> tuple[list[KernelCall], Tensor]:
    """All calls of the operator, and the memory after all but the last of them on the emulator: what they hand over.

    `times`: so often, one after the other as the layers of a step, in scratch memory that is poisoned again.
    """
    prepared = _prepare(name, args, None, None, capacity, sm_count, Dim.TOKENS)
    calls = prepared.calls
    prepared.calls = calls[:-1]
    after, expected = _emulate(prepared, backwards, times), prepared.buffer.clone()
    start, end = prepared.scratch
    expected[start:end] = after[start:end]
    prepared.memory.check_untouched(expected, after)
    return calls, after


def time_operator(
    name: str,
    *args: Any,
    capacity: int | None = None,
    sm_count: int = 132,
    rows: Dim = Dim.TOKENS,
    repeats: int = 20,
) -> float:
    """Median time of the operator's calls on the GPU in microseconds. Weights may stay in its cache between repeats."""
    prepared = _prepare(name, args, None, None, capacity, sm_count, rows)
    with _Uploaded(prepared) as uploaded:
        return device().median_us(uploaded.launch, repeats)


def compile_operator(name: str, *args: Any, capacity: int | None = None, sm_count: int = 132) -> None:
    """Puts the operator's kernels into the cubin cache."""
    prepared = _prepare(name, args, None, None, capacity, sm_count, Dim.TOKENS)
    device_kernels.images([call.variant for call in prepared.calls])


def _operator(name: str) -> Any:
    return getattr(torch.ops.dsv4, name).default


def find_selector(name: str) -> Selector:
    return SELECTORS["sm_90a"][name]


def _dims(operator: str, argument: str, value: Tensor, rows: Dim) -> tuple[Dim, ...]:
    rest = (Dim.FIXED,) * (value.dim() - 1)
    if argument == "block_table":
        return Dim.SLOTS, Dim.TABLE
    if argument in _LOGITS_ROWS.get(operator, ()):
        return Dim.LOGITS, *rest
    if argument in _STATE:
        return _STATE[argument], *rest
    return Dim.FIXED if argument in _FIXED else rows, *rest


def _fake_outputs(name: str, args: Sequence[Any]) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = _operator(name)(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    if results is None:
        return []
    return list(results) if isinstance(results, tuple) else [results]


def _prepare(
    name: str,
    args: Sequence[Any],
    tokens: int | None,
    logits_rows: int | None,
    capacity: int | None,
    sm_count: int,
    rows: Dim,
) -> _Prepared:
    schema = _operator(name)._schema.arguments
    assert len(schema) == len(args), f"{name} takes {len(schema)} arguments"
    given = {a.name: value for a, value in zip(schema, args, strict=True) if isinstance(value, Tensor)}
    dims = {argument: _dims(name, argument, value, rows) for argument, value in given.items()}
    sizes = _step_sizes(given, dims, tokens, logits_rows)
    capacity = capacity or next(size for size in BUCKETS if size > max(sizes.tokens, sizes.logits_rows))
    assert capacity >= max(sizes.tokens, sizes.logits_rows)

    memory = StepMemory()
    mutated = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    fixed = {argument for argument in given if dims[argument][0] is Dim.FIXED and argument not in mutated}
    fixed_first = sorted(given, key=lambda argument: argument not in fixed)
    places: dict[str, TensorRef] = {}
    fixed_bytes = 0
    for argument in fixed_first:
        places[argument] = memory.place(argument, given[argument], dims[argument], capacity)
        if argument in fixed:
            fixed_bytes = memory.size_bytes
    fakes = _fake_outputs(name, args)
    first = Dim.LOGITS if name in _LOGITS_ROWS else rows
    outputs = [
        memory.place_output(f"output {i}", fake, (first, *[Dim.FIXED] * (fake.dim() - 1)), capacity)
        for i, fake in enumerate(fakes)
    ]
    runs = [memory.place("runs", values, (Dim.FIXED,), capacity) for values in _run_arrays(given, sizes.tokens)]
    header = memory.place("header", torch.zeros(HEADER_BYTES, dtype=torch.uint8), (Dim.FIXED,), capacity)
    arena_bytes = memory.size_bytes + GUARD_BYTES

    launch = Launch(
        name,
        name,
        None,
        LaunchFlag(0),
        tuple(_arg(value, a.name, places, str(a.type)) for a, value in zip(schema, args, strict=True)),
        tuple(outputs),
        0,
        0,
    )
    selection = Selection(TARGETS["h100"], sm_count, capacity, arena_bytes)
    calls = find_selector(name)(launch, selection)
    assert calls[-1].args[len(calls[-1].args) - len(outputs) :] == tuple(outputs), "outputs end the last call's args"
    scratch = (selection.scratch_start, selection.scratch_start + selection.scratch_bytes)
    memory.names[scratch[0]] = "scratch"
    results = [(ref, fake.shape) for ref, fake in zip(outputs, fakes, strict=True)]
    results += [(places[argument], given[argument].shape) for argument in mutated if argument in places]
    buffer = memory.build(scratch[1] + GUARD_BYTES)
    return _Prepared(launch, calls, memory, sizes, buffer, header, runs, results, scratch, fixed_bytes)


def _step_sizes(
    given: dict[str, Tensor], dims: dict[str, tuple[Dim, ...]], tokens: int | None, logits_rows: int | None
) -> StepSizes:
    found: dict[Dim, int] = {}
    for argument, value in given.items():
        for dim, size in zip(dims[argument], value.shape, strict=True):
            if dim is not Dim.FIXED:
                assert found.setdefault(dim, size) == size, f"{argument}: {dim.name} is {size}, elsewhere {found[dim]}"
    token_rows = found.get(Dim.TOKENS) if tokens is None else tokens
    logits = found.get(Dim.LOGITS, logits_rows)
    if token_rows is None:
        token_rows = logits
    assert token_rows is not None, "say `tokens`: no argument has a row per token"
    return StepSizes(
        token_rows,
        token_rows if logits is None else logits,
        found.get(Dim.SLOTS, 1),
        found.get(Dim.BLOCKS, 1),
        found.get(Dim.TABLE, 1),
        "mask" in given,
    )


def _run_arrays(given: dict[str, Tensor], tokens: int) -> list[Tensor]:
    slots = given["slots"].tolist() if "slots" in given else list(range(tokens))
    positions = given["positions"].tolist() if "positions" in given else [0] * tokens
    runs = find_runs(slots, positions)
    return [torch.tensor(values, dtype=torch.int32) for values in (runs.first, runs.begin, runs.length, runs.rows)]


def _arg(value: Any, name: str, places: dict[str, TensorRef], kind: str) -> Arg:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return places[name]
    if isinstance(value, torch.dtype):
        return int(DTYPES[value])
    return float(value) if kind == "float" else int(value)


def _pointers(call: KernelCall, prepared: _Prepared, base: int) -> list[int]:
    for arg in call.args:
        assert arg.space is Space.ARENA
    return [*(base + arg.offset for arg in call.args), base + prepared.header.offset]


def _header(prepared: _Prepared, base: int) -> bytes:
    return pack_header(prepared.sizes, *(base + ref.offset for ref in prepared.runs))


def _emulate(prepared: _Prepared, backwards: bool, times: int = 1) -> Tensor:
    """The memory after the calls, in host memory."""
    buffer = prepared.memory.build(len(prepared.buffer))
    base = buffer.data_ptr()
    ctypes.memmove(base + prepared.header.offset, _header(prepared, base), HEADER_BYTES)
    bits(view(prepared.buffer, prepared.header, (HEADER_BYTES,))).copy_(view(buffer, prepared.header, (HEADER_BYTES,)))
    for index, call in enumerate(prepared.calls * times):
        assert call.cluster == 1, "the emulator has no clusters"
        if index and index % len(prepared.calls) == 0:
            buffer[slice(*prepared.scratch)] = POISON
        pointers = _pointers(call, prepared, base)
        if call.variant.language == "triton":
            run_interpreted(call.variant, call.grid, buffer, [pointer - base for pointer in pointers])
            continue
        run_emulated(call.variant, call.grid, call.block, call.shared_bytes, pointers, backwards)
    return buffer


def _results(prepared: _Prepared, after: Tensor) -> tuple[Tensor, ...]:
    """Copies of the results, once nothing else is found to have changed."""
    expected = prepared.buffer.clone()
    found = []
    for ref, shape in prepared.results:
        result = view(after, ref, shape)
        bits(view(expected, ref, shape)).copy_(bits(result))
        found.append(bits(result).clone().view(result.dtype))
    start, end = prepared.scratch
    expected[start:end] = after[start:end]
    prepared.memory.check_untouched(expected, after)
    return tuple(found)


class _Uploaded:
    """The memory and the code of a prepared operator on the GPU."""

    def __init__(self, prepared: _Prepared) -> None:
        self._prepared = prepared
        self._images = device_kernels.images([call.variant for call in prepared.calls])

    def __enter__(self) -> "_Uploaded":
        prepared, gpu = self._prepared, device()
        self._size = len(prepared.buffer)
        self._base = gpu.allocate(self._size)
        header = torch.frombuffer(bytearray(_header(prepared, self._base)), dtype=torch.uint8)
        view(prepared.buffer, prepared.header, (HEADER_BYTES,)).copy_(header)
        gpu.upload(self._base, prepared.buffer.data_ptr(), self._size)
        return self

    def launch(self) -> None:
        for call in self._prepared.calls:
            image = self._images[call.variant]
            pointers = _pointers(call, self._prepared, self._base)
            shared_bytes = call.shared_bytes
            if call.variant.language == "triton":
                pointers += [0, 0]  # its scratch pointers, which no kernel uses
                shared_bytes = image.dynamic_shared_bytes
            function = device().function(image.cubin, image.symbol)
            device().launch(
                function,
                call.grid,
                call.block,
                pointers,
                shared_bytes,
                call.cluster,
                call.cooperative,
                call.programmatic,
            )

    def download(self) -> Tensor:
        """The memory now; its fixed part is taken from the host, since it may be large."""
        device().synchronize()
        after, fixed = self._prepared.buffer.clone(), self._prepared.fixed_bytes
        device().download(after.data_ptr() + fixed, self._base + fixed, self._size - fixed)
        return after

    def __exit__(self, *_: object) -> None:
        device().free(self._base)


def _run_on_device(prepared: _Prepared) -> tuple[Tensor, ...]:
    with _Uploaded(prepared) as uploaded:
        uploaded.launch()
        return _results(prepared, uploaded.download())


def _compile_only(name: str, prepared: _Prepared, args: Sequence[Any], mode: Mode) -> tuple[Tensor, ...]:
    device_kernels.images([call.variant for call in prepared.calls])
    if mode is Mode.COMPILE_AND_STOP:
        pytest.skip("compiled")
    copies = [bits(arg).clone().view(arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
    results = _operator(name)(*copies)
    outputs = () if results is None else results if isinstance(results, tuple) else (results,)
    schema = _operator(name)._schema.arguments
    changed = [copy for copy, a in zip(copies, schema, strict=True) if a.alias_info and a.alias_info.is_write]
    return (*outputs, *(copy for copy in changed if copy is not None))
