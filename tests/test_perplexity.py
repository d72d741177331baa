"""Perplexity of an engine: the protocol's rows, the numbers of transformers, and files that cannot be used."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from dsv4c.errors import InputError
from dsv4c.perplexity import Perplexity, measure_perplexity, negative_log_likelihood, read_texts, token_rows
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.session import EngineInfo
from tests.model_cases import parity_case
from tests.test_text import TOKENIZER

INFO = EngineInfo("cpu", 4096, 2048, 8, 256, 256, 16, 0, (1, 2), 1, 0, 0, 1)


def test_rows_are_one_stream_of_documents_between_begin_and_end() -> None:
    texts = ["In the beginning", "", "God created the heaven and the earth."]
    stream = [token for text in texts for token in (0, *TOKENIZER.encode(text), 1)]
    rows = token_rows(texts, TOKENIZER, INFO, row_tokens=5)
    count = (len(stream) - 1) // 5
    assert rows.shape == (count, 6) and count > 2
    for number, row in enumerate(rows):
        assert row.tolist() == stream[5 * number : 5 * number + 6]


def test_a_stream_that_ends_with_a_row_loses_nothing() -> None:
    # Two documents without text: begin, end, begin, end.
    assert token_rows(["", ""], TOKENIZER, INFO, row_tokens=3).tolist() == [[0, 1, 0, 1]]
    assert token_rows(["", ""], TOKENIZER, INFO, row_tokens=2).tolist() == [[0, 1, 0]]
    with pytest.raises(InputError, match="make 4 tokens; a row takes 5"):
        token_rows(["", ""], TOKENIZER, INFO, row_tokens=4)


def test_models_without_begin_or_end_token() -> None:
    for info in (dataclasses.replace(INFO, bos_token_id=None), dataclasses.replace(INFO, eos_token_ids=())):
        with pytest.raises(InputError, match="no begin or no end token"):
            token_rows(["a"], TOKENIZER, info)


@pytest.mark.parametrize("rows", [1, 3])
def test_against_transformers(rows: int) -> None:
    case = parity_case("tiny", "none")
    logits = case.logits[:rows, :-1].astype(np.float64)
    targets = case.ids[:rows, 1:]
    log_sum = np.log(np.exp(logits).sum(-1))
    expected = (log_sum - np.take_along_axis(logits, targets[..., None], -1)[..., 0]).sum(-1)
    done: list[tuple[str, int, int]] = []
    with Engine.open(case.engine) as engine:
        found = measure_perplexity(engine, case.ids[:rows].astype(np.int32), lambda *progress: done.append(progress))
    np.testing.assert_allclose(found.row_nll, expected, rtol=2e-5)
    assert found.tokens == rows * (case.ids.shape[1] - 1) and found.row_tokens == case.ids.shape[1] - 1
    assert math.isclose(found.perplexity, math.exp(expected.sum() / found.tokens), rel_tol=2e-5)
    assert done == [("perplexity", rows, rows)]


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    """Five rows, four slots: the last row is alone in a slot that another row used before."""
    case = parity_case("tiny", "none")
    ids = case.ids[[0, 1, 2, 0, 1]].astype(np.int32)
    with Engine.open(case.engine) as engine:
        nll = measure_perplexity(engine, ids).row_nll
    np.testing.assert_allclose(nll[3:], nll[:2], rtol=1e-6)


def test_likelihood_of_extreme_logits() -> None:
    logits = np.array([[1e4, 0, -1e4], [-3e38, -3e38, -3e38]], np.float32)
    found = negative_log_likelihood(logits, np.array([1, 2], np.int32))
    np.testing.assert_allclose(found, [1e4, math.log(3)], rtol=1e-6)


def test_text_form() -> None:
    found = Perplexity((512.0, 1024.0))
    assert (found.tokens, found.nll) == (1024, 1.5)
    assert found.to_text().splitlines()[-1] == f"perplexity  {math.exp(1.5):.5f}"
    assert found.to_dict()["rows"] == 2


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    # U+2028 is a line separator for Python's `splitlines`, and may stand in a JSON string.
    path.write_text('{"text": "a\u2028b", "src": "x"}\n\n{"text": ""}\r\n', encoding="utf-8")
    assert read_texts(path) == ["a\u2028b", ""]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        (b'{"texts": "a"}\n', "line 1 has no `text`"),
        (b'{"text": ["a"]}\n', "line 1 has no `text`"),
        (b'"text"\n', "line 1 has no `text`"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_texts(path)
