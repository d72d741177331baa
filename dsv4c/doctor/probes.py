"""What `dsv4c doctor` tries in child processes: packages, the runtime library, an engine, the NVIDIA driver."""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsv4c.doctor.machine import PROC, read_text
from dsv4c.errors import Dsv4cError

# A cold import of torch from a slow disk takes tens of seconds; what takes longer hangs.
PROBE_TIMEOUT_S = 90.0

_CHILD = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # what a package prints is not the answer
sys.path[:] = json.loads(sys.argv[1])
from dsv4c.doctor.probes import answer_probe
os.write(out, json.dumps(answer_probe(*sys.argv[2:])).encode())
os._exit(0)  # no exit handlers of what was loaded
"""


def answer_probe(name: str, *arguments: str) -> dict[str, Any]:
    """In the child: the facts, or `error` and maybe `hint`; `absent` where there is nothing to try."""
    try:
        return _PROBES[name](*arguments)
    except Dsv4cError as error:
        return {"error": error.message, "hint": error.hint}
    # Whatever a broken package raises, SystemExit too.
    except BaseException as error:  # noqa: BLE001
        reason = str(error).strip().split("\n")[0]
        return {"error": f"{type(error).__name__}: {reason}" if reason else type(error).__name__}


def _probe_package(name: str) -> dict[str, Any]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return {"absent": True}
    version = vars(module).get("__version__") or installed_version(name)
    facts: dict[str, Any] = {"version": None if version is None else str(version)}
    if name == "torch":
        facts["cuda"] = module.version.cuda
    return facts


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _load_runtime() -> Any:
    """dsv4c.runtime.library by its file: the package around it needs numpy."""
    path = Path(__file__).parents[1] / "runtime" / "library.py"
    spec = importlib.util.spec_from_file_location("dsv4c_runtime_library", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _probe_library() -> dict[str, Any]:
    runtime = _load_runtime()
    library = runtime.load_library()
    return {"path": str(runtime.library_path()), "abi_version": library.dsv4c_abi_version()}


def _probe_engine(path: str) -> dict[str, Any]:
    """Opens it as a program would, which checks everything but the weights."""
    runtime = _load_runtime()
    library = runtime.load_library()
    options = runtime.EngineOptions(struct_size=ctypes.sizeof(runtime.EngineOptions), threads=1)
    pointer = ctypes.c_void_p()
    runtime.check(library.dsv4c_engine_open(os.fsencode(path), ctypes.byref(options), ctypes.byref(pointer)))
    library.dsv4c_engine_close(pointer)
    return {}


_MULTIPROCESSOR_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute


def _probe_driver() -> dict[str, Any]:
    """The driver API alone: no CUDA toolkit and no torch is needed."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # A file that is there and does not load is broken.
        return {"absent": True} if "No such file" in str(error) else {"error": str(error)}
    # "NVRM version: NVIDIA UNIX ... Kernel Module  580.95.05  ..."; not there on a Jetson.
    release = re.search(r"\s(\d+(?:\.\d+)+)\s", read_text(PROC / "driver" / "nvidia" / "version"))
    facts: dict[str, Any] = {"driver_version": release and release[1], "cuda_version": None, "devices": []}

    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode(errors='replace')} ({code})")

    def integer(name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *arguments)
        return value.value

    try:
        version = integer("cuDriverGetVersion")
        facts["cuda_version"] = f"{version // 1000}.{version % 1000 // 10}"
        call("cuInit", 0)
        for index in range(integer("cuDeviceGetCount")):
            device = integer("cuDeviceGet", index)
            name = ctypes.create_string_buffer(256)
            call("cuDeviceGetName", name, len(name), device)
            memory = ctypes.c_size_t()
            call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
            major, minor, sm_count = (
                integer("cuDeviceGetAttribute", attribute, device)
                for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT)
            )
            facts["devices"].append(
                {
                    "name": name.value.decode(errors="replace"),
                    "compute_capability": f"{major}.{minor}",
                    "sm_count": sm_count,
                    "memory_bytes": memory.value,
                }
            )
    except (OSError, AttributeError) as error:
        facts["error"] = str(error)
    return facts


_PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "package": _probe_package,
    "library": _probe_library,
    "engine": _probe_engine,
    "driver": _probe_driver,
}


def probe(*arguments: str) -> dict[str, Any]:
    """`answer_probe(*arguments)` of a child process with the modules that this one would import."""
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), *arguments]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_TIMEOUT_S:g} seconds"}
    except OSError as error:
        return {"error": f"cannot start {sys.executable}: {error.strerror}"}
    with contextlib.suppress(ValueError):
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer
    if result.returncode < 0:
        return {"error": f"crashes with {signal.Signals(-result.returncode).name}"}
    return {"error": f"ends the process with exit code {result.returncode}"}
