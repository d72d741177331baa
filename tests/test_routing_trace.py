"""Trace files: read, checked, and told apart by what they say."""

import json
from pathlib import Path

import pytest

from dsv4c.errors import RecipeError
from dsv4c.routing_trace import read_trace

GOOD = {"experts": 3, "layers": {"0": [5, 0, 7], "12": [1, 2, 3]}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_read(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, json.dumps(GOOD)))
    assert trace.experts == 3 and trace.layers == {0: (5, 0, 7), 12: (1, 2, 3)}
    assert trace.counts(12, 3) == (1, 2, 3)


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    first = read_trace(write(tmp_path, json.dumps(GOOD))).digest
    layers = {"12": [1, 2, 3], "0": [5, 0, 7]}
    assert read_trace(write(tmp_path, json.dumps({"layers": layers, "experts": 3}, indent=1))).digest == first
    layers["0"] = [5, 1, 7]
    assert read_trace(write(tmp_path, json.dumps({"layers": layers, "experts": 3}))).digest != first


def test_another_model(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, json.dumps(GOOD)))
    with pytest.raises(RecipeError, match="a trace of 3 experts, the model has 256"):
        trace.counts(0, 256)
    with pytest.raises(RecipeError, match="no counts of layer 1"):
        trace.counts(1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no routing trace: "),
        ("\xff", "is no routing trace: "),
        ("[" * 100_000, "is no routing trace: "),
        ("[]", "other keys than"),
        ('{"experts": 3}', "other keys than"),
        ('{"experts": 3, "layers": {}, "more": 1}', "other keys than"),
        ('{"experts": 3, "layers": {"0": [1, 2, 3], "0": [1, 2, 3]}}', "'0' is there twice"),
        ('{"experts": true, "layers": {"0": [1]}}', "`experts` is True"),
        ('{"experts": 0, "layers": {"0": []}}', "`experts` is 0"),
        ('{"experts": 3, "layers": {}}', "`layers` is empty"),
        ('{"experts": 3, "layers": [[1, 2, 3]]}', "`layers` is empty or no object"),
        ('{"experts": 3, "layers": {"00": [1, 2, 3]}}', "a key '00'"),
        ('{"experts": 3, "layers": {"-1": [1, 2, 3]}}', "a key '-1'"),
        ('{"experts": 3, "layers": {"0": [1, 2]}}', "layer 0 has 2 counts, `experts` is 3"),
        ('{"experts": 3, "layers": {"0": {"1": 2}}}', "layer 0 has no list"),
        ('{"experts": 3, "layers": {"0": [1, 2, -3]}}', "expert 2 in layer 0 is -3"),
        ('{"experts": 3, "layers": {"0": [1, NaN, 3]}}', "expert 1 in layer 0 is nan"),
        ('{"experts": 3, "layers": {"0": [1, 2.5, 3]}}', r"expert 1 in layer 0 is 2\.5"),
        ('{"experts": 3, "layers": {"0": [1, true, 3]}}', "expert 1 in layer 0 is True"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read_trace(write(tmp_path, text))
    assert caught.value.hint and "trace.json" in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the routing trace .*absent: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(RecipeError, match=r"cannot read the routing trace .*directory"):
        read_trace(tmp_path)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(RecipeError, match="more than 4,194,304 bytes"):
        read_trace(large)
