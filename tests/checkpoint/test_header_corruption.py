"""Damaged checkpoints, at random: refused as an error of dsv4c or read, never another traceback."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.checkpoint.scan import scan_checkpoint
from dsv4c.errors import CheckpointError
from tests.fixtures import ODD_CONFIGS, config_of, random_weights, write_checkpoint

NARROW = ODD_CONFIGS["narrow"]
EXAMPLES = settings(
    max_examples=int(os.environ.get("DSV4C_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**64),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(
        [[], {}, [0, 0], [2**63, 2**63], [-1, 4], "F32", "BF16", "I64", "F8_E4M3", "U8", "../x", "\0", "\ud800"]
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = random_weights(config_of(NARROW), seed=0)
    folder = tmp_path_factory.mktemp("whole")
    return write_checkpoint(folder, NARROW, weights, quantization="fp8_fp4", shards=2, dtype="bfloat16")


def try_checkpoint(folder: Path) -> None:
    try:
        checkpoint = open_checkpoint(folder)
        scan_checkpoint(checkpoint)
    except CheckpointError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert len(refused.message) < 2000
        return
    for name, info in checkpoint.weights.items():
        assert tuple(checkpoint.values(name).shape) == info.shape


def damaged_json(data: st.DataObject, value: Any) -> Any:
    """`value` with one node somewhere replaced, dropped or repeated."""
    value = copy.deepcopy(value)
    node, path = value, []
    while isinstance(node, dict | list) and len(node) and data.draw(st.booleans() if path else st.just(True)):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        path.append((node, key))
        node = node[key]
    owner, key = path[-1]
    match data.draw(st.integers(0, 3)):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.append(copy.deepcopy(node))
        case 2 if isinstance(node, int) and not isinstance(node, bool):
            owner[key] = node + data.draw(st.sampled_from([-1, 1, 8, 2**32, -(2**32)]))
        case _:
            owner[key] = data.draw(VALUES)
    return value


def copy_of(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(whole, folder))


@EXAMPLES
@given(st.data())
def test_headers(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copy_of(whole, tmp_path)
    path = folder / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = damaged_json(data, json.loads(content[8 : 8 + length]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    try_checkpoint(folder)


@EXAMPLES
@given(st.data())
def test_bytes(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = copy_of(whole, tmp_path)
    names = ["model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"]
    path = folder / data.draw(st.sampled_from(names))
    content = bytearray(path.read_bytes())
    header = min(len(content), 8 + int.from_bytes(content[:8], "little"))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] ^= data.draw(st.integers(1, 255))
    size = len(content) - data.draw(st.sampled_from([0, 0, 1, len(content) // 2]))
    path.write_bytes(content[:size])
    try_checkpoint(folder)


@EXAMPLES
@given(st.data())
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_config_and_index(whole: Path, tmp_path: Path, name: str, data: st.DataObject) -> None:
    folder = copy_of(whole, tmp_path)
    path = folder / name
    path.write_text(json.dumps(damaged_json(data, json.loads(path.read_text()))))
    try_checkpoint(folder)
