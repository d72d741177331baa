"""CUDA C++ kernels on the CPU: a variant compiled by the host's compiler into a library that runs its grid.

The libraries are kept in build/emulator, or the folder that DSV4C_EMULATOR_CACHE names, by a digest of all that went
into them.
"""

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
    # A misaligned access, which a GPU refuses, becomes an illegal instruction, which block.h reports.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
)
# Behind this header, precompiled, come the kernels. What runs a grid takes the compiler longer than most of them, so it
# is in none: it is compiled once, more optimised, and linked to each.
_HEADER = (
    '#include "emulate.h"\n'
    "extern template std::vector<std::unique_ptr<emulate::Block>>::~vector();\n"
    "namespace emulate { const char* launch_apart(const unsigned* grid, unsigned block, size_t shared, int order); }\n"
)
_LAUNCH = (
    f"{_HEADER}"
    "template std::vector<std::unique_ptr<emulate::Block>>::~vector();\n"
    "const char* emulate::launch_apart(const unsigned* grid, unsigned block, size_t shared, int order) {\n"
    "  return launch(grid, block, shared, order);\n"
    "}\n"
)
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
        '#include "emulated.h"\n'
        "#define DSV4C_SM_90A 1\n"
        f"{''.join(macros)}"
        f'namespace {{\n#include "{variant.source}.cu"\n}}\n'
        f"#define EMULATE_ENTRY {variant.entry}\n"
        "#define launch launch_apart\n"
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
    launch = _precompile(compiler)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unit, built = Path(scratch, "unit.cc"), Path(scratch, "unit.so")
        unit.write_text(source, encoding="utf-8")
        includes = [f"-I{folder}" for folder in (launch.parent, EMULATOR, *folders)]
        # Both have the function of fiber.h that switches stacks.
        _run([compiler, *FLAGS, *includes, str(launch), str(unit), "-Wl,-z,muldefs", "-o", str(built)], source)
        built.replace(path)  # whole or not at all: tests run in several processes


@functools.cache
def _precompile(compiler: str) -> Path:
    """`_LAUNCH` compiled, with `_HEADER` beside it."""
    folder = _cache_folder() / _digest(compiler, _LAUNCH, ())
    launch = folder / "launch.o"
    if launch.is_file():
        return launch
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        header, unit = Path(scratch, "emulated.h"), Path(scratch, "launch.cc")
        header.write_text(_HEADER, encoding="utf-8")
        unit.write_text(_LAUNCH, encoding="utf-8")
        flags = [*FLAGS, f"-I{EMULATOR}"]
        _run([compiler, "-x", "c++-header", *flags, str(header), "-o", f"{header}.gch"], _HEADER)
        _run([compiler, *flags, "-O2", "-c", str(unit), "-o", f"{scratch}/launch.o"], _LAUNCH)
        for name in ("emulated.h.gch", "emulated.h", "launch.o"):
            Path(scratch, name).replace(folder / name)
    return launch


def _run(command: list[str], source: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise EmulatorError(f"{' '.join(command)}\n{source}\n{result.stderr}")


def _cache_folder() -> Path:
    return Path(os.environ.get("DSV4C_EMULATOR_CACHE") or ROOT / "build" / "emulator")


def _digest(compiler: str, source: str, folders: tuple[Path, ...]) -> str:
    """Of the compiler, its options, the emulator, and the text with all that it includes of `folders`."""
    digest = hashlib.sha256("\0".join([compiler, *FLAGS, _LAUNCH]).encode())
    for file in sorted(EMULATOR.glob("*.h")):
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
