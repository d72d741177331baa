"""`dsv4c verify`: a whole engine passes, an altered one does not."""

import json
from pathlib import Path

import pytest

from dsv4c.cli.main import main


@pytest.mark.parametrize("options", [[], ["--replay"]], ids=["digests", "replay"])
def test_whole_engine(tiny_engine: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["verify", str(tiny_engine), *options]) == 0
    assert capsys.readouterr().out != ""


def test_json(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["verify", str(tiny_engine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_altered_weight(tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(tiny_engine.read_bytes())
    # Weights are by far the largest section: the middle of the file is one.
    data[len(data) // 2] ^= 1
    altered = tmp_path / "altered.dsv4c"
    altered.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(altered)]) == 11
    out, err = capsys.readouterr()
    assert "chunk" in out and "does not verify" in err


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 12
    assert f"dsv4c build {tmp_path} --target cpu" in capsys.readouterr().err
