"""libdsv4c through ctypes: where it is, its structs and functions (include/dsv4c/dsv4c.h), its statuses as errors."""

import ctypes
import enum
import functools
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from dsv4c.errors import Dsv4cError, EngineFormatError, SessionError

ABI_VERSION = 1
LIBRARY_VARIABLE = "DSV4C_LIBRARY"
LIBRARY_NAME = "libdsv4c.so"
ALL_ROWS = 0xFFFFFFFF
POISON = 1
NO_GRAPHS = 2
TIMES_ONLY = 1


class Status(enum.IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    IO = 2
    FORMAT = 3
    VERSION = 4
    ARCH = 5
    DIGEST = 6
    OUT_OF_MEMORY = 7
    UNSUPPORTED = 8
    BUSY = 9
    STOPPED = 10
    INTERNAL = 11
    DEVICE = 12


_DAMAGED = "copy the file again or rebuild it with `dsv4c build`"
_REFUSED = "nothing has changed: correct the arguments and call again"
_ERRORS: dict[Status, tuple[type[Dsv4cError], str | None]] = {
    Status.INVALID_ARGUMENT: (SessionError, _REFUSED),
    Status.IO: (EngineFormatError, "check the path and its permissions"),
    Status.FORMAT: (EngineFormatError, _DAMAGED),
    Status.VERSION: (EngineFormatError, "rebuild the engine with this dsv4c, or install the dsv4c that wrote it"),
    Status.ARCH: (EngineFormatError, "build an engine for this machine, as with `dsv4c build CHECKPOINT --target cpu`"),
    Status.DIGEST: (EngineFormatError, _DAMAGED),
    Status.OUT_OF_MEMORY: (SessionError, "use fewer slots or a smaller context"),
    Status.UNSUPPORTED: (EngineFormatError, "`dsv4c doctor ENGINE` says what this machine lacks to run it"),
    Status.BUSY: (SessionError, "use one session per thread"),
    Status.DEVICE: (
        SessionError,
        "`nvidia-smi` says how the GPU is; after a failed launch the process must start anew",
    ),
}


class EngineOptions(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("device", ctypes.c_uint32))


class Info(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("format_version", ctypes.c_uint32),
        ("arch", ctypes.c_char * 20),
        ("world_size", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("vocab_size", ctypes.c_uint32),
        ("max_context", ctypes.c_uint32),
        ("layer_count", ctypes.c_uint32),
        ("hidden_size", ctypes.c_uint32),
        ("block_tokens", ctypes.c_uint32),
        ("rollback_rows", ctypes.c_uint32),
        ("bos_token_id", ctypes.c_int32),
        ("eos_count", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("eos_token_ids", ctypes.POINTER(ctypes.c_uint32)),
        ("weight_bytes", ctypes.c_uint64),
        ("device", ctypes.c_char * 100),
        ("sm_count", ctypes.c_uint32),
        ("weight_seconds", ctypes.c_double),
        ("counted_layers", ctypes.c_uint32),
        ("counted_experts", ctypes.c_uint32),
    )


class SessionOptions(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("slots", ctypes.c_uint32),
        ("context", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("row_count", ctypes.c_uint32),
        ("token_ids", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("logits_rows", ctypes.c_void_p),
        ("logits_count", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    )


class SamplingArrays(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("seed", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
    )


class TraceTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_uint32),
        ("ndim", ctypes.c_uint32),
        ("size", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    )


class TraceEvent(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("launch", ctypes.c_uint32),
        ("kernel", ctypes.c_char_p),
        ("node", ctypes.c_char_p),
        ("layer", ctypes.c_uint32),
        ("first_row", ctypes.c_uint32),
        ("row_count", ctypes.c_uint32),
        ("output_count", ctypes.c_uint32),
        ("outputs", ctypes.POINTER(TraceTensor)),
        ("bytes_moved", ctypes.c_uint64),
        ("flops", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
    )


PROGRESS_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
TRACE_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(TraceEvent))

_POINTER = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dsv4c_abi_version": (_U32, ()),
    "dsv4c_last_error": (ctypes.c_char_p, ()),
    "dsv4c_engine_open": (ctypes.c_int, (ctypes.c_char_p, _POINTER, _POINTER)),
    "dsv4c_engine_close": (None, (_POINTER,)),
    "dsv4c_engine_get_info": (ctypes.c_int, (_POINTER, _POINTER)),
    "dsv4c_engine_section": (ctypes.c_int, (_POINTER, _U32, _POINTER, _POINTER)),
    "dsv4c_engine_verify_weights": (ctypes.c_int, (_POINTER, PROGRESS_FUNCTION, _POINTER)),
    "dsv4c_session_create": (ctypes.c_int, (_POINTER, _POINTER, _POINTER)),
    "dsv4c_session_destroy": (None, (_POINTER,)),
    "dsv4c_session_step": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _U64)),
    "dsv4c_session_sample": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "dsv4c_session_trace": (ctypes.c_int, (_POINTER, _POINTER, TRACE_FUNCTION, _POINTER)),
    "dsv4c_session_length": (ctypes.c_int, (_POINTER, _U32, _POINTER)),
    "dsv4c_session_reset": (ctypes.c_int, (_POINTER, _U32)),
    "dsv4c_session_truncate": (ctypes.c_int, (_POINTER, _U32, _U32)),
    "dsv4c_session_fork": (ctypes.c_int, (_POINTER, _U32, _U32)),
    "dsv4c_session_save_size": (ctypes.c_int, (_POINTER, _U32, _POINTER)),
    "dsv4c_session_save": (ctypes.c_int, (_POINTER, _U32, _POINTER, _U64)),
    "dsv4c_session_restore": (ctypes.c_int, (_POINTER, _U32, _POINTER, _U64)),
    "dsv4c_session_routing_counts": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _U64)),
    "dsv4c_session_reset_routing_counts": (ctypes.c_int, (_POINTER,)),
}


def library_path() -> Path:
    """$DSV4C_LIBRARY, else beside this module, else among the files of the installed distribution.

    An editable install has the module in the source tree and the library in site-packages.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen:
        if not Path(chosen).is_file():
            raise SessionError(f"${LIBRARY_VARIABLE} is {chosen!r}, which is not a file", hint="unset it or correct it")
        return Path(chosen)
    candidates = [Path(__file__).parent / "lib" / LIBRARY_NAME]
    try:
        distribution = importlib.metadata.distribution("dsv4c")
        candidates.append(Path(str(distribution.locate_file(f"dsv4c/runtime/lib/{LIBRARY_NAME}"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise SessionError(
        f"the runtime library {LIBRARY_NAME} is not installed",
        hint=f"`pip install .` builds it; ${LIBRARY_VARIABLE} can name one that is elsewhere",
    )


def cmake_dir() -> Path:
    """The folder with dsv4cConfig.cmake: `cmake -Ddsv4c_DIR=...` makes find_package(dsv4c) work."""
    folder = library_path().parent / "cmake" / "dsv4c"
    if not (folder / "dsv4cConfig.cmake").is_file():
        raise SessionError(
            f"there is no CMake package beside {library_path()}", hint="install dsv4c with `pip install .`"
        )
    return folder


@functools.cache
def load_library() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        library.dsv4c_abi_version.restype = _U32
        version = int(library.dsv4c_abi_version())
    except (OSError, AttributeError) as error:
        raise SessionError(f"cannot load {path}: {error}", hint="rebuild it with `pip install .`") from error
    if version != ABI_VERSION:
        raise SessionError(
            f"{path} has ABI version {version}; this package needs {ABI_VERSION}",
            hint="rebuild it with `pip install .`",
        )
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def check(status: int, where: str | None = None) -> None:
    """Raise the error of a failed call; `where` names the file it was about."""
    if status == Status.OK:
        return
    message = load_library().dsv4c_last_error().decode(errors="replace")
    if where is not None:
        message = f"{where}: {message}"
    if status not in _ERRORS:  # a bug in dsv4c
        raise RuntimeError(message)
    kind, hint = _ERRORS[Status(status)]
    if status == Status.OUT_OF_MEMORY and where is not None:  # opening an engine
        hint = "free memory there, or use a machine that has more"
    raise kind(message, hint=hint)
