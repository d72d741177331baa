"""The bundled checkpoint's engine, built once by the command itself."""

from pathlib import Path

import pytest

from dsv4c.cli.main import main
from tests.fixtures import TINY_OFFICIAL


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.dsv4c"
    assert main(["build", str(TINY_OFFICIAL), "--target", "cpu", "-o", str(path)]) == 0
    return path
