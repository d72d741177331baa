"""Where a signal interrupts: in code of dsv4c, not in what C++ and C call, and once."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from dsv4c.cli.interruption import interruptible
from tests.fixtures import TINY_OFFICIAL


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """A run of the tests in the background may have them ignored."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    defaults = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(number, default) for number, default in zip(numbers, defaults, strict=True)]
    yield
    after = [signal.signal(number, old) for number, old in zip(numbers, before, strict=True)]
    assert after == list(defaults)


def of_module(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it were defined there."""
    assert isinstance(function, FunctionType)
    code, cells = function.__code__, function.__closure__
    return FunctionType(code, {**function.__globals__, "__name__": name}, None, function.__defaults__, cells)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
    # The handler has run when this returns: it runs between two instructions.
    for _ in range(10):
        pass


def interrupted(function: Callable[[list[str]], object]) -> list[str]:
    """What dsv4c's function `function` said until it was interrupted, in the words that it appended."""
    said: list[str] = []

    def run() -> None:
        try:
            function(said)
            said.append("missed")
        finally:
            # Whoever clears up is not interrupted.
            send()
            send(signal.SIGINT)
            said.append("cleared")

    with pytest.raises(KeyboardInterrupt), interruptible():
        of_module("dsv4c.somewhere", run)()
    assert sys.gettrace() is TRACE
    return said


TRACE = sys.gettrace()  # of a debugger or of coverage


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_at_once_in_dsv4c_and_the_standard_library(number: signal.Signals) -> None:
    def function(said: list[str]) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        time.sleep(20)

    start = time.monotonic()
    assert interrupted(of_module("json.decoder", function)) == ["cleared"]
    assert interrupted(of_module("dsv4c.elsewhere", function)) == ["cleared"]
    assert time.monotonic() - start < 10


def test_torch_goes_on_until_it_returns() -> None:
    def inner(said: list[str]) -> None:
        send()
        said.append("torch")

    def outer(said: list[str]) -> None:
        of_module("torch._C._somewhere", inner)(said)

    assert interrupted(outer) == ["torch", "cleared"]
    # What it calls is under C++ too, dsv4c's operators for example.
    for name in ("dsv4c.graph.ops", "numpy", "json"):
        within = of_module(name, inner)

        def calls(said: list[str], within: Any = within) -> None:
            within(said)
            said.append("returned")

        assert interrupted(of_module("torch.library", calls)) == ["torch", "returned", "cleared"]


def test_an_error_that_torch_raises_then_is_replaced() -> None:
    def inner(said: list[str]) -> None:
        send()
        raise ValueError

    assert interrupted(of_module("torch", inner)) == ["cleared"]


def test_a_wrapper_of_torch_around_code_of_dsv4c_is_no_part_of_it() -> None:
    def inner(said: list[str]) -> None:
        send()
        said.append("went on")

    def wrapper(said: list[str]) -> None:
        of_module("dsv4c.graph.interpreter", inner)(said)

    assert interrupted(of_module("torch.utils._contextlib", wrapper)) == ["cleared"]


def test_where_exceptions_are_dropped_or_renamed() -> None:
    class Deleted:
        def __init__(self, said: list[str]) -> None:
            self.said = said

        def __del__(self) -> None:
            send()
            self.said.append("went on")

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            send()

    def deleting(said: list[str]) -> None:
        Deleted(said)

    def naming(said: list[str]) -> None:
        type("Owner", (), {"field": Named()})

    def referring(said: list[str]) -> None:
        def callback(reference: object) -> None:
            send()
            said.append("went on")

        target = threading.Event()
        reference = weakref.ref(target, of_module("weakref", callback))
        del target
        assert reference() is None

    for function, said in ((deleting, ["went on"]), (naming, []), (referring, ["went on"])):
        assert interrupted(function) == [*said, "cleared"], function


def test_an_import_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dsv4c_test_import.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nfor _ in range(10): pass\ndone = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def function(said: list[str]) -> None:
        import dsv4c_test_import  # type: ignore[import-not-found]  # noqa: F401

    assert interrupted(function) == ["cleared"]
    assert sys.modules.pop("dsv4c_test_import").done


def test_nothing_of_dsv4c_runs() -> None:
    with interruptible():
        send()
    with interruptible():
        send(signal.SIGINT)


def test_handlers_of_others_stay() -> None:
    def mine(number: int, frame: object) -> None:
        seen.append(number)

    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, mine), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) is mine and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        send()
    signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGHUP, before[1])
    assert seen == [signal.SIGTERM]


def test_elsewhere_than_in_the_main_thread() -> None:
    seen: list[bool] = []

    def run() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]


# Where an exception becomes another: in an import that C++ begins, and in a size that C++ asks for.
IN_AN_IMPORT = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
"""
IN_A_SIZE = """
import linecache, torch
from torch.fx.experimental.sym_node import SymNode
is_int, sent = SymNode.is_int, False
def interrupting(self):
    global sent
    caller = sys._getframe(1)
    if not sent and "empty_strided" in linecache.getline(caller.f_code.co_filename, caller.f_lineno):
        sent = True
        os.kill(os.getpid(), signal.SIGTERM)
    return is_int(self)
SymNode.is_int = interrupting
"""


@pytest.mark.parametrize("where", [IN_AN_IMPORT.format(name="numpy.exceptions"), IN_A_SIZE])
def test_a_build_that_is_told_to_end(where: str, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
{where}
from dsv4c.cli.entry import main
sys.argv = ["dsv4c", "build", {str(TINY_OFFICIAL)!r}, "--target", "cpu", "-o", {str(tmp_path / "e")!r}]
sys.exit(main())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stderr.strip()) == (130, "interrupted")
    assert not list(tmp_path.iterdir())
