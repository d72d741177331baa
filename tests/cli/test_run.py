"""`dsv4c run`: text in, text out, on the bundled checkpoint's engine."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4c.cli.main import main

PROMPT = "In the beginning God created"
RUN = [sys.executable, "-m", "dsv4c", "run"]


@pytest.fixture
def run_json(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs with --json and returns the object."""

    def run(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["run", str(tiny_engine), *arguments, "--json"]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return run


def test_stream_is_the_text_of_json(tiny_engine: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    capfdbinary.readouterr()
    assert main(["run", str(tiny_engine), PROMPT, "--max-tokens", "16", "--json"]) == 0
    result = json.loads(capfdbinary.readouterr().out)
    assert result["stop_reason"] in {"max_tokens", "eos"} and 1 < len(result["token_ids"]) <= 16
    assert main(["run", str(tiny_engine), PROMPT, "--max-tokens", "16"]) == 0
    out, err = capfdbinary.readouterr()
    assert out.decode() == result["text"]
    assert b"tokens/s" in err


def test_greedy_by_default_and_seeded_sampling_repeats(run_json: Any) -> None:
    greedy = run_json(PROMPT, "--max-tokens", "12")
    assert run_json(PROMPT, "--max-tokens", "12", "--seed", "9")["token_ids"] == greedy["token_ids"]
    sampling = (PROMPT, "--max-tokens", "12", "--temperature", "1.5", "--top-p", "0.95", "--top-k", "50")
    first = run_json(*sampling, "--seed", "1")["token_ids"]
    assert run_json(*sampling, "--seed", "1")["token_ids"] == first
    assert run_json(*sampling, "--seed", "2")["token_ids"] != first


def test_stop_string_cuts_the_text(run_json: Any) -> None:
    whole = run_json(PROMPT, "--max-tokens", "24")["text"]
    stop = whole[5:9]
    cut = run_json(PROMPT, "--max-tokens", "24", "--stop", stop, "--stop", "not in the text")
    assert (cut["text"], cut["stop_reason"]) == (whole[: whole.index(stop)], "stop")


def test_prompt_from_file_and_stdin(tiny_engine: Path, run_json: Any, tmp_path: Path) -> None:
    expected = run_json(PROMPT, "--max-tokens", "4")["token_ids"]
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    assert run_json("--prompt-file", str(path), "--max-tokens", "4")["token_ids"] == expected
    command = [*RUN, str(tiny_engine), "-", "--max-tokens", "4", "--json"]
    result = subprocess.run(command, input=PROMPT.encode(), capture_output=True, check=True)
    assert json.loads(result.stdout)["token_ids"] == expected


def test_ids_in_ids_out(run_json: Any) -> None:
    result = run_json("0 35 79", "--ids", "--max-tokens", "5")
    assert result["prompt_tokens"] == 3
    assert result["text"].split() == [str(token_id) for token_id in result["token_ids"] if token_id != 1]


def test_chat_on_a_model_without_markers_says_so(tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(tiny_engine), "Hello", "--chat", "--system", "Be brief.", "--max-tokens", "3", "--json"]
    assert main(arguments) == 0
    assert "not trained for chat" in capsys.readouterr().err


def test_threads_do_not_change_the_answer(run_json: Any) -> None:
    one = run_json(PROMPT, "--max-tokens", "8", "--threads", "1")
    assert run_json(PROMPT, "--max-tokens", "8", "--threads", "2")["token_ids"] == one["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a", "--context", "100000"], 12, "a context of 100000 tokens is asked"),
        (["word " * 50, "--context", "10"], 12, "leaves no room in a context of 10"),
        (["1 x", "--ids"], 12, "whole numbers"),
        (["1 -1", "--ids"], 12, "whole numbers"),
        (["0 4096", "--ids"], 12, "token 4096 of the prompt is outside the model's vocabulary"),
        (["--prompt-file", "absent.txt"], 12, "absent.txt"),
        (["a", "--stop", ""], 12, "stop string is empty"),
    ],
)
def test_bad_input(
    tiny_engine: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["run", str(tiny_engine), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err and "\n\nhint: " in err


def test_empty_prompt_begins_with_the_begin_token(run_json: Any) -> None:
    text = run_json("", "--max-tokens", "4")
    ids = run_json("", "--ids", "--max-tokens", "4")
    assert text["prompt_tokens"] == ids["prompt_tokens"] == 1
    assert text["token_ids"] == ids["token_ids"] == run_json("0", "--ids", "--max-tokens", "4")["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ([], ""),
        (["--temperature", "1", "--seed", "3", "--top-k", "5"], ""),
        (["--top-k", "5"], "note: --top-k without effect: at temperature 0 the likeliest token is taken\n"),
        (["--seed", "0", "--top-p", "0.5"], "note: --top-p, --seed without effect"),
        (["--context", "6"], "note: at most 3 tokens of answer: the context is 6 tokens\n"),
        (["--threads", "4096"], " instead of 4096: one for each processor that is available\n"),
    ],
)
def test_notes(tiny_engine: Path, arguments: list[str], note: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["run", str(tiny_engine), "0 35 79", "--ids", "--max-tokens", "4", *arguments, "--json"]) == 0
    err = capsys.readouterr().err
    assert note in err and err.count("note: ") == bool(note)


def test_newline_after_the_text_on_a_terminal(tiny_engine: Path) -> None:
    terminal, output = pty.openpty()
    command = [*RUN, str(tiny_engine), "0 35 79", "--ids", "--max-tokens", "1"]
    subprocess.run(command, stdout=output, stderr=subprocess.DEVNULL, check=True)
    # A terminal shows "\r\n" for a newline.
    assert re.fullmatch(rb"\d+\r\n", os.read(terminal, 100))
    os.close(output)
    os.close(terminal)


def test_stdout_that_cannot_be_written(tiny_engine: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run([*RUN, str(tiny_engine), PROMPT], stdout=full, stderr=subprocess.PIPE, check=False)
    assert result.returncode == 12
    assert result.stderr.startswith(b"error: cannot write to stdout: ") and b"Traceback" not in result.stderr


def test_prompt_file_that_is_not_utf8(tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    assert main(["run", str(tiny_engine), "--prompt-file", str(path)]) == 12
    assert "not UTF-8" in capsys.readouterr().err


def test_interrupt_ends_quietly(tiny_engine: Path) -> None:
    command = [*RUN, str(tiny_engine), PROMPT, "--max-tokens", "2000", "--temperature", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        # Text has begun: the command is in its loop.
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert err.strip() == b"interrupted"


def test_reader_that_goes_away_ends_quietly(tiny_engine: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*RUN, str(tiny_engine), PROMPT, "--max-tokens", "50"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "redirection", "message"),
    [
        ('"$(printf "a\\377b")"', "", "the prompt from the command line is not UTF-8"),
        ("hi", ">&-", "stdout is closed"),
        ("-", "<&-", "stdin is closed"),
    ],
    ids=["bytes", "stdout", "stdin"],
)
def test_streams_and_arguments_that_are_no_text(
    tiny_engine: Path, arguments: str, redirection: str, message: str
) -> None:
    command = f'"{sys.executable}" -m dsv4c run "{tiny_engine}" {arguments} --max-tokens 1 {redirection}'
    result = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert result.returncode == 12
    assert result.stderr.startswith(f"error: {message}")
