"""Fixtures of the runtime tests. The library is the one that dsv4c.runtime finds: installed, or $DSV4C_LIBRARY."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4c.runtime.engine import Engine
from tests.runtime.hand_engine import write_engine


@pytest.fixture(scope="session")
def hand_engine_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("engine") / "hand.dsv4c")


@pytest.fixture
def engine(hand_engine_file: Path) -> Iterator[Engine]:
    with Engine.open(hand_engine_file, threads=2) as opened:
        yield opened
