"""What every test has: one torch thread, text goldens, and skips that say what is missing."""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"

# Two workers share two cores; more threads would only wait for each other.
torch.set_num_threads(1)

# A shell that runs the tests in the background has Ctrl-C ignored, for all children too; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden; read the diff before committing"
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption(
        "--compile-kernels",
        action="store_true",
        help="compile what the kernel tests on a GPU need into the cubin cache, here, without one",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {
        "gpu": _without_capability(None),
        "sm90a": _without_capability((9, 0)),
        "orin": _without_capability((8, 7)),
        "nvrtc": _without_package("nvidia.cuda_nvrtc"),
        "triton": _without_package("triton"),
        "tensorrt": _without_package("tensorrt"),
        "slow": None if config.getoption("--slow") else "slow: run with --slow",
    }
    if config.getoption("--compile-kernels"):
        missing |= {"gpu": None, "sm90a": None}
    for item in items:
        for mark in item.iter_markers():
            if reason := missing.get(mark.name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with the file tests/golden/<name>; --update-golden writes it instead."""
    update = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden {path}: make it with --update-golden"
        assert text == path.read_text(encoding="utf-8"), (
            f"differs from {path}: if that is meant, run with --update-golden"
        )

    return compare


def _without_capability(capability: tuple[int, int] | None) -> str | None:
    """Why a test for this chip cannot run; None when it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = torch.cuda.get_device_capability()
    if capability is None or found == capability:
        return None
    return f"needs a device of compute capability {capability[0]}.{capability[1]}, this one has {found[0]}.{found[1]}"


def _without_package(name: str) -> str | None:
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        found = False
    return None if found else f"package {name} is not installed"
