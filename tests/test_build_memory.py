"""Memory and disk of a build: it must not grow with the checkpoint, and a build that dies leaves nothing to mistake."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4c import compiler
from dsv4c.compiler import build_engine
from dsv4c.engine.reader import is_engine, read_engine
from dsv4c.errors import EngineFormatError
from dsv4c.recipe import Recipe
from tests.fixtures import TINY_OFFICIAL, config_of, random_weights, tiny_config_json, write_checkpoint

ROOT = Path(__file__).parents[1]
# Samples the anonymous memory of its own process during a build; prints that before it and the peak.
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from dsv4c.compiler import build_engine
from dsv4c.recipe import Recipe

torch.set_num_threads(1)

def anonymous_kilobytes():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

checkpoint, output, goldens = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
peak, done = [0], threading.Event()

def sample():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_kilobytes())

thread = threading.Thread(target=sample)
recipe = Recipe.for_target("cpu", None)
before = anonymous_kilobytes()
thread.start()
build_engine(checkpoint, recipe, output, goldens=goldens)
done.set()
thread.join()
print(before, peak[0])
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def checkpoint_of(folder: Path, layers: int) -> Path:
    """About 10 MB a layer in bf16, most of it in experts."""
    config_json = tiny_config_json(
        num_hidden_layers=layers,
        compress_ratios=[0, 4, 128, 4] * (layers // 4),
        num_hash_layers=1,
        n_routed_experts=24,
        hidden_size=256,
        moe_intermediate_size=256,
        num_nextn_predict_layers=0,
    )
    weights = random_weights(config_of(config_json), seed=0)
    return write_checkpoint(folder, config_json, weights, quantization="bf16")


def measure(checkpoint: Path, output: Path, goldens: bool) -> tuple[int, int]:
    """Anonymous memory before a build and at its peak, kilobytes."""
    command = [sys.executable, "-c", MEASURE, str(checkpoint), str(output), str(goldens)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    before, peak = map(int, result.stdout.split())
    return before, peak


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: memory cannot be read")
@pytest.mark.slow
@pytest.mark.parametrize("goldens", [False, True], ids=["plain", "goldens"])
def test_memory_does_not_grow_with_the_layers(tmp_path: Path, goldens: bool) -> None:
    peaks = {}
    for layers in (4, 16):
        checkpoint = checkpoint_of(tmp_path / str(layers), layers)
        before, peaks[layers] = measure(checkpoint, tmp_path / "e.dsv4c", goldens)
        print(layers, before, peaks[layers], sum(p.stat().st_size for p in checkpoint.iterdir()))
        shutil.rmtree(checkpoint)
    assert peaks[16] < 1.1 * peaks[4]
