"""The engines that `python -m tests.gpu.prepare` built, in the folder that DSV4C_GPU_CASES names."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dsv4c.runtime.engine import Engine
from tests.gpu.scenarios import Array

FOLDER = os.environ.get("DSV4C_GPU_CASES")
CASES: list[str] = json.loads((Path(FOLDER) / "cases.json").read_text()) if FOLDER else []


@pytest.fixture(scope="session")
def folder() -> Path:
    if FOLDER is None:
        pytest.skip("DSV4C_GPU_CASES is not set: make the folder with `python -m tests.gpu.prepare FOLDER`")
    return Path(FOLDER)


@pytest.fixture(scope="module", params=CASES or ["none"])
def case(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Engine, dict[str, Array]]]:
    """(name, engine on the GPU, what the CPU engine saw)."""
    with np.load(folder / f"{request.param}.npz") as seen, Engine.open(folder / f"{request.param}.dsv4c") as engine:
        yield request.param, engine, dict(seen)
