"""Memory and disk of a build: it must not grow with the checkpoint, and a build that dies leaves nothing to mistake."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4c import compiler
from dsv4c.compiler import build_engine
from dsv4c.engine.reader import is_engine, read_engine
from dsv4c.errors import EngineFormatError
from dsv4c.recipe import Recipe
from tests.fixtures import TINY_OFFICIAL, config_of, random_weights, tiny_config_json, write_checkpoint

ROOT = Path(__file__).parents[1]
# Samples the anonymous memory of its own process during a build; prints the peak.
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from dsv4c import compiler
from dsv4c.compiler import build_engine
from dsv4c.recipe import Recipe

torch.set_num_threads(1)

def anonymous_kilobytes():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])

checkpoint, output, goldens = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
target, recipe_name = sys.argv[4:]
# The kernels of a GPU are not what is measured here.
if target != "cpu":
    compiler.assign_kernels = lambda plan, target: plan
peak, done = [0], threading.Event()

def sample():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_kilobytes())

thread = threading.Thread(target=sample)
recipe = Recipe.for_target(target, Path(recipe_name))
thread.start()
build_engine(checkpoint, recipe, output, goldens=goldens)
done.set()
thread.join()
print(peak[0])
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


def measure(checkpoint: Path, output: Path, goldens: bool, target: str, recipe: str) -> int:
    """Anonymous memory of a build at its peak, kilobytes."""
    command = [sys.executable, "-c", MEASURE, str(checkpoint), str(output), str(goldens), target, recipe]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc: memory cannot be read")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("goldens", "target", "recipe"),
    [(False, "cpu", "cpu"), (True, "cpu", "cpu"), (False, "h100", "h100-fp8-fp4")],
    ids=["plain", "goldens", "packed experts"],
)
def test_memory_does_not_grow_with_the_layers(tmp_path: Path, goldens: bool, target: str, recipe: str) -> None:
    peaks = {}
    for layers in (4, 16):
        checkpoint = checkpoint_of(tmp_path / str(layers), layers)
        peaks[layers] = measure(checkpoint, tmp_path / "e.dsv4c", goldens, target, recipe)
        shutil.rmtree(checkpoint)
    # The layers differ by 120 MB of weights; what grows is the graph, by a megabyte a layer.
    assert peaks[16] < 1.1 * peaks[4], peaks


def test_no_room_is_found_out_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(compiler, "scan_checkpoint", refuse)
    monkeypatch.setattr(compiler, "record_goldens", refuse)
    monkeypatch.setattr(compiler, "weight_blocks", refuse)
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(EngineFormatError, match=r"has 0\.00 GB free; the engine needs") as raised:
        build_engine(TINY_OFFICIAL, Recipe.for_target("cpu", None), tmp_path / "e.dsv4c")
    assert raised.value.hint
    assert list(tmp_path.iterdir()) == []


def start_build(output: Path, limit: str = "") -> subprocess.Popen[str]:
    """`dsv4c build` of the trained model; `limit` are lines of Python to run before it."""
    code = f"import sys\n{limit}\nfrom dsv4c.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "build", str(TINY_OFFICIAL), "--target", "cpu", "--no-goldens"]
    return subprocess.Popen(
        [*command, "-o", str(output)], env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_build_leaves_no_engine_and_the_next_one_works(tmp_path: Path) -> None:
    output = tmp_path / "e.dsv4c"
    partial = tmp_path / ".e.dsv4c.partial"
    # Held in the middle of the weights: the file may not grow past 1 MB, and the signal of that stops the process.
    limit = (
        "import os, resource, signal\n"
        "signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    )
    process = start_build(output, limit)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), process.communicate()
        assert partial.stat().st_size == 1_000_000
    finally:
        process.kill()
        process.wait()
    assert not output.exists() and not is_engine(partial)
    assert [path.name for path in tmp_path.iterdir()] == [partial.name]
    process = start_build(output)
    _, err = process.communicate()
    assert process.returncode == 0, err
    read_engine(output).verify_weights()
    assert list(tmp_path.iterdir()) == [output]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    # Stands for a full disk: writes past the limit fail.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    process = start_build(tmp_path / "e.dsv4c", limit)
    _, err = process.communicate()
    assert process.returncode == EngineFormatError.exit_code
    assert err.startswith("error: cannot write") and "hint: " in err
    assert list(tmp_path.iterdir()) == []
