"""Typed reading of a JSON object, with errors that name the file and the key."""

import math
import reprlib
from collections.abc import Mapping
from typing import cast

from dsv4c.errors import CheckpointError

_MISSING = object()
# The engine file and the kernels count in 32 bits; no model comes near.
MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 3e38  # of float32


class ConfigFields:
    """A JSON object (`config.json` or an object inside it). `prefix` is the path to it, such as `rope_scaling.`."""

    def __init__(self, data: Mapping[str, object], where: str, prefix: str = "") -> None:
        self.data = data
        self.where = where
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Present and not null."""
        return self.data.get(key) is not None

    def error(self, message: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}", hint=hint)

    def name(self, key: str) -> str:
        return f"`{self.prefix}{key}`"

    def wrong(self, key: str, expected: str) -> CheckpointError:
        return self.error(f"{self.name(key)} is {reprlib.repr(self.data.get(key))}, expected {expected}")

    def _get(self, key: str, default: object = _MISSING) -> object:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise self.error(f"{self.name(key)} is missing", hint="take config.json from the model's repository")
        return default

    def integer(self, key: str, minimum: int = 1, default: object = _MISSING) -> int:
        value = self._get(key, default)
        # bool is an int in Python, not in a config.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "an integer")
        if value < minimum:
            raise self.wrong(key, f"at least {minimum}")
        if value > MAX_SIZE:
            raise self.wrong(key, f"at most {MAX_SIZE}")
        return value

    def number(self, key: str, minimum: float = 0.0, default: object = _MISSING) -> float:
        """A finite number greater than `minimum`."""
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        # Python's JSON reads NaN, Infinity and integers beyond any float.
        if (isinstance(value, float) and not math.isfinite(value)) or abs(value) > _MAX_NUMBER or value <= minimum:
            raise self.wrong(key, f"a finite number greater than {minimum:g}")
        return float(value)

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def integers(self, key: str, minimum: int) -> list[int]:
        value = self._get(key)
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and minimum <= item <= MAX_SIZE for item in value
        ):
            raise self.wrong(key, f"a list of integers of at least {minimum}, at most {MAX_SIZE}")
        return value

    def choices(self, key: str, allowed: Mapping[str, object], length: int) -> list[str]:
        """A list of `length` strings, each one of `allowed`."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        for index, item in enumerate(value):
            if not isinstance(item, str) or item not in allowed:
                raise self.error(f"`{self.prefix}{key}[{index}]` is {item!r}, expected one of {', '.join(allowed)}")
        if len(value) != length:
            raise self.error(f"{self.name(key)} has {len(value)} entries, `num_hidden_layers` is {length}")
        return value

    def nested(self, key: str) -> "ConfigFields | None":
        """The object at `key`; None when absent or null."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ConfigFields(cast(dict[str, object], value), self.where, f"{self.prefix}{key}.")

    def only(self, key: str, *allowed: object) -> None:
        """Absent, null, or exactly one of `allowed` (so that True is not 1)."""
        value = self.data.get(key)
        if value is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
        ):
            return
        expected = " or ".join(repr(item) for item in allowed) or "no such key"
        raise self.error(
            f"{self.name(key)} is {value!r}; DeepSeek-V4 defines {expected}",
            hint="this is another architecture, or a variant that dsv4c does not compile",
        )

    def agree(self, first: str, first_value: object, second: str, second_value: object) -> None:
        """Raises when two keys that say the same thing differ."""
        if first_value != second_value:
            raise self.error(
                f"`{first}` says {first_value!r}, `{second}` says {second_value!r}",
                hint="the two describe the same thing; correct or remove one",
            )
