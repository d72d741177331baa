"""Text on either side of the token ids: the tokenizer of an engine, UTF-8-safe streaming, stop strings.

Tokens of a byte-level tokenizer are byte strings, and a character may be spread over several of them. The decoder
here therefore works on bytes: what does not make a whole character yet waits for the next token.
"""

import codecs
import functools
import json
from collections.abc import Mapping, Sequence

import tokenizers

from dsv4c.errors import InputError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_REPLACE = "mend it in the checkpoint's folder and build again; token ids (`--ids`) need no tokenizer"


class Tokenizer:
    """A byte-level BPE tokenizer, from the files that the engine carries."""

    def __init__(self, files: Mapping[str, str]) -> None:
        text = files.get(TOKENIZER_FILE)
        if text is None:
            raise InputError(
                f"the engine carries no {TOKENIZER_FILE}, so it cannot read text",
                hint="give the prompt as token ids with `--ids`, or build from a checkpoint folder with a tokenizer",
            )
        try:
            decoder = json.loads(text).get("decoder")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        # `from_str` reports every fault of the file as a plain Exception.
        except Exception as error:  # noqa: BLE001
            raise InputError(f"the engine's {TOKENIZER_FILE} cannot be read: {error}", hint=_REPLACE) from None
        if not _is_byte_level(decoder):
            raise InputError(
                f"the engine's {TOKENIZER_FILE} is not a byte-level tokenizer, which is the only kind dsv4c decodes",
                hint="use token ids with `--ids`",
            )
        self.config: Mapping[str, object] = _read_config(files)
        self.chat_template = files.get(CHAT_TEMPLATE_FILE) or _template_of(self.config)
        self._added = {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised, none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def has_token(self, text: str) -> bool:
        """Whether `text` is one token."""
        return self._tokenizer.token_to_id(text) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id that the tokenizer does not know (padded vocabularies)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else bytes(_byte_of_char()[char] for char in token)

    def special_text(self, name: str) -> str:
        """The text of `bos_token` or `eos_token` in tokenizer_config.json; empty where there is none."""
        token = self.config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        return token if isinstance(token, str) else ""


class IncrementalDecoder:
    """Token ids in, whole characters out. Bytes that no continuation can make valid become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes. A character left unfinished at the end is never printed."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


class StopStrings:
    """Cuts a stream of text before the first stop string, also one that arrives in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InputError("a stop string is empty", hint="give the text to end before, or leave `--stop` out")
        self._stops = tuple(stops)
        self._held = ""  # the end of the stream so far that may be the beginning of a stop string
        self.matched = False

    def feed(self, text: str) -> str:
        """The part of the stream that is safe to print now."""
        self._held += text
        found = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            return self._release(min(found))
        return self._release(len(self._held) - self._possible_start())

    def finish(self) -> str:
        """What was held back, once no more text comes; nothing after a match."""
        return "" if self.matched else self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


@functools.cache
def _byte_of_char() -> Mapping[str, int]:
    """The byte-level alphabet: bytes that print in Latin-1 stand for themselves, the others for U+0100 upwards."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _read_config(files: Mapping[str, str]) -> Mapping[str, object]:
    try:
        config = json.loads(files.get(TOKENIZER_CONFIG_FILE, "{}"))
    except json.JSONDecodeError as error:
        raise InputError(f"the engine's {TOKENIZER_CONFIG_FILE} is not JSON: {error}", hint=_REPLACE) from None
    return config if isinstance(config, dict) else {}


def _template_of(config: Mapping[str, object]) -> str | None:
    """`chat_template`: a string, or a list of named ones of which `default` counts."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
