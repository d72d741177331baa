"""Trace files: read, checked, and told apart by what they say."""

import json
from pathlib import Path

import pytest

from dsv4c.errors import RecipeError
from dsv4c.routing_trace import format_trace, read_trace

GOOD = {"experts": 3, "layers": {"0": [5, 0, 7], "12": [1, 2, 3]}}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_read(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, json.dumps(GOOD)))
    assert trace.experts == 3 and trace.layers == {0: (5, 0, 7), 12: (1, 2, 3)}
    assert trace.counts(12, 3) == (1, 2, 3)


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    text = format_trace(3, {12: [1, 2, 3], 0: [5, 0, 2**62]})
    assert text == '{"experts": 3, "layers": {\n"0": [5, 0, 4611686018427387904],\n"12": [1, 2, 3]\n}}\n'
    trace = read_trace(write(tmp_path, text))
    assert trace.experts == 3 and trace.layers == {0: (5, 0, 2**62), 12: (1, 2, 3)}


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
    ("traced", "layers", "experts", "message"),
    [
        ([0, 1, 2], 2, 3, "has counts of layer 2; the model has layers 0 to 1"),
        ([0, 1, 43], 2, 3, "has counts of layer 43; the model has layers 0 to 1"),
        ([0, 1], 3, 3, "has no counts of layer 2"),
        ([1, 2], 3, 3, "has no counts of layer 0"),
        ([0, 2], 2, 3, "has no counts of layer 1"),
        ([0, 1], 2, 4, "a trace of 3 experts, the model has 4"),
    ],
)
def test_a_trace_is_of_one_model(traced: list[int], layers: int, experts: int, message: str, tmp_path: Path) -> None:
    rows = {str(layer): [1, 2, 3] for layer in traced}
    trace = read_trace(write(tmp_path, json.dumps({"experts": 3, "layers": rows})))
    with pytest.raises(RecipeError, match=message) as caught:
        trace.require_model(layers, experts)
    assert caught.value.hint and "trace.json" in caught.value.message


def test_the_trace_of_the_model_is_taken(tmp_path: Path) -> None:
    most = 2**63 - 1
    rows = {"1": [0, 0, 1], "0": [most, most, most]}
    read_trace(write(tmp_path, json.dumps({"experts": 3, "layers": rows}))).require_model(2, 3)


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
        ('{"experts": 3, "layers": {"0": [1, Infinity, 3]}}', "expert 1 in layer 0 is inf"),
        ('{"experts": 3, "layers": {"0": [1, 1e3, 3]}}', r"expert 1 in layer 0 is 1000\.0"),
        ('{"experts": 3, "layers": {"0": [1, "2", 3]}}', "expert 1 in layer 0 is '2'"),
        ('{"experts": 3, "layers": {"0": [1, null, 3]}}', "expert 1 in layer 0 is None"),
        ('{"experts": 3, "layers": {"0": [1, [2], 3]}}', "expert 1 in layer 0 is a list"),
        ('{"experts": 3, "layers": {"0": [1, 9223372036854775808, 3]}}', "expert 1 in layer 0 is 9223372036854775808"),
        ('{"experts": 3, "layers": {"0": [1, %s, 3]}}' % ("9" * 4000), r"layer 0 is 9{40}\.\.\.$"),
        ('{"experts": 3, "layers": {"0": [1, %s, 3]}}' % ("9" * 5000), "is no routing trace: "),
        ('{"experts": %s, "layers": {"0": [1]}}' % ("9" * 4000), r"`experts` is 9{40}\.\.\.$"),
        ('{"experts": 3.0, "layers": {"0": [1, 2, 3]}}', r"`experts` is 3\.0"),
        ('{"experts": -3, "layers": {"0": [1, 2, 3]}}', "`experts` is -3"),
        ('{"experts": 3, "layers": {"0": [0, 0, 0]}}', "layer 0 has chosen no expert"),
        ('{"experts": 3, "layers": {"0": [1, 2, 3, 4]}}', "layer 0 has 4 counts, `experts` is 3"),
        ('{"experts": 3, "layers": {"0": []}}', "layer 0 has 0 counts, `experts` is 3"),
        ('{"experts": 3, "layers": {"0": null}}', "layer 0 has no list"),
        ('{"experts": 3, "layers": {"": [1, 2, 3]}}', "a key ''"),
        ('{"experts": 3, "layers": {" 1": [1, 2, 3]}}', "a key ' 1'"),
        ('{"experts": 3, "layers": {"1.0": [1, 2, 3]}}', r"a key '1\.0'"),
        ('{"experts": 3, "layers": {"+1": [1, 2, 3]}}', r"a key '\+1'"),
        ('{"experts": 3, "layers": {"\u0661": [1, 2, 3]}}', "a key '\u0661'"),
        ('{"experts": 3, "layers": {"1000000": [1, 2, 3]}}', "a key '1000000'"),
        ('{"experts": 3, "layers": {"%s": [1, 2, 3]}}' % ("x" * 9999), r"a key 'x{39}\.\.\.$"),
        ('{"experts": 3, "experts": 3, "layers": {"0": [1, 2, 3]}}', "'experts' is there twice"),
        ("null", "other keys than"),
        ("3", "other keys than"),
        ('"experts layers"', "other keys than"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        read_trace(write(tmp_path, text))
    assert caught.value.hint and "trace.json" in caught.value.message


def test_many_keys_are_no_work(tmp_path: Path) -> None:
    """Looking each up among all others would take an hour."""
    text = json.dumps({"experts": 1, "layers": {f"x{number}": 1 for number in range(250_000)}})
    with pytest.raises(RecipeError, match="a key 'x0'"):
        read_trace(write(tmp_path, text))


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
