"""`dsv4c bench`: speed, profile and perplexity of an engine, as text and as data."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dsv4c.cli.main import main


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    value = json.loads(output_of(capsys, *arguments, "--json"))
    assert isinstance(value, dict)
    return value


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    text = "In the beginning God created the heaven and the earth. " * 100
    path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    return path


SHORT = ("--prompt-tokens", "24", "--decode-tokens", "3")


def test_speed_is_csv_or_json(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = csv.DictReader(io.StringIO(output_of(capsys, str(tiny_engine), *SHORT, "--slots", "2")))
    assert (row["prompt_tokens"], row["decode_tokens"], row["slots"]) == ("24", "3", "2")
    assert row["recipe"] == "cpu/exact/experts=stored,dense=stored"
    assert float(row["prefill_tokens_per_s"]) > 0 and 0 < float(row["p50_ms"]) <= float(row["p99_ms"])
    found = json_of(capsys, str(tiny_engine), *SHORT, "--threads", "1")
    assert found.keys() == row.keys() and found["threads"] == 1


def test_profile(tiny_engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4c.benchmark._BANDWIDTH_BYTES", 1 << 22)
    found = json_of(capsys, str(tiny_engine), "--profile", *SHORT)
    assert found["read_bytes_per_s"] > 1e8 and found["step_seconds"].keys() == {"prefill", "decode"}
    launches, kernels = found["launches"], found["kernels"]
    assert launches[0]["kernel"] == "embedding" and launches[-1]["kernel"] == "linear"
    assert {launch["layer"] for launch in launches} == {None, *range(8)}
    assert sum(kernel["launches"] for kernel in kernels) == len(launches)
    for kernel in kernels:
        of_kernel = [launch for launch in launches if launch["kernel"] == kernel["kernel"]]
        for phase, what in kernel["phases"].items():
            assert what["bytes_moved"] == sum(launch["phases"][phase]["bytes_moved"] for launch in of_kernel)
            rate = what["share"] * found["read_bytes_per_s"]
            assert what["seconds"] == 0 or math.isclose(rate, what["bytes_moved"] / what["seconds"])
    slowest = [kernel["phases"]["decode"]["seconds"] for kernel in kernels]
    assert slowest == sorted(slowest, reverse=True)
    text = output_of(capsys, str(tiny_engine), "--profile", *SHORT)
    assert "GB/s read: best of 6 sums" in text
    assert len(text.splitlines()) == 11 + len(kernels) + len(launches)
    assert max(map(len, text.splitlines())) <= 120


def test_perplexity(tiny_engine: Path, documents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, str(tiny_engine), "--perplexity", str(documents), "--rows", "1")
    assert (found["rows"], found["tokens"]) == (1, 512)
    # The model knows this text, and then it repeats.
    assert 1 < found["perplexity"] < 4
    text = output_of(capsys, str(tiny_engine), "--perplexity", str(documents), "--rows", "1")
    assert text.splitlines()[-1] == f"perplexity  {found['perplexity']:.5f}"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--perplexity", "absent.jsonl"], 12, "there is no absent.jsonl"),
        (["--rows", "1"], 2, "--rows needs --perplexity"),
        (["--profile", "--perplexity", "x"], 2, "--profile or --perplexity, not both"),
        (["--profile", "--slots", "2"], 2, "--profile has one slot"),
        (["--prompt-tokens", "99999"], 10, "context of 100063 positions"),
    ],
)
def test_refusals(
    tiny_engine: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tiny_engine), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_documents_too_short_for_a_row(tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "Hello"}\n', encoding="utf-8")
    assert main(["bench", str(tiny_engine), "--perplexity", str(path)]) == 12
    assert "a row takes 513" in capsys.readouterr().err
