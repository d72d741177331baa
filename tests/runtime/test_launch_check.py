"""Launches whose arguments contradict one another: each record is right by itself, and still the engine is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.engine.format import SectionType
from dsv4c.errors import EngineFormatError
from dsv4c.graph import ops, sampling, state_ops  # noqa: F401  (register the operators)
from dsv4c.kernels.registry import KERNELS
from dsv4c.runtime.engine import Engine
from dsv4c.step_abi import DType, Input, Space
from tests.model_cases import checkpoint_of, engine_of
from tests.runtime.hand_engine import VOCAB, WIDTH, Parts, hand_parts, seal
from tests.runtime.test_corruption import sections

SOURCE = Path(__file__).parents[2] / "dsv4c" / "runtime" / "src" / "launch_check.cc"


def signatures() -> dict[str, list[str]]:
    lines = SOURCE.read_text().split("kSignatures[] = {")[1].split("};")[0].splitlines()
    rows = [line.strip(' {},"').split('", "') for line in lines if line.strip()]
    return {name: arguments.split() for name, arguments in rows}


def test_signatures_are_those_of_the_operators() -> None:
    table = signatures()
    assert table.keys() == KERNELS["cpu"]
    for name, words in table.items():
        schema = getattr(torch.ops.dsv4, name).default._schema
        kinds = {"Tensor": "T", "Optional[Tensor]": "?", "float": "f"}
        expected = [kinds.get(str(argument.type), "i") for argument in schema.arguments]
        found = [_kind(word) for word in words]
        assert found == [*expected, ">", *["T"] * len(schema.returns)], name


def _kind(word: str) -> str:
    if word == ">" or word[0] == "?":
        return word[0]
    return word[0] if word in ("i", "f") or word.startswith("i=") else "T"


def _kernel(parts: Parts, launch: int, name: str) -> None:
    parts.launches[launch] = replace(parts.launches[launch], kernel=parts.kernel(name))


def _tensor(space: Space, which: int, **changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.edit("tensors", parts.tensor_index(space, which), **changes)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda parts: _kernel(parts, 0, "compress"),
            r"argument 1 of launch 0 .* does not fit kernel compress|launch 0",
        ),
        (lambda parts: _kernel(parts, 3, "attention"), "of launch 3 .* does not fit kernel attention"),
        (_tensor(Space.WEIGHT, 0, size_0=VOCAB - 1), r"argument 1 of launch 0 .* does not fit kernel .*embedding"),
        (_tensor(Space.WEIGHT, 0, size_1=WIDTH // 2), r"argument 3 of launch 0 .* does not fit kernel .*embedding"),
        (_tensor(Space.WEIGHT, 0, dtype=DType.I32), r"argument 1 of launch 0 .* does not fit kernel .*embedding"),
        (_tensor(Space.INPUT, 0, index=Input.POSITIONS), "argument 0 of launch 0 .* does not fit kernel .*embedding"),
        (lambda parts: parts.edit("launches", 0, arg_count=5), "launch 0 .* has 5 arguments"),
    ],
)
def test_refused(tmp_path: Path, damage: Callable[[Parts], None], match: str) -> None:
    parts = hand_parts()
    damage(parts)
    path = tmp_path / "bad.dsv4c"
    path.write_bytes(seal(parts))
    with pytest.raises(EngineFormatError, match=match):
        Engine.open(path)


@pytest.mark.parametrize("value", [-1, 5, 1 << 40, -(1 << 62)])
def test_a_hash_table_that_was_damaged_on_disk(tmp_path: Path, value: int) -> None:
    """Opening does not compare weights with their digests; a step must not follow such an id."""
    data = bytearray(engine_of("narrow", "fp8_fp4", "exact").read_bytes())
    table = open_checkpoint(checkpoint_of("narrow", "fp8_fp4")).codes("layers.0.ffn.gate.tid2eid").numpy()
    at = bytes(data).index(table.tobytes())
    assert at >= sections(bytes(data))[SectionType.WEIGHTS].offset
    place = at + 8 * int(np.ravel_multi_index((7, 1), table.shape))
    data[place : place + 8] = value.to_bytes(8, "little", signed=True)
    path = tmp_path / "bad.dsv4c"
    path.write_bytes(data)
    with Engine.open(path, threads=1) as engine, engine.session(context=16) as session:
        session.step([6], [0], [0])
        with pytest.raises(EngineFormatError, match=f"hash table gives token 7 expert {value} of 5"):
            session.step([7], [0], [1])
        assert session.length(0) == 1
        session.step([8], [0], [1])
        with pytest.raises(EngineFormatError, match="is damaged"):
            engine.verify_weights()
