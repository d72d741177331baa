"""`dsv4c doctor`: its exit codes and its two forms of output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4c.cli.main import main
from dsv4c.doctor import examination as doctor
from tests.runtime.hand_engine import write_engine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(kind: str, *_: str) -> dict[str, Any]:
        if kind == "library":
            return {"path": "libdsv4c.so", "abi_version": 1}
        return {"version": "99", "cuda": None} if kind == "package" else {"absent": True}

    monkeypatch.setattr(doctor, "probe", answer)


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n\nbuild for cpu: yes\nrun engines: yes\n") and err == ""


def test_json_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_engine(tmp_path / "hand.dsv4c")
    assert main(["doctor", str(engine), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["possible"] and [verdict["name"] for verdict in report["verdicts"]] == ["run"]


def test_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", "orin"]) == 13
    out, err = capsys.readouterr()
    assert "\nbuild for orin: no (target" in out
    assert err.startswith("error: build for orin: no (target") and "\n\nhint: " in err


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--target", "gpu"], 3), (["absent.dsv4c"], 12), (["a", "b"], 2)], ids=str
)
def test_wrong_arguments(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")


def run_script(prepare: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The `dsv4c` script after `prepare`."""
    script = f"import sys; {prepare}; from dsv4c.cli.entry import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, *options, "-c", script, "doctor", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_a_package_of_the_command_line(package: str, tmp_path: Path) -> None:
    result = run_script(f"sys.modules[{package!r}] = None", "--json", "--target", "orin")
    assert result.returncode == 13 and result.stderr.startswith("error: build for orin: no (target")
    assert [verdict["subject"] for verdict in json.loads(result.stdout)["verdicts"]] == ["orin"]
    result = run_script(f"sys.modules[{package!r}] = None", str(tmp_path / "absent"))
    assert (result.returncode, result.stdout) == (12, "") and result.stderr.startswith("error: there is no ")


def test_without_any_package() -> None:
    result = run_script("pass", options=("-S",))
    assert result.returncode == 13 and "\nbuild for cpu: no (numpy, torch, tokenizers, click, rich)\n" in result.stdout
    assert result.stderr.startswith("error: build for cpu: no (") and "Traceback" not in result.stderr
