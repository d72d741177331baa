"""The library from C and C++: its header, the CMake package with the example, hashing, null pointers."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4c.errors import SessionError
from dsv4c.runtime import library as lib
from dsv4c.runtime.engine import Engine
from tests.runtime.hand_engine import hand_parts, write_engine

RUNTIME = Path(lib.__file__).parent


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def find_program(*names: str) -> str:
    """A program of the environment or of the system."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    pytest.skip(f"needs {names[0]}")


@pytest.mark.parametrize(
    ("compilers", "standard", "suffix"),
    [(("cc", "gcc", "clang"), "c99", "c"), (("c++", "g++", "clang++"), "c++17", "cc")],
    ids=["c99", "c++17"],
)
def test_header_compiles(tmp_path: Path, compilers: tuple[str, ...], standard: str, suffix: str) -> None:
    source = tmp_path / f"use.{suffix}"
    source.write_text("#include <dsv4c/dsv4c.h>\nint main(void) { return dsv4c_abi_version() != DSV4C_ABI_VERSION; }\n")
    flags = (f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I", RUNTIME / "include")
    run(find_program(*compilers), *flags, "-c", source, "-o", tmp_path / "use.o")


def test_ctypes_structs_have_the_sizes_of_the_header(tmp_path: Path) -> None:
    names = {
        "dsv4c_engine_options": lib.EngineOptions,
        "dsv4c_engine_info": lib.Info,
        "dsv4c_session_options": lib.SessionOptions,
        "dsv4c_step": lib.Step,
        "dsv4c_sampling": lib.SamplingArrays,
        "dsv4c_trace_tensor": lib.TraceTensor,
        "dsv4c_trace_event": lib.TraceEvent,
    }
    lines = []
    for name, struct in names.items():
        lines.append(f"typedef char {name}_size[sizeof({name}) == {ctypes.sizeof(struct)} ? 1 : -1];")
        for field in struct._fields_:
            offset = getattr(struct, field[0]).offset
            check = f"offsetof({name}, {field[0]}) == {offset} ? 1 : -1"
            lines.append(f"typedef char {name}_{field[0]}_offset[{check}];")
    lines += [
        f"typedef char {status.name}_code[DSV4C_{status.name} == {status.value} ? 1 : -1];" for status in lib.Status
    ]
    source = tmp_path / "sizes.c"
    source.write_text("#include <dsv4c/dsv4c.h>\n" + "\n".join(lines) + "\n")
    run(find_program("cc", "gcc", "clang"), "-std=c99", "-I", RUNTIME / "include", "-fsyntax-only", source)


@pytest.fixture
def cmake_package() -> Path:
    try:
        return lib.cmake_dir()
    except SessionError as error:
        pytest.skip(f"needs the installed CMake package: {error.message}")


def test_cpp_example(tmp_path: Path, cmake_package: Path, hand_engine_file: Path) -> None:
    cmake, build = find_program("cmake"), tmp_path / "build"
    run(cmake, "-S", RUNTIME / "examples" / "generate", "-B", build, f"-Ddsv4c_DIR={cmake_package}")
    run(cmake, "--build", build)
    with Engine.open(hand_engine_file) as engine:
        expected = list(engine.generate([3, 1, 4], 9))
    printed = run(build / "generate", hand_engine_file, "9", "3", "1", "4")
    assert [int(token) for token in printed.split()] == expected
    bad = subprocess.run(
        [build / "generate", hand_engine_file, "9", "3000"], capture_output=True, text=True, check=False
    )
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr == "error: row 0: token 3000 is outside the vocabulary of 40\n"


@pytest.mark.parametrize("size", [1, 55, 56, 63, 64, 65, 127, 128, 511, 513, 5000])
def test_chunk_digests_are_sha256(tmp_path: Path, size: int) -> None:
    parts = hand_parts()
    extra = hashlib.shake_256(b"weights").digest(size)
    parts.weights += extra
    with Engine.open(write_engine(tmp_path / "hand.dsv4c", parts)) as engine:
        engine.verify_weights()


def test_null_pointers_and_unset_sizes(hand_engine_file: Path) -> None:
    library = lib.load_library()
    library.dsv4c_engine_close(None)
    library.dsv4c_session_destroy(None)
    engine, session, length = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint32()
    path = os.fsencode(hand_engine_file)
    assert library.dsv4c_engine_open(path, None, ctypes.byref(engine)) == lib.Status.OK
    assert library.dsv4c_session_create(engine, None, ctypes.byref(session)) == lib.Status.OK
    sized = lib.Step(struct_size=ctypes.sizeof(lib.Step), row_count=1)
    no_function = lib.TRACE_FUNCTION()
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("dsv4c_engine_open", (None, None, ctypes.byref(ctypes.c_void_p())), "path must not be null"),
        ("dsv4c_engine_open", (path, None, None), "engine must not be null"),
        ("dsv4c_engine_get_info", (engine, None), "info must not be null"),
        ("dsv4c_engine_get_info", (engine, ctypes.byref(lib.Info())), "struct_size of info is not set"),
        ("dsv4c_engine_section", (engine, 8, None, None), "section type 8 is unknown"),
        ("dsv4c_engine_section", (engine, 1, None, None), "data must not be null"),
        ("dsv4c_engine_verify_weights", (None, lib.PROGRESS_FUNCTION(), None), "engine must not be null"),
        ("dsv4c_session_create", (None, None, ctypes.byref(ctypes.c_void_p())), "engine must not be null"),
        ("dsv4c_session_create", (engine, None, None), "session must not be null"),
        ("dsv4c_session_step", (None, None, None, 0), "session must not be null"),
        ("dsv4c_session_step", (session, None, None, 0), "step must not be null"),
        ("dsv4c_session_step", (session, ctypes.byref(lib.Step()), None, 0), "struct_size of step is not set"),
        ("dsv4c_session_step", (session, ctypes.byref(sized), None, 0), "token_ids, slots and positions must not"),
        ("dsv4c_session_sample", (session, ctypes.byref(sized), None, None), "sampling must not be null"),
        ("dsv4c_session_trace", (session, ctypes.byref(sized), no_function, None), "must not be null"),
        ("dsv4c_session_length", (session, 0, None), "length must not be null"),
        ("dsv4c_session_length", (session, 1, ctypes.byref(length)), "slot 1 does not exist"),
        ("dsv4c_session_save_size", (session, 0, None), "size must not be null"),
        ("dsv4c_session_save", (session, 0, None, 0), "data must not be null"),
        ("dsv4c_session_restore", (session, 0, None, 0), "data must not be null"),
    ]
    for name, arguments, message in calls:
        assert getattr(library, name)(*arguments) == lib.Status.INVALID_ARGUMENT, name
        assert message in library.dsv4c_last_error().decode(), name
    zero = (ctypes.c_int32 * 1)()
    address = ctypes.addressof(zero)
    step = lib.Step(ctypes.sizeof(lib.Step), 1, address, address, address, None, lib.ALL_ROWS)
    for logits, size in ((None, 40), (address, 39)):
        assert library.dsv4c_session_step(session, ctypes.byref(step), logits, size) == lib.Status.INVALID_ARGUMENT
        assert b"logits need room for 40 floats" in library.dsv4c_last_error()
    # An older caller's struct, which ends before the logits rows: none are wanted.
    step.struct_size = lib.Step.logits_rows.offset
    assert library.dsv4c_session_step(session, ctypes.byref(step), None, 0) == lib.Status.OK
    library.dsv4c_engine_close(engine)
    library.dsv4c_session_destroy(session)


def test_library_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lib.library_path()
    monkeypatch.setenv(lib.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(SessionError, match=r"none\.so', which is not a file"):
        lib.library_path()
    monkeypatch.setenv(lib.LIBRARY_VARIABLE, str(found))
    assert lib.library_path() == found
