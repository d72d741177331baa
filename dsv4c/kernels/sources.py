"""The text of kernels: a source with all it includes or imports, which together decide the machine code.

CUDA C++ is `cuda/<source>.cu` with `#include "..."` of the same folder; Triton is `triton/<source>.py`, which may
import Triton, the standard library and modules of its own folder.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from dsv4c.errors import KernelError

KERNEL_FOLDER = Path(__file__).parent
TRITON_PACKAGE = "dsv4c.kernels.triton"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class SourceText:
    """A source: its own text and that of the files below it, by name."""

    def __init__(self, path: Path, files: dict[str, str]) -> None:
        self.path = path
        self.files = files

    @property
    def text(self) -> str:
        return self.files[self.path.name]

    @property
    def headers(self) -> dict[str, str]:
        """What it includes, directly or not, sorted by name."""
        return {name: self.files[name] for name in sorted(self.files) if name != self.path.name}

    @cached_property
    def digests(self) -> dict[str, str]:
        """The sha256 of each file, sorted by name."""
        return {name: hashlib.sha256(self.files[name].encode()).hexdigest() for name in sorted(self.files)}


class KernelSources:
    """Reads each source once."""

    def __init__(self, folder: Path = KERNEL_FOLDER) -> None:
        self.folder = folder
        self._read: dict[tuple[str, str], SourceText] = {}

    def find(self, language: str, source: str) -> SourceText:
        """Raises KernelError where there is no such file, or where its Python is not to be parsed."""
        key = language, source
        if key not in self._read:
            self._read[key] = self._collect(language, source)
        return self._read[key]

    def _collect(self, language: str, source: str) -> SourceText:
        suffix, below = (".cu", _included) if language == "cuda" else (".py", _imported)
        path = self.folder / language / f"{source}{suffix}"
        if not path.is_file():
            raise KernelError(f"there is no kernel source {path}", hint="a variant names a file that does not exist")
        files: dict[str, str] = {}
        waiting = [path]
        while waiting:
            one = waiting.pop()
            # A missing header is left to the compiler, which knows whether an #if hides it.
            if one.name not in files and one.is_file():
                files[one.name] = one.read_text(encoding="utf-8")
                waiting += below(one, files[one.name])
        return SourceText(path, files)


def _included(path: Path, text: str) -> Iterator[Path]:
    return (path.parent / name for name in _INCLUDE.findall(text))


def _imported(path: Path, text: str) -> Iterator[Path]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise KernelError(f"{path}:{error.lineno}: {error.msg}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # From the package itself the names are modules, from a module they are its functions.
            package = node.module == TRITON_PACKAGE
            names = [f"{node.module}.{alias.name}" for alias in node.names] if package else [str(node.module)]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if name.startswith(f"{TRITON_PACKAGE}."):
                yield path.with_name(f"{name.removeprefix(f'{TRITON_PACKAGE}.')}.py")
            elif top != "triton" and top not in sys.stdlib_module_names:
                # Its text would not enter the key of the cache.
                raise KernelError(f"{path}:{node.lineno}: a Triton kernel may not import {name}")
