"""Many small files: bounded time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jit_caches.fake_trees import make_older

ROOT = Path(__file__).parents[2]

# Makes a cache, and prints seconds and growth of the peak memory for looking at it and for removing it.
SCRIPT = r"""
import json, os, sys, time
from dsv4c.jit_caches.known_layouts import INDUCTOR_LAYOUT, TRITON_LAYOUT
from dsv4c.jit_caches.places import Place
from dsv4c.jit_caches.removal import remove_entries
from dsv4c.jit_caches.selection import count_selected, make_cut
from dsv4c.jit_caches.survey import survey
from dsv4c.jit_caches.usage import Usage

root, shape, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
digits = "abcdefghijklmnopqrstuvwxyz234567"
old = time.time_ns() - 10**15

def key(number, width):
    text = ""
    while number:
        number, digit = divmod(number, 32)
        text = digits[digit] + text
    return text.rjust(width, "a")

def write(path):
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.close(fd)
    os.utime(path, ns=(old, old))

if shape == "folders":  # fifty files an entry
    layout = TRITON_LAYOUT
    for number in range(count // 50):
        folder = f"{root}/{key(number, 52).upper()}"
        os.mkdir(folder)
        for name in range(50):
            write(f"{folder}/k{name}.ptx")
        os.utime(folder, ns=(old, old))
else:  # all in one folder
    layout = INDUCTOR_LAYOUT
    os.mkdir(f"{root}/ab")
    for number in range(count):
        write(f"{root}/ab/c{key(number, 51)}.py")

place = Place("fake", root, "test", layout, os.stat(root).st_uid)

def peak():
    # Not getrusage, whose peak is that of the process before `exec`.
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

before, start = peak(), time.monotonic()
found = survey(place, Usage({}))
looked = time.monotonic() - start
cut = make_cut([found], time.time_ns(), None, 0)
selected = count_selected(found, cut.copy())
start = time.monotonic()
result = remove_entries(place, make_cut([], 0, None, None))
print(json.dumps({
    "found": found.files, "removed": result.files, "skipped": result.skipped, "left": len(os.listdir(root)),
    "look_s": looked, "remove_s": time.monotonic() - start, "memory": peak() - before,
}))
"""


def measure(tmp_path: Path, shape: str, count: int) -> dict[str, Any]:
    root = tmp_path / "cache"
    root.mkdir()
    make_older(root, days=2)
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root), shape, str(count)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout
    report: dict[str, Any] = json.loads(output)
    print(report)
    assert report["found"] == report["removed"] == count and report["left"] == 0 and report["skipped"] is None
    return report


@pytest.mark.parametrize("shape", ["folders", "files"])
def test_twenty_thousand_files(shape: str, tmp_path: Path) -> None:
    report = measure(tmp_path, shape, 20_000)
    assert report["look_s"] < 30 and report["remove_s"] < 60  # a second and a few on an idle machine
    assert report["memory"] < 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["folders", "files"])
def test_million_files(shape: str, tmp_path: Path) -> None:
    """The limits are for a busy machine. Memory is 24 bytes an entry, and an index to sort them by."""
    report = measure(tmp_path, shape, 1_000_000)
    assert report["look_s"] < 120 and report["remove_s"] < 300
    assert report["memory"] < 200 << 20
