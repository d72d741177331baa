"""Caches that the tools themselves made here: found, removed, made again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4c.cubin_cache import CubinCache, cache_key
from dsv4c.jit_caches.known_layouts import (
    DSV4C_LAYOUT,
    INDUCTOR_LAYOUT,
    TORCH_EXTENSIONS_DIR_LAYOUT,
    TRITON_LAYOUT,
)
from dsv4c.jit_caches.layout import Layout
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import remove_entries
from dsv4c.jit_caches.selection import make_cut
from dsv4c.jit_caches.survey import survey
from dsv4c.jit_caches.usage import Usage
from tests.jit_caches.fake_trees import contents, make_older

ALL = make_cut([], 0, None, None)

COMPILE = """
import torch
from torch._dynamo.utils import counters

@torch.compile(dynamic=False)
def forward(x, w):
    return torch.nn.functional.silu(x @ w).sum(-1)

x = torch.randn(8, 16, requires_grad=True)
forward(x, torch.eye(16)).sum().backward()
print(dict(counters["aot_autograd"]), dict(counters["inductor"]))
"""

KERNEL = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "B": "constexpr"}
source = ASTSource(double, signature=signature, constexprs={"B": 128})
print("cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
"""

EXTENSION = """
from torch.utils.cpp_extension import load_inline
print(load_inline("dsv4c_test_add", cpp_sources="int add(int a, int b) { return a + b; }", functions=["add"]).add(1, 2))
"""


def run(script: Path | str, **environ: str) -> str:
    command = [sys.executable, str(script)] if isinstance(script, Path) else [sys.executable, "-c", script]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path} | environ
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def place_at(path: Path, layout: Layout) -> Place:
    return Place("real", str(path), "test", layout, path.stat().st_uid)


def settle(path: Path) -> None:
    """What was just written counts as being written."""
    make_older(path, days=1)


def hits(output: str) -> int:
    found = re.search(r"'autograd_cache_hit': (\d+)", output)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_torch_compile(tmp_path: Path) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    # The default folder holds the compiled headers, whatever the variable says.
    temporary, chosen = tmp_path / "tmp", tmp_path / "chosen"
    temporary.mkdir()
    environ = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(chosen), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    assert hits(run(COMPILE, **environ)) == 0 and hits(run(COMPILE, **environ)) == 1
    (default,) = temporary.glob("torchinductor_*")
    for path in (chosen, default):
        place = place_at(path, INDUCTOR_LAYOUT)
        assert (survey(place, Usage({})).skipped or "").startswith("being written: ")
        settle(path)
        found = survey(place, Usage({}))
        assert found.entries > 0 and found.others == found.refused.count == 0 and found.skipped is None
        assert found.files == len(contents(path))

    # The graphs alone, as after an interruption: the code is still there, and a graph is compiled again.
    done = 0

    def tick(files: int) -> None:
        nonlocal done
        done += files

    part = remove_entries(place_at(chosen, INDUCTOR_LAYOUT), ALL, tick, lambda: done >= 2)
    assert part.stopped and part.files == 2
    assert hits(run(COMPILE, **environ)) == 0

    settle(chosen)
    result = remove_entries(place_at(chosen, INDUCTOR_LAYOUT), ALL)
    assert result.files > 0 and contents(chosen) == set() and list(chosen.iterdir()) == []
    assert hits(run(COMPILE, **environ)) == 0 and hits(run(COMPILE, **environ)) == 1


def test_cubins_of_dsv4c(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "cubins")
    key = cache_key({"kernel": "norm"})
    cache.put(key, b"cubin", {"registers": 32})
    place = place_at(tmp_path / "cubins", DSV4C_LAYOUT)
    assert (survey(place, Usage({})).skipped or "").startswith("being written: ")
    settle(tmp_path / "cubins")
    found = survey(place, Usage({}))
    assert (found.entries, found.files, found.others) == (cache.usage().entries, 4, 0) and found.skipped is None
    assert remove_entries(place, ALL).files == 2
    assert cache.get(key) is None and cache.usage().files == 0
    cache.put(key, b"cubin", {"registers": 32})
    assert cache.get(key) is not None and cache.warning is None


@pytest.mark.triton
def test_triton(tmp_path: Path) -> None:
    script, cache = tmp_path / "kernel.py", tmp_path / "cache"
    script.write_text(KERNEL, encoding="utf-8")
    assert run(script, TRITON_CACHE_DIR=str(cache)) == "True\n"
    place = place_at(cache, TRITON_LAYOUT)
    assert (survey(place, Usage({})).skipped or "").startswith("being written: ")
    settle(cache)
    found = survey(place, Usage({}))
    assert (found.entries, found.files, found.others) == (1, 8, 0)
    made = contents(cache)
    assert sum(name.rpartition("/")[2].startswith("__grp__") for name in made) == 1
    result = remove_entries(place, ALL)
    assert result.files == 8 and result.freed_bytes == found.disk_bytes and list(cache.iterdir()) == []
    assert run(script, TRITON_CACHE_DIR=str(cache)) == "True\n" and contents(cache) == made


@pytest.mark.slow
def test_torch_extension(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path / "extensions"
    folder.mkdir()
    assert run(EXTENSION, TORCH_EXTENSIONS_DIR=str(folder)) == "3\n"
    place = place_at(folder, TORCH_EXTENSIONS_DIR_LAYOUT)
    settle(folder)
    found = survey(place, Usage({}))
    assert found.entries == 1 and found.others == found.refused.count == 0
    assert remove_entries(place, ALL).files == found.files and list(folder.iterdir()) == []
    assert run(EXTENSION, TORCH_EXTENSIONS_DIR=str(folder)) == "3\n"
