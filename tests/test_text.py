"""Streaming: no half characters, stop strings across tokens, what a tokenizer must be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4c.errors import InputError
from dsv4c.text import IncrementalDecoder, StopStrings, Tokenizer
from tests.fixtures import TINY_OFFICIAL

FILES = {
    name: (TINY_OFFICIAL / name).read_text(encoding="utf-8") for name in ("tokenizer.json", "tokenizer_config.json")
}
TOKENIZER = Tokenizer(FILES)


def pieces(token_ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER)
    return [decoder.feed(token_id) for token_id in token_ids]


@given(st.text())
def test_streamed_pieces_are_the_text(text: str) -> None:
    assert "".join(pieces(TOKENIZER.encode(text))) == text


def test_character_of_several_tokens_waits_until_it_is_whole() -> None:
    token_ids = TOKENIZER.encode("🎉")
    assert len(token_ids) > 1
    assert pieces(token_ids) == [""] * (len(token_ids) - 1) + ["🎉"]


def test_character_that_never_ends_is_not_printed() -> None:
    assert pieces(TOKENIZER.encode("a🎉")[:-1])[-1] == ""


def test_broken_bytes_become_the_replacement_character() -> None:
    cut = TOKENIZER.encode("🎉")[:-1]
    assert "".join(pieces(cut + TOKENIZER.encode("b"))) == "\ufffdb"


def test_special_tokens_are_recognised_and_spelled_out() -> None:
    assert TOKENIZER.encode("<|end_of_sentence|>") == [1]
    assert pieces([1]) == ["<|end_of_sentence|>"]


def test_id_beyond_the_tokenizer_is_no_text() -> None:
    assert pieces([10**6]) == [""]


def stream(stops: list[str], *texts: str) -> tuple[list[str], bool]:
    matcher = StopStrings(stops)
    printed = []
    for text in texts:
        printed.append(matcher.feed(text))
        if matcher.matched:
            break
    return [*printed, matcher.finish()], matcher.matched


@pytest.mark.parametrize(
    ("stops", "texts", "printed", "matched"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["END"], ["a E", "N", "D b"], ["a ", "", "", ""], True),
        (["END"], ["a E", "N", "x"], ["a ", "", "ENx", ""], False),
        (["END"], ["a E"], ["a ", "E"], False),
        (["END", "a"], ["xyaEND"], ["xy", ""], True),
        (["aab"], ["aa", "a", "b"], ["", "a", "", ""], True),
        (["\n\n", "."], ["one\n", "two."], ["one", "\ntwo", ""], True),
    ],
)
def test_stop_strings(stops: list[str], texts: list[str], printed: list[str], matched: bool) -> None:
    assert stream(stops, *texts) == (printed, matched)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab", max_size=3), max_size=8))
def test_stop_strings_do_not_depend_on_the_pieces(stops: list[str], texts: list[str]) -> None:
    whole = "".join(texts)
    printed, matched = stream(stops, *texts)
    assert matched == any(stop in whole for stop in stops)
    if not matched:
        assert "".join(printed) == whole
    else:
        # Cut before a stop string, and none is left inside.
        shown = "".join(printed)
        assert any(whole.startswith(shown + stop) for stop in stops) and not any(stop in shown for stop in stops)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["a", ""])


def test_engine_without_tokenizer() -> None:
    with pytest.raises(InputError, match=r"carries no tokenizer\.json") as raised:
        Tokenizer({})
    assert raised.value.hint is not None and "--ids" in raised.value.hint


def test_tokenizer_that_cannot_be_read() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Tokenizer({"tokenizer.json": "{"})
    with pytest.raises(InputError, match="cannot be read"):
        Tokenizer({"tokenizer.json": '{"model": 1}'})
    with pytest.raises(InputError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer(FILES | {"tokenizer_config.json": "["})


def test_other_kinds_of_tokenizer_are_refused() -> None:
    metaspace = json.loads(FILES["tokenizer.json"]) | {"decoder": {"type": "Fuse"}}
    with pytest.raises(InputError, match="not a byte-level tokenizer"):
        Tokenizer({"tokenizer.json": json.dumps(metaspace)})
    nested = {"type": "Sequence", "decoders": [metaspace["decoder"], json.loads(FILES["tokenizer.json"])["decoder"]]}
    Tokenizer({"tokenizer.json": json.dumps(metaspace | {"decoder": nested})})
