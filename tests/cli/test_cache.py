"""`dsv4c cache`: its commands, their output and exit codes."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsv4c.cli import cache
from dsv4c.cli.main import cli, main
from dsv4c.jit_caches.kinds import KINDS
from dsv4c.jit_caches.surroundings import Surroundings
from tests.jit_caches.fake_trees import ENTRIES, KEY, contents, make_cache, make_older, surroundings, write_files

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No command may see the caches of the machine that runs the tests."""
    monkeypatch.setattr(Surroundings, "of_this_process", classmethod(lambda _: surroundings(tmp_path)))


def test_no_test_sees_a_real_cache() -> None:
    assert Surroundings.of_this_process().temporary_folders[0].startswith("/tmp/pytest")


@pytest.mark.parametrize("name", ["list", "clean", "path"])
def test_help(name: str, golden: Callable[[str, str], None]) -> None:
    result = CliRunner().invoke(cli, ["cache", name, "--help"], prog_name="dsv4c", terminal_width=80)
    assert result.exit_code == 0
    golden(f"help/dsv4c-cache-{name}.txt", result.output)


def run(*arguments: str) -> int:
    return main(["cache", *arguments])


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(*arguments, "--json") == code
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


def test_list_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    assert capsys.readouterr() == ("total 0 B in 0 caches\n", "")


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        make_cache(kind, tmp_path)
    write_files(tmp_path / "tmp/torchinductor_photos", ["cat.jpg"])
    assert run("list") == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.startswith(" ")]
    assert [row[0] for row in rows if row[0] in KINDS] == list(KINDS)
    (row,) = (row for row in rows if row[0] == "triton")
    assert str(ENTRIES["triton"][0]) in row
    assert "total " in out and f"in {len(KINDS)} caches\n" in out
    assert err == (
        f"note: {tmp_path}/tmp/torchinductor_photos does not look like a cache of kind inductor: left alone\n"
    )


def test_list_says_what_is_in_use_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_cache("triton", tmp_path)
    write_files(Path(place.path), {f"{KEY}/k.json": "new"})
    (Path(place.path) / f".dsv4c-removed-{'0' * 16}").mkdir()
    assert run("list", "triton") == 0
    out = capsys.readouterr().out
    assert "being written" in out and f"{KEY} was written " in out
    assert "1 removal cut short" in out and "left alone: " in out and ", and 1 more" in out


def test_list_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_cache("triton", tmp_path)
    report = run_json(capsys, "list")
    (entry,) = report["caches"]
    assert entry["kind"] == "triton" and entry["path"] == place.path and entry["source"] == "default"
    assert (entry["entries"], entry["files"], entry["in_use"], entry["recognised"]) == (3, 10, False, True)
    assert entry["disk_bytes"] == report["disk_bytes"] > 0
    assert entry["newest_use"].endswith("Z") and entry["unrecognised"] == 3 and entry["left_alone_count"] == 2


def test_names_are_printed_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a\nb\x1b[31m"
    monkeypatch.setattr(
        Surroundings,
        "of_this_process",
        classmethod(lambda _: surroundings(tmp_path, {"TRITON_CACHE_DIR": str(folder)})),
    )
    write_files(folder, [f"{KEY}/k.json", f"{'C' * 52}/\n.txt"])
    make_older(folder, days=2)
    for command in (["list", "triton"], ["path", "triton"], ["clean", "triton", "-y"]):
        assert run(*command) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out and "a\\nb\\x1b[31m" in out.replace("\n", "").replace(" ", "")


def test_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("path", "triton") == 0
    assert capsys.readouterr().out == f"{tmp_path}/home/.triton/cache\n"
    assert run("path") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(KINDS)
    (place,) = run_json(capsys, "path", "cuda")["places"]
    assert place == {
        "kind": "cuda",
        "path": f"{tmp_path}/home/.nv/ComputeCache",
        "source": "default",
        "exists": False,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "say what to remove: a KIND, --older-than, --keep-bytes, or --all"),
        (["--dry-run"], 2, "say what to remove"),
        (["triton", "--all"], 2, "--all stands alone"),
        (["--all", "--older-than", "1d"], 2, "--all stands alone"),
        (["trition"], 14, "there is no kind of cache 'trition'"),
        (["--older-than", "3"], 2, "invalid value for '--older-than': '3' is no age such as 12h, 30d or 8w"),
        (["--keep-bytes", "many"], 2, "invalid value for '--keep-bytes': 'many' is no size such as 500M"),
        (["--keep-bytes", "-1"], 2, "invalid value for '--keep-bytes'"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clean", *arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and "\n\nhint: " in err


def test_clean_of_nothing_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--all", "-y"], ["triton"], ["--older-than", "1d", "--dry-run"]):
        assert run("clean", *arguments) == 0
        assert capsys.readouterr() == ("nothing to remove\n", "")


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        make_cache(kind, tmp_path)
    before = contents(tmp_path)
    assert run("clean", "--all", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.endswith("\nnothing was removed: this is a dry run\n") and "\nto remove: " in out
    assert [line.split()[0] for line in out.splitlines()[: len(KINDS)]] == list(KINDS)
    report = run_json(capsys, "clean", "triton", "--dry-run")
    assert report["dry_run"] and report["files"] == 0 and report["would_remove"][0]["files"] == 10
    assert contents(tmp_path) == before


def test_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        make_cache(kind, tmp_path)
    assert run("clean", "triton", "cuda", "--yes") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("triton            3 entries, 10 files, 40.96 kB")
    assert out.splitlines()[-1] == "removed 13 files, freed 49.15 kB"
    report = run_json(capsys, "clean", "--all", "-y")
    assert [place["kind"] for place in report["removed"]] == [kind for kind in KINDS if kind not in ("triton", "cuda")]
    assert report["files"] == sum(place["files"] for place in report["removed"]) > 30
    assert run_json(capsys, "clean", "--all", "-y")["would_remove"] == []


def test_clean_by_age_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_cache("triton", tmp_path)
    assert run_json(capsys, "clean", "--older-than", "3d", "-y")["files"] == 0
    assert run_json(capsys, "clean", "--keep-bytes", "1G", "-y")["files"] == 0
    make_older(Path(place.path) / KEY, days=4)
    assert run_json(capsys, "clean", "--older-than", "3d", "-y")["removed"][0]["entries"] == 1
    assert run_json(capsys, "clean", "--keep-bytes", "4096", "-y")["removed"][0]["entries"] == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), ("5k", 5000), ("5KB", 5000), ("1.5G", 1_500_000_000), ("2Gi", 2 << 30), ("1TiB", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert cache._size_bytes(None, None, text) == size  # type: ignore[arg-type]


def test_nobody_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_cache("triton", tmp_path)
    before = contents(Path(place.path))
    assert run("clean", "triton") == 2
    assert capsys.readouterr().err.startswith("error: nobody can be asked here: give --yes")
    assert contents(Path(place.path)) == before


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_asks(answer: str, goes: bool, tmp_path: Path) -> None:
    """On a terminal, as somebody types. Triton has no place outside the home folder."""
    place = make_cache("triton", tmp_path)
    environ = {name: text for name, text in os.environ.items() if "CACHE" not in name and "TRITON" not in name}
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "dsv4c", "cache", "clean", "triton"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ | {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
    )
    os.write(ours, answer.encode())
    out, err = child.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert child.returncode == 0, err
    assert "to remove: 10 files, 40.96 kB" in err and "remove them? [y/N]" in err
    assert ("removed 10 files" in out) == goes == (not (Path(place.path) / KEY).exists())
    assert ("nothing was removed" in err) != goes


def test_question_that_stood_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_cache("triton", tmp_path)

    def write_meanwhile(_: object) -> None:
        write_files(Path(place.path), {f"{KEY}/k.json": "new"})

    monkeypatch.setattr(cache, "_ask", write_meanwhile)
    monkeypatch.setattr(cache, "_STALE_S", 0.0)
    assert run("clean", "triton") == 0
    out, err = capsys.readouterr()
    assert out == "removed 0 files, freed 0 B\n" and "is left alone: being written" in err
    assert (Path(place.path) / KEY).exists()


def test_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_cache("triton", tmp_path)
    unlink, done = os.unlink, 0

    def interrupt(path: Any, **options: Any) -> None:
        nonlocal done
        unlink(path, **options)
        done += 1
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    monkeypatch.setattr("os.unlink", interrupt)
    assert run("clean", "triton", "-y") == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("removed 3 files, freed ") and err == "interrupted\n"
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(list(Path(place.path).glob(".dsv4c-removed-*"))) <= 1


def test_what_cannot_be_removed_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache("triton", tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.rename", refuse)
    assert run("clean", "triton", "-y") == 14
    out, err = capsys.readouterr()
    assert "not removed: " in out and "(of 3)" in out
    assert err.startswith("error: 3 entries could not be removed: ") and "\n\nhint: " in err


def test_progress_is_shown_to_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with cache._counting() as count:
        tick = count("counting triton")
        for _ in range(3):
            tick(999)


def test_starts_without_torch() -> None:
    script = "import sys; from dsv4c.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", script, "cache", "path", "triton"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_help_names_every_kind() -> None:
    help_text = " ".join((cache.cache_command.help or "").split())
    assert f"The kinds: {', '.join(KINDS)}." in help_text
