"""`dsv4c inspect`: engines and checkpoints, for people and for programs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4c.cli.main import main
from tests.fixtures import TINY_OFFICIAL


def test_checkpoint(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(TINY_OFFICIAL)]) == 0
    golden("inspect/tiny-v4-official.txt", capsys.readouterr().out)


def test_checkpoint_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(TINY_OFFICIAL), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["layers"] == {"window": 2, "csa/4": 3, "hca/16": 3}
    assert summary["encodings"]["fp4_group"] == {"tensors": 384, "size_bytes": 6_684_672}
    assert summary["parameters"] == 18_468_757
    assert summary["draft"] is None


def test_engine(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", str(tiny_engine)]) == 0
    assert "cpu" in capsys.readouterr().out
    assert main(["inspect", str(tiny_engine), "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert sections == sorted(sections, key=lambda section: section["offset"])


def test_engine_without_topology(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", str(tiny_engine), "--topology"]) == 12
    assert "an engine for cpu, which has no SMs to place experts on" in capsys.readouterr().err


def test_path_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "absent")]) == 12
    assert "there is no " in capsys.readouterr().err


def test_folder_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 4
    assert "config.json" in capsys.readouterr().err


def test_file_that_is_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.dsv4c"
    path.write_bytes(b"no engine" * 1000)
    assert main(["inspect", str(path)]) == 9
    assert "not a dsv4c engine" in capsys.readouterr().err
