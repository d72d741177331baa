"""Kernel tests run on the CPU and, marked, on a GPU; see device_kernels.py for machine code made elsewhere."""

from collections.abc import Iterator

import pytest

from tests.kernels.device_kernels import Mode, set_mode
from tests.kernels.interpreted import stop_interpreter
from tests.kernels.runner import Runner


def pytest_sessionfinish() -> None:
    stop_interpreter()


@pytest.fixture(
    params=["emulator", pytest.param("device", marks=[pytest.mark.gpu, pytest.mark.sm90a])],
)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Where `run_operator` runs the kernels."""
    compiling = request.config.getoption("--compile-kernels")
    if compiling and request.param == "emulator":
        pytest.skip("compiling for the GPU only")
    set_mode(Mode.COMPILE if compiling else Mode.RUN)
    yield request.param
    set_mode(Mode.RUN)


@pytest.fixture
def on_device(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """For large cases, one launch each, that only a GPU does in time; the test is marked gpu and sm90a itself."""
    set_mode(Mode.COMPILE_AND_STOP if request.config.getoption("--compile-kernels") else Mode.RUN)
    yield "device"
    set_mode(Mode.RUN)
