"""CUDA C++ kernels on the CPU: a variant compiled by the host's compiler into a library that runs its grid.

The libraries are kept in build/emulator, or the folder that DSV4C_EMULATOR_CACHE names, by a digest of all that went
into them.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsv4c.plan.execution_plan import KernelVariant

ROOT = Path(__file__).parents[2]
EMULATOR = Path(__file__).parent / "emulator"
CUDA = ROOT / "dsv4c" / "kernels" / "cuda"
FLAGS = (
    # Most of a test is the compiler's time; more optimisation takes more than it saves.
    *("-std=c++17", "-Og", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-w"),
    # The kernels view memory as other types; a product is not contracted into a sum unless they say so.
    *("-fno-strict-aliasing", "-ffp-contract=off"),
    # A misaligned access, which a GPU refuses, becomes an illegal instruction, which grid.cc reports.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
)
# Every kernel comes behind this one, precompiled, and is linked to what the emulator's own sources make.
HEADER = EMULATOR / "emulate.h"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class EmulatorError(Exception):
    """A kernel did what a GPU forbids: a barrier that not all threads reach, an illegal address."""


def run_emulated(
    variant: KernelVariant,
    grid: tuple[int, int, int],
    block: int,
    shared_bytes: int,
    pointers: Sequence[int],
    backwards: bool = False,
    folders: tuple[Path, ...] = (CUDA,),
) -> None:
    """Runs a grid on host memory. `backwards`: blocks, warps and lanes from the last to the first."""
    entry = _library(_source(variant), folders)
    array = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
    error = entry((ctypes.c_uint * 3)(*grid), block, shared_bytes, array, len(pointers), int(backwards))
    if error is not None:
        raise EmulatorError(f"{variant.source}.cu, {variant.entry}: {error.decode()}")


def _source(variant: KernelVariant) -> str:
    """The text of the translation unit. Everything is local to it, so that shared variables of templates are too."""
    macros = [f"#define {name} {_macro(value)}\n" for name, value in variant.constants]
    return (
        '#include "emulate.h"\n'
        "#define DSV4C_SM_90A 1\n"
        f"{''.join(macros)}"
        f'namespace {{\n#include "{variant.source}.cu"\n}}\n'
        f"#define EMULATE_ENTRY {variant.entry}\n"
        '#include "driver.h"\n'
    )


def _macro(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"({value!r})"


@functools.cache
def _library(source: str, folders: tuple[Path, ...]) -> ctypes._CFuncPtr:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    path = _cache_folder() / f"{_digest(compiler, source, folders)}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, source, folders, path)
    entry = ctypes.CDLL(str(path)).dsv4c_emulate
    entry.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint),
        *(ctypes.c_void_p, ctypes.c_uint, ctypes.c_int),
    ]
    entry.restype = ctypes.c_char_p
    return entry


def _compile(compiler: str, source: str, folders: tuple[Path, ...], path: Path) -> None:
    emulator = _precompile(compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unit, built = Path(scratch, "unit.cc"), Path(scratch, "unit.so")
        unit.write_text(source, encoding="utf-8")
        includes = [f"-I{folder}" for folder in (emulator, EMULATOR, *folders)]
        objects = [str(emulator / f"{file.stem}.o") for file in _emulator_sources()]
        _run([compiler, *FLAGS, *_linker(), *includes, str(unit), *objects, "-o", str(built)], source)
        built.replace(path)  # whole or not at all: tests run in several processes


@functools.cache
def _linker() -> tuple[str, ...]:
    """The option for a faster linker where there is one."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


@functools.cache
def _precompile(compiler: str) -> Path:
    """A folder with the emulator's header and sources, compiled."""
    folder = _cache_folder() / _digest(compiler, "", ())
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=_cache_folder()) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        _run([compiler, "-x", "c++-header", *FLAGS, str(HEADER), "-o", f"{made}/{HEADER.name}.gch"], str(HEADER))
        for file in _emulator_sources():
            _run([compiler, *FLAGS, "-O2", "-c", str(file), "-o", f"{made}/{file.stem}.o"], str(file))
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)
    return folder


def _emulator_sources() -> list[Path]:
    return sorted(EMULATOR.glob("*.cc"))


def _run(command: list[str], source: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise EmulatorError(f"{' '.join(command)}\n{source}\n{result.stderr}")


def _cache_folder() -> Path:
    return Path(os.environ.get("DSV4C_EMULATOR_CACHE") or ROOT / "build" / "emulator")


def _digest(compiler: str, source: str, folders: tuple[Path, ...]) -> str:
    """Of the compiler, its options, the emulator, and the text with all that it includes of `folders`."""
    digest = hashlib.sha256("\0".join([compiler, *FLAGS]).encode())
    for file in [*sorted(EMULATOR.glob("*.h")), *_emulator_sources()]:
        digest.update(file.read_bytes())
    waiting, seen = [source], set()
    while waiting:
        text = waiting.pop()
        digest.update(text.encode())
        for name in _INCLUDE.findall(text):
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is not None and name not in seen:
                seen.add(name)
                waiting.append(path.read_text(encoding="utf-8"))
    return digest.hexdigest()[:32]
