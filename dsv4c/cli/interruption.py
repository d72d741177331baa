"""Ctrl-C, SIGTERM and SIGHUP as a KeyboardInterrupt that is raised only in code of dsv4c and what that calls.

Python would raise it between any two instructions of the main thread. In code that C++ called, torch's above all, that
ends the process with abort(), becomes an error of another type, or is swallowed, and the same happens while an
extension is imported, in `__del__` and in callbacks of weak references. There it waits until dsv4c has the turn again.
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

# Called by C++ or likely to be, with all that it calls in turn, dsv4c's operators for example.
_UNDER_CPP = "torch"
# Of it, the wrapper that `torch.no_grad` puts around a function.
_WRAPPER = "torch.utils._contextlib"
# Called by C, which drops the exceptions of it or makes others of them. What this calls may be interrupted.
_WEAK_REFERENCES = ("weakref", "_weakrefset")
_METHODS = ("__del__", "__set_name__")
_IMPORTS = "<frozen importlib"


@contextmanager
def interruptible() -> Iterator[None]:
    """Signals that would end the process, or raise a KeyboardInterrupt anywhere, do so in a good place and only once.

    Once, because what they interrupt then clears up, and a second one would interrupt that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        found = signal.getsignal(number)
        # Others are ignored (nohup), or someone else's.
        if found in (signal.SIG_DFL, signal.default_int_handler):
            before[number] = found
            signal.signal(number, handler)
    try:
        yield
    finally:
        handler.stop()
        for number, found in before.items():
            signal.signal(number, found)


class _Handler:
    def __init__(self) -> None:
        self._done = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._done:
            return
        target, at_once = _place(frame)
        if at_once:
            self.stop()
            raise KeyboardInterrupt
        if target is not None:
            # The next instruction of that frame is traced; what runs until then is not.
            target.f_trace_opcodes = True
            target.f_trace = self._raise
            sys.settrace(_trace_nothing)

    def stop(self) -> None:
        self._done = True

    def _raise(self, frame: FrameType, event: str, argument: Any) -> None:
        # Python traces no more once this raises.
        if not self._done:
            self.stop()
            raise KeyboardInterrupt
        sys.settrace(None)


def _trace_nothing(frame: FrameType, event: str, argument: Any) -> None:
    return None


def _place(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The innermost frame of dsv4c that may be interrupted, and whether it may be now.

    It may where nothing that runs below it is called by C or C++. None: dsv4c is not running (yet, or any more).
    """
    found: FrameType | None = None
    at_once = True
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        if package == _UNDER_CPP and module != _WRAPPER:
            found, at_once = None, False
        elif found is None and package == "dsv4c":
            found = frame
        elif found is None and (package in _WEAK_REFERENCES or _is_called_by_c(frame.f_code)):
            at_once = False
        frame = frame.f_back
    return found, at_once and found is not None


def _is_called_by_c(code: CodeType) -> bool:
    return code.co_name in _METHODS or code.co_filename.startswith(_IMPORTS)
