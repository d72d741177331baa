"""The public API of the runtime: open engines, run sessions. Needs numpy only."""

from dsv4c.errors import Dsv4cError, EngineFormatError, SessionError
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.library import cmake_dir
from dsv4c.runtime.session import EngineInfo, RoutingCounts, Sampling, Session
from dsv4c.runtime.trace import LaunchTime, TraceOutput

__all__ = [
    "Dsv4cError",
    "Engine",
    "EngineFormatError",
    "EngineInfo",
    "LaunchTime",
    "RoutingCounts",
    "Sampling",
    "Session",
    "SessionError",
    "TraceOutput",
    "cmake_dir",
]
