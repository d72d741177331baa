"""`dsv4c build`: where the engine goes, what is refused before the work begins."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4c.cli.main import main
from tests.fixtures import TINY_OFFICIAL

TINY = str(TINY_OFFICIAL)


def refused(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """stderr of a call that must fail and write nothing on stdout."""
    assert main(["build", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")
    return err


def test_report_is_json_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a.dsv4c"
    dumps = tmp_path / "dumps"
    arguments = ["build", TINY, "--target", "cpu", "-o", str(output), "--no-goldens", "--json"]
    assert main([*arguments, "--dump-dir", str(dumps)]) == 0
    out, _ = capsys.readouterr()
    assert isinstance(json.loads(out), dict)
    assert output.is_file()
    assert (dumps / "00-input.txt").is_file()


def test_output_is_named_after_checkpoint_and_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["build", TINY, "--target", "cpu", "--no-goldens"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-v4-official.cpu.dsv4c"]
    assert capsys.readouterr().out == ""


def test_split_weights_make_a_second_file(tmp_path: Path) -> None:
    output = tmp_path / "a.dsv4c"
    assert main(["build", TINY, "--target", "cpu", "-o", str(output), "--no-goldens", "--split-weights"]) == 0
    assert output.stat().st_size < 8 << 20
    assert len(list(tmp_path.iterdir())) == 2
    assert main(["verify", str(output)]) == 0


def test_unknown_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown target 'cpux'" in refused([TINY, "--target", "cpux"], 3, capsys)
    assert "cannot be built yet" in refused([TINY, "--target", "orin"], 3, capsys)


def test_recipe_with_an_unknown_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('target = "cpu"\nnumeric = "exact"\n', encoding="utf-8")
    err = refused([TINY, "--target", "cpu", "--recipe", str(recipe)], 3, capsys)
    assert "unknown key `numeric`" in err and "did you mean `numerics`?" in err


def test_recipe_that_does_not_exist_names_the_bundled_ones(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused([TINY, "--target", "cpu", "--recipe", "cpu-refernce"], 3, capsys)
    assert "there is no recipe cpu-refernce" in err and "cpu-reference" in err


def test_checkpoint_without_tokenizer_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TINY_OFFICIAL, checkpoint, ignore=shutil.ignore_patterns("tokenizer*"))
    output = str(tmp_path / "a.dsv4c")
    assert main(["build", str(checkpoint), "--target", "cpu", "-o", output, "--no-goldens"]) == 0
    assert "warning: no tokenizer.json" in capsys.readouterr().err
    assert main(["run", output, "Hello"]) == 12
    assert "hint: give the prompt as token ids" in capsys.readouterr().err


def test_interrupt_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    output = tmp_path / "a.dsv4c"
    dumps = tmp_path / "dumps"
    command = [sys.executable, "-m", "dsv4c", "build", TINY, "--target", "cpu", "-o", str(output)]
    with subprocess.Popen([*command, "--dump-dir", str(dumps)], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        # The first dump: the build is under way.
        deadline = time.monotonic() + 120
        while not (dumps / "00-input.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert err.strip() == b"interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]


def test_output_in_a_folder_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused([TINY, "--target", "cpu", "-o", str(tmp_path / "absent" / "a.dsv4c")], 12, capsys)
    assert "does not exist" in err
    assert list(tmp_path.iterdir()) == []


def test_output_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder" in refused([TINY, "--target", "cpu", "-o", str(tmp_path)], 12, capsys)


def test_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a.dsv4c"
    refused([str(tmp_path / "absent"), "--target", "cpu", "-o", str(output)], 4, capsys)
    assert not output.exists()


def test_missing_shard_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(TINY_OFFICIAL, checkpoint)
    next(checkpoint.glob("model-00002-*.safetensors")).unlink()
    err = refused([str(checkpoint), "--target", "cpu", "-o", str(tmp_path / "a.dsv4c")], 4, capsys)
    assert "model-00002" in err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
