"""`dsv4c plan` as a command: text, JSON, two targets, the page with charts, refusals."""

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsv4c.cli.main import main
from tests.fixtures import TINY_OFFICIAL, tiny_config_json
from tests.header_only import write_config

TINY = str(TINY_OFFICIAL)


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", TINY, "--target", "cpu", "--memory", "1", *arguments]) == 0
    return capsys.readouterr().out


def refused(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a call that fails with `code` and prints no data."""
    assert main(["plan", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and "hint: " in captured.err
    return captured.err


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["--bandwidth", "20"], capsys)
    assert "FITS on this machine" in text and "margin" in text
    assert re.search(r"^ moe_ffn +ffn\.experts\.w1, ffn\.experts\.w3, ffn\.experts\.w2 +\[16, ", text, re.MULTILINE)
    for title in (
        "Weights",
        "State of one sequence",
        "Memory",
        "Splits over devices",
        "Decoding",
        "Kernels",
        "Buckets",
    ):
        assert re.search(f"^{title}", text, re.MULTILINE), title
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 160


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(output(["--json", "--slots", "2", "--context", "512"], capsys))
    assert plan["capacity"]["slots"] == 2 and plan["capacity"]["context"] == 512
    assert plan["model"]["family"] is None


def test_two_targets(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["--compare", "orin"], capsys)
    assert "cpu (this machine)" in text and "orin (Jetson AGX Orin 64 GB)" in text
    both = json.loads(output(["--compare", "orin", "--json"], capsys))["plans"]
    assert [plan["target"]["name"] for plan in both] == ["cpu", "orin"]
    assert [plan["recipe"]["numerics"] for plan in both] == ["exact", "reference"]


def test_model_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["--memory", "0.012"], capsys)
    assert "DOES NOT FIT" in text and "devices needed by capacity: " in text and "one device would hold" in text


def test_page_needs_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    output(["--bandwidth", "20", "--html", str(page), "--compare", "orin"], capsys)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg ") == 4
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', text.replace("xlink:href", "href"))
    assert "<script" not in text and "@import" not in text and "url(http" not in text
    again = tmp_path / "again.html"
    output(["--bandwidth", "20", "--html", str(again), "--compare", "orin"], capsys)
    assert again.read_text(encoding="utf-8") == text


def test_page_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    err = refused([TINY, "--target", "cpu", "--html", str(tmp_path / "plan.html")], 12, capsys)
    assert "matplotlib" in err and "plan-html" in err


def test_page_in_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused([TINY, "--target", "cpu", "--html", str(tmp_path / "absent" / "plan.html")], 12, capsys)
    assert "does not exist" in err


def test_unknown_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'h100'?" in refused([TINY, "--target", "h1000"], 3, capsys)
    assert "unknown target 'x'" in refused([TINY, "--target", "cpu", "--compare", "x"], 3, capsys)


def test_paths_that_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no" in refused([str(tmp_path / "absent"), "--target", "cpu"], 12, capsys)
    assert "neither config.json nor safetensors" in refused([str(tmp_path), "--target", "cpu"], 12, capsys)
    text = tmp_path / "notes.txt"
    text.write_text("not JSON", encoding="utf-8")
    assert "is not valid JSON" in refused([str(text), "--target", "cpu"], 4, capsys)
    engine = tmp_path / "a.dsv4c"
    with engine.open("wb") as file:
        file.truncate(1 << 30)
    assert "is no config.json" in refused([str(engine), "--target", "cpu"], 12, capsys)


def test_config_alone_says_what_is_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path / "m", tiny_config_json())
    for path in (folder, folder / "config.json"):
        assert main(["plan", str(path), "--target", "cpu", "--memory", "1"]) == 0
        text = capsys.readouterr().out
        assert "encodings assumed" in text and "warning: no weights there" in text and "draft module" in text


def test_illegal_split(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused([TINY, "--target", "cpu", "--tp", "3"], 7, capsys)
    assert "tp 3 is not possible: attention heads" in err and "choose --tp" in err
