"""Chat prompts: the tokenizer's template where there is one, else the DeepSeek-V4 encoding."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from dsv4c.chat import ASSISTANT_MARKER, NO_REASONING_MARKER, USER_MARKER, encode_chat
from dsv4c.errors import InputError
from dsv4c.text import Tokenizer
from tests.test_text import FILES, TOKENIZER

# The newline after a block is no part of the text: templates are written for Jinja's `trim_blocks`.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


def with_markers() -> Tokenizer:
    """The bundled tokenizer with the marker tokens of a released model."""
    raw = RawTokenizer.from_str(FILES["tokenizer.json"])
    raw.add_tokens([AddedToken(text) for text in (USER_MARKER, ASSISTANT_MARKER, NO_REASONING_MARKER)])
    return Tokenizer(FILES | {"tokenizer.json": raw.to_str()})


def with_config(**entries: Any) -> Tokenizer:
    config = json.loads(FILES["tokenizer_config.json"]) | entries
    return Tokenizer(FILES | {"tokenizer_config.json": json.dumps(config)})


def test_v4_encoding_with_marker_tokens() -> None:
    tokenizer = with_markers()
    prompt = encode_chat(tokenizer, "Hello", system="Be brief.", bos_token_id=0)
    user, assistant, no_reasoning = 4096, 4097, 4098
    assert prompt.token_ids == [
        0, *tokenizer.encode("Be brief."), user, *tokenizer.encode("Hello"), assistant, no_reasoning
    ]  # fmt: skip
    assert prompt.note is None


def test_v4_encoding_without_marker_tokens_says_so() -> None:
    prompt = encode_chat(TOKENIZER, "Hello", system=None, bos_token_id=None)
    assert prompt.token_ids == TOKENIZER.encode("<｜User｜>Hello<｜Assistant｜></think>")
    assert prompt.note is not None and "not trained for chat" in prompt.note


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_config(chat_template=TEMPLATE),
        with_config(chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]),
        Tokenizer(FILES | {"chat_template.jinja": TEMPLATE}),
    ],
    ids=["config", "named", "file"],
)
def test_template_is_used_where_there_is_one(tokenizer: Tokenizer) -> None:
    prompt = encode_chat(tokenizer, "Hello", system="Brief", bos_token_id=0)
    assert prompt.token_ids == TOKENIZER.encode("<|begin_of_sentence|><system>Brief<user>Hello<answer>")
    assert prompt.token_ids[0] == 0 and prompt.note is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system text') }}", "refuses the message: no system text"),
        ("{% for %}", "chat template failed"),
        ("{{ messages[7].content }}", "chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "chat template failed"),
    ],
)
def test_template_that_fails(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode_chat(with_config(chat_template=template), "Hello", system=None, bos_token_id=0)
