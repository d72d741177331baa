"""`verify --replay` on engines that compute something else than they were built to."""

from pathlib import Path

import pytest

from dsv4c.checkpoint.config import LayerKind
from dsv4c.compiler import build_engine
from dsv4c.engine.format import SectionType
from dsv4c.engine.goldens import Fingerprint, GoldenLaunch, Goldens, difference, fingerprint, first_difference
from dsv4c.engine.reader import read_engine
from dsv4c.engine.writer import EngineParts, write_engine
from dsv4c.errors import InputError
from dsv4c.recipe import Recipe
from dsv4c.verification import verify_engine
from tests.fixtures import config_of, random_weights, tiny_config_json, write_checkpoint

SMALL = tiny_config_json(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_nextn_predict_layers=0)


def small_engine(folder: Path, changed: str | None = None, goldens: bool = True) -> Path:
    """An engine of the small model; `changed` names a weight that is another one than in the others."""
    weights = random_weights(config_of(SMALL), seed=3)
    if changed is not None:
        weights[changed] = -weights[changed]
    folder.mkdir()
    checkpoint = write_checkpoint(folder / "m", SMALL, weights)
    build_engine(checkpoint, Recipe.for_target("cpu", None), folder / "e.dsv4c", goldens=goldens)
    return folder / "e.dsv4c"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_engine(tmp_path_factory.mktemp("engines") / "right")


def test_the_right_engine(engine: Path) -> None:
    report = verify_engine(engine, replay=True)
    assert report.ok and report.first_difference is None
    assert "agree at every launch" in report.lines[-1]


@pytest.mark.parametrize(
    ("weight", "layer", "launch"),
    [
        ("layers.0.attn.wo_b.weight", 0, "l0_o_b"),
        ("layers.1.attn.indexer.weights_proj.weight", 1, "l1_merged"),
        ("layers.2.ffn.experts.5.w2.weight", 2, "l2_moe_ffn"),
        ("norm.weight", None, "head_norm"),
    ],
)
def test_another_weight_is_found_at_its_launch(
    engine: Path, tmp_path: Path, weight: str, layer: int | None, launch: str
) -> None:
    other = read_engine(small_engine(tmp_path / "other", changed=weight, goldens=False))
    right = read_engine(engine)
    weights = other.sections[SectionType.WEIGHTS]
    blob = other.path.read_bytes()[weights.offset : weights.offset + weights.size]
    parts = EngineParts(
        arch="cpu",
        manifest=right.manifest,
        plan=right.section(SectionType.PLAN),
        tokenizer_files={},
        goldens=right.goldens,
        weight_bytes=weights.size,
    )
    write_engine(tmp_path / "mixed.dsv4c", parts, [blob])
    assert verify_engine(tmp_path / "mixed.dsv4c", replay=False).ok
    report = verify_engine(tmp_path / "mixed.dsv4c", replay=True)
    assert not report.ok and report.first_difference is not None
    assert report.first_difference["layer"] == layer
    assert report.first_difference["name"] == launch
    assert launch in report.lines[-1]


def test_a_replay_needs_goldens(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no goldens"):
        verify_engine(small_engine(tmp_path / "bare", goldens=False), replay=True)


def test_damage_is_part_of_the_report(engine: Path, tmp_path: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[read_engine(engine).sections[SectionType.WEIGHTS].offset + 5] ^= 0x10
    (tmp_path / "damaged.dsv4c").write_bytes(data)
    report = verify_engine(tmp_path / "damaged.dsv4c", replay=True)
    assert not report.ok and "weight chunk 0" in report.lines[-1]


def test_goldens_survive_json(engine: Path) -> None:
    recorded = read_engine(engine).goldens
    assert recorded is not None
    goldens = Goldens.from_dict(recorded)
    assert goldens.to_dict()["steps"][0]["position"] == 0
    assert [step.position for step in goldens.steps] == [0, 23]
    assert {launch.kernel for launch in goldens.steps[1].launches} >= {"linear", "attention", "moe_ffn", "compress"}
    kinds = [layer.kind for layer in config_of(SMALL).layers]
    assert kinds == [LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA]


def launch(*values: float, name: str = "a") -> GoldenLaunch:
    return GoldenLaunch("linear", name, 0, (fingerprint(values),))  # type: ignore[arg-type]


def test_difference_is_relative_and_takes_a_quantile() -> None:
    a, b = launch(2.0, 2.0, 2.0, 2.0).outputs[0], launch(2.0, 2.0, 2.0, 3.0).outputs[0]
    assert difference(a, b, 1.0) == pytest.approx(0.5)
    assert difference(a, b, 0.5) == 0.0
    assert difference(a, launch(2.0, 2.0, float("nan"), 2.0).outputs[0], 0.5) == float("inf")
    assert difference(a, Fingerprint(5, a.rms, a.samples), 1.0) == float("inf")


def test_first_difference_names_the_earliest_launch() -> None:
    goldens = Goldens(1e-3, 1.0, ())
    expected = [launch(1.0, 2.0), launch(3.0, 4.0), launch(5.0, 6.0)]
    assert first_difference(goldens, expected, expected) is None
    assert first_difference(goldens, expected, [expected[0], launch(3.0, 4.1), launch(9.0, 9.0)]) == (
        1,
        pytest.approx(0.1 / 3.5355, rel=1e-3),
    )
    assert first_difference(goldens, expected, [expected[0], launch(3.0, 4.0, name="b"), expected[2]]) == (
        1,
        float("inf"),
    )
    assert first_difference(goldens, expected, expected[:2]) == (2, float("inf"))
