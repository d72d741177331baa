"""Builds as a whole: the same engine from every naming, the same bytes everywhere, the checkpoint's bytes kept."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.checkpoint.formats import dequantize_fp4, dequantize_fp8
from dsv4c.compiler import build_engine
from dsv4c.engine.format import SectionType
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.errors import InputError
from dsv4c.passes.pipeline import build_pipeline
from dsv4c.recipe import Recipe
from tests.fixtures import (
    TINY_OFFICIAL,
    Naming,
    Quantization,
    config_of,
    random_weights,
    tiny_config_json,
    write_checkpoint,
)
from tests.model_cases import CONFIGS

SMALL = tiny_config_json(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_nextn_predict_layers=0)
ROOT = Path(__file__).parent.parent


def build(checkpoint: Path, output: Path, numerics: str = "exact", split: bool = False) -> EngineReader:
    recipe = Recipe.for_target("cpu", None).with_overrides(numerics=numerics)
    build_engine(checkpoint, recipe, output, goldens=False, split_weights=split)
    return read_engine(output)


def weights_of(reader: EngineReader) -> bytes:
    entry = reader.sections[SectionType.WEIGHTS]
    return reader.weights_path().read_bytes()[entry.offset : entry.offset + entry.size]


@pytest.mark.parametrize("quantization", ["bf16", "fp8_fp4"])
def test_every_naming_gives_the_same_weights_and_plan(tmp_path: Path, quantization: Quantization) -> None:
    weights = random_weights(config_of(SMALL), seed=3)
    namings: tuple[Naming, ...] = ("official", "save_pretrained", "transformers")
    readers = []
    for naming in namings:
        folder = write_checkpoint(tmp_path / naming, SMALL, weights, naming=naming, quantization=quantization)
        readers.append(build(folder, tmp_path / f"{naming}.dsv4c"))
    first = readers[0]
    for reader in readers[1:]:
        assert reader.section(SectionType.PLAN) == first.section(SectionType.PLAN)
        assert reader.section(SectionType.CHUNKS) == first.section(SectionType.CHUNKS)


def test_fp8_and_fp4_bytes_are_kept(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(TINY_OFFICIAL)
    stored = weights_of(build(TINY_OFFICIAL, tmp_path / "tiny.dsv4c"))
    for name in ("layers.2.attn.wo_b.weight", "layers.3.ffn.experts.7.w2.weight", "layers.0.ffn.gate.tid2eid"):
        codes = checkpoint.codes(name).contiguous().view(torch.uint8).numpy().tobytes()
        assert codes in stored, name
    # The decode rules of the released format, applied to the bytes as they lie in the file.
    fp8, fp4 = checkpoint.weights["layers.2.attn.wo_b.weight"], checkpoint.weights["layers.3.ffn.experts.7.w2.weight"]
    scales = [checkpoint.scales(info.name) for info in (fp8, fp4)]
    assert scales[0] is not None and scales[1] is not None and fp8.block is not None
    torch.testing.assert_close(
        dequantize_fp8(checkpoint.codes(fp8.name), scales[0], fp8.block), checkpoint.values(fp8.name), rtol=0, atol=0
    )
    torch.testing.assert_close(
        dequantize_fp4(checkpoint.codes(fp4.name), scales[1]), checkpoint.values(fp4.name), rtol=0, atol=0
    )


def build_elsewhere(checkpoint: Path, folder: Path, seed: str) -> bytes:
    folder.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from dsv4c.compiler import build_engine; from dsv4c.recipe import Recipe\n"
        "build_engine(Path(sys.argv[1]), Recipe.for_target('cpu', None), Path('engine.dsv4c'), goldens=False)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "TZ": f"UTC{seed}"}
    command = [sys.executable, "-c", code, str(checkpoint)]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return (folder / "engine.dsv4c").read_bytes()


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    weights = random_weights(config_of(SMALL), seed=3)
    here = write_checkpoint(tmp_path / "here", SMALL, weights, quantization="fp8_fp4")
    there = write_checkpoint(tmp_path / "there", SMALL, weights, quantization="fp8_fp4")
    os.utime(there / "config.json", (1, 1))
    assert build_elsewhere(here, tmp_path / "a", "1") == build_elsewhere(there, tmp_path / "b", "2")


def test_split_weights_are_the_same_weights(tmp_path: Path) -> None:
    whole = build(TINY_OFFICIAL, tmp_path / "whole.dsv4c")
    split = build(TINY_OFFICIAL, tmp_path / "split.dsv4c", split=True)
    assert weights_of(whole) == weights_of(split)
    assert split.header.file_size < 2_000_000


def test_manifest_says_what_is_in_the_engine(tmp_path: Path) -> None:
    manifest = build(TINY_OFFICIAL, tmp_path / "tiny.dsv4c", "reference").manifest
    assert manifest["arch"] == "cpu" and manifest["recipe"]["numerics"] == "reference"
    assert [layer["kind"] for layer in manifest["model"]["layers"]] == [
        "window", "csa", "hca", "csa", "hca", "csa", "hca", "window",
    ]  # fmt: skip
    assert manifest["checkpoint"]["encodings"]["fp4_group"] == 8 * 16 * 3
    assert manifest["draft"] == {"kind": None, "tensors": 0, "compiled": False}
    for bucket in manifest["buckets"]:
        assert 0 < bucket["arena_bytes"] < bucket["arena_unshared_bytes"]
        assert bucket["bytes_moved"] > 0 and bucket["flops"] > 0


def test_mtp_tensors_are_declared_and_not_compiled(tmp_path: Path) -> None:
    config = tiny_config_json()
    folder = write_checkpoint(tmp_path / "mtp", config, random_weights(config_of(config), seed=1))
    manifest = build(folder, tmp_path / "mtp.dsv4c").manifest
    assert manifest["draft"]["kind"] == "mtp" and manifest["draft"]["compiled"] is False


def test_the_output_may_not_destroy_what_the_build_reads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", SMALL, random_weights(config_of(SMALL), seed=3))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    link = tmp_path / "link"
    link.symlink_to(folder / "config.json")
    for output in (folder / "config.json", folder / "model-00001-of-00002.safetensors", link):
        with pytest.raises(InputError, match="is a file of the checkpoint"):
            build(folder, output)
    with pytest.raises(InputError, match="is no regular file"):
        build(folder, Path(os.devnull))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    # An engine beside the weights is fine, and so is building it again, also through a link.
    build(folder, folder / "engine.dsv4c")
    link.unlink()
    link.symlink_to(folder / "engine.dsv4c")
    build(folder, link)
    assert link.is_symlink()


def test_dump_dir_has_every_pass_and_the_plan(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", SMALL, random_weights(config_of(SMALL), seed=3))
    dumps = tmp_path / "dumps"
    build_engine(folder, Recipe.for_target("cpu", None), tmp_path / "e", dump_dir=dumps, goldens=False)
    names = sorted(path.name for path in dumps.iterdir())
    assert names[0] == "00-input.txt" and names[1] == "01-canonicalize.txt" and names[-1] == "plan.txt"
    assert len(names) == len(build_pipeline()) + 2


@pytest.mark.parametrize("name", list(CONFIGS))
def test_arena_reuse_is_reported(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    folder = write_checkpoint(tmp_path / name, config, random_weights(config_of(config), seed=5))
    report = build_engine(folder, Recipe.for_target("cpu", None), tmp_path / "e", goldens=False)
    assert report.arena_bytes < 0.3 * report.arena_unshared_bytes
    assert "saved by reuse" in report.to_text()
    assert np.isfinite(report.state_bytes_per_token)
