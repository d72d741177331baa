"""`dsv4c inspect --topology`: the stored table, the drawing in the terminal and as SVG, a step through it, refusals."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4c.cli.main import main
from dsv4c.engine.format import SectionType
from dsv4c.engine.reader import read_engine
from dsv4c.graph.topology import ExpertShapes, TopologyKind, place
from dsv4c.topology_view.step import given_step, sample_step
from dsv4c.topology_view.stored import stored_topology
from dsv4c.topology_view.text import groups_text, topology_text
from tests.fixtures import TINY_OFFICIAL
from tests.topology_view.placed_engine import (
    BEFORE_TABLES,
    EXPERT_BYTES,
    LAYERS,
    SHAPES,
    SM_COUNTS,
    manifest_of,
    trace_counts,
    write_placed_engine,
)

KINDS: tuple[TopologyKind, ...] = ("striped", "pinned", "traced")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> TopologyKind:
    chosen: TopologyKind = request.param
    return chosen


@pytest.fixture(scope="module")
def engine(kind: TopologyKind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_placed_engine(tmp_path_factory.mktemp("placed") / "e.dsv4c", *manifest_of(kind))


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    return write_placed_engine(tmp_path / "pinned.dsv4c", *manifest_of("pinned"))


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def refused(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_stored_is_what_was_placed(engine: Path, kind: TopologyKind, layer: int, sm_count: int) -> None:
    stored = stored_topology(read_engine(engine), layer, sm_count)
    assert stored.topology == place(SHAPES, sm_count, kind, 12, trace_counts(layer))
    assert stored.choice == ("hash" if layer < 2 else "score")
    up, down = stored.unit_bytes
    assert up * SHAPES.up_panels + down * SHAPES.down_panels == EXPERT_BYTES


def test_text(
    engine: Path,
    kind: TopologyKind,
    golden: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    golden(f"inspect/topology-{kind}.txt", run([str(engine), "--topology", "--layer", "5"], capsys))


@pytest.mark.parametrize("width", (1, 40, 60, 80, 100, 118))
def test_any_width(engine: Path, width: int) -> None:
    step = sample_step(stored_topology(read_engine(engine), None, None), 8, 0)
    plain = topology_text(step, width, terminal=False)
    assert "\x1b" not in plain and max(map(len, plain.splitlines())) <= max(width, 40)
    rows = re.findall(r"^(\d+)(?:-(\d+))? .*[░█]", plain, re.MULTILINE)
    assert rows[0][0] == "0" and rows[-1][1] == "131"
    coloured = topology_text(step, width, terminal=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).split() == plain.split() and "\x1b" in coloured


def test_map_shows_groups_and_work(pinned: Path) -> None:
    step = given_step(stored_topology(read_engine(pinned), None, None), "3,14:2")
    text = topology_text(step, 118, terminal=False)
    # 11 groups of 12 SMs: both experts are of group 3.
    (row,) = re.findall(r"^36-47 .*$", text, re.MULTILINE)
    assert row.count("█") == 2 and text.count("█") == 3 and row.count("░") == 4
    assert re.search(r"^48-59 .* 0 +0 +6 +0 +0 B$", text, re.MULTILINE)


def test_svg(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in files:
        run([str(engine), "--topology", "--sm-count", "114", "--svg", str(path)], capsys)
    text = files[0].read_text(encoding="utf-8")
    assert text == files[1].read_text(encoding="utf-8")
    assert "<script" not in text and "href" not in text and "url(" not in text
    step = sample_step(stored_topology(read_engine(engine), None, 114), 8, 0)
    root = ET.fromstring(text)
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    cells = [re.fullmatch(r"SM (\d+), expert (\d+), (first|second) phase: (\d+) units?", title) for title in titles]
    drawn = [0, 0]
    for cell in filter(None, cells):
        drawn[cell[3] == "second"] += int(cell[4])
    assert drawn == [sum(len(work.up) for work in step.works), sum(len(work.down) for work in step.works)]
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x >= 0 and x + float(rect.attrib["width"]) <= width
        assert y >= 0 and y + float(rect.attrib["height"]) <= height


def test_json(engine: Path, kind: TopologyKind, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run([str(engine), "--topology", "--layer", "1", "--tokens", "40", "--json"], capsys))
    assert data["layer"] == 1 and data["topology"] == kind and data["sm_count"] == 132
    assert [sm for group in data["groups"] for sm in group["sms"]] == list(range(132))
    assert sorted(expert for group in data["groups"] for expert in group["experts"]) == list(range(64))
    step = data["step"]
    assert (step["place_pairs"], step["halves"]) == (8, False) and sum(hit["pairs"] for hit in step["hit"]) == 160
    units = [(u["expert"], u["place"], u["panel"]) for sm in step["sms"] for u in sm["first_phase"]]
    assert len(set(units)) == len(units) == step["places"] * SHAPES.up_panels
    assert sum(sm["read_bytes"] for sm in step["sms"]) == step["places"] * EXPERT_BYTES


def test_seed(pinned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [run([str(pinned), "--topology", "--seed", seed], capsys) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2] and "seed 1" in texts[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "3"], "no topology of layer 3\n\nhint: it has those of layers 0 to 2, 5"),
        (["--sm-count", "100"], "is not for a card of 100 SMs\n\nhint: choose one of: 132, 114"),
        (
            ["--tokens", "300"],
            "in a step of 300 tokens the SMs of a group take their units as they become free; steps of up to 64",
        ),
        (["--hit", "3:300"], "a step of 300 tokens"),
        (["--tokens", "1025"], "no step of this engine has 1,025 tokens: its largest bucket has 1,024 rows"),
        (["--hit", ""], "--hit has ''"),
        (["--hit", "3,x"], "--hit has 'x'"),
        (["--hit", "3,-1"], "--hit has '-1'"),
        (["--hit", "3,3:"], "expert 3 is there twice"),
        (["--hit", "64"], "expert 64 is none\n\nhint: experts are 0 to 63"),
        (["--hit", "3,3"], "expert 3 is there twice"),
        (["--hit", "3:0"], "expert 3 has no pairs"),
        (["--svg", "absent/a.svg"], "cannot write absent/a.svg: No such file or directory"),
    ],
)
def test_refusals(arguments: list[str], message: str, pinned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused([str(pinned), "--topology", *arguments], 12, capsys)


def test_options_need_one_another(pinned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--layer, --hit needs --topology" in refused([str(pinned), "--layer", "1", "--hit", "3"], 2, capsys)
    assert "leave --tokens and --seed out" in refused(
        [str(pinned), "--topology", "--hit", "3", "--seed", "1"], 2, capsys
    )


def test_what_has_no_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a checkpoint; experts are placed" in refused([str(TINY_OFFICIAL), "--topology"], 12, capsys)
    manifest, weights = manifest_of("striped")
    for without in ({**manifest, "experts": None}, {name: manifest[name] for name in manifest if name != "experts"}):
        path = write_placed_engine(tmp_path / "e.dsv4c", without, weights)
        err = refused([str(path), "--topology"], 12, capsys)
        assert "lie as in the checkpoint" in err and "widths that 128 divides" in err and 'layout = "packed"' in err


@pytest.mark.parametrize(("experts", "text"), [(16, "1 expert each"), (40, "1 to 2 experts each")])
def test_experts_of_a_group_are_counted(experts: int, text: str, pinned: Path) -> None:
    stored = stored_topology(read_engine(pinned), None, None)
    topology = place(ExpertShapes(experts, 256, 128), 132, "pinned", 4)
    assert groups_text(replace(stored, topology=topology)).endswith(f" SMs on a card of 132, {text}")


@pytest.mark.parametrize("position", (0, 200, 400))
def test_damaged_table(position: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, weights = manifest_of("pinned")
    damaged = bytearray(weights)
    damaged[BEFORE_TABLES + position] ^= 0x55
    path = write_placed_engine(tmp_path / "e.dsv4c", manifest, bytes(damaged))
    assert "the topology of layer 0 is damaged" in refused([str(path), "--topology"], 9, capsys)


def test_weights_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, weights = manifest_of("pinned")
    facts: dict[str, Any] = manifest["experts"]
    facts["layers"][0]["table"]["offset"] = len(weights)
    path = write_placed_engine(tmp_path / "e.dsv4c", manifest, weights)
    assert "are not in WEIGHTS" in refused([str(path), "--topology"], 9, capsys)


def test_weights_read_by_offset(pinned: Path) -> None:
    reader = read_engine(pinned)
    size = reader.sections[SectionType.WEIGHTS].size
    _, weights = manifest_of("pinned")
    assert reader.weight_bytes(0, size) == weights and reader.weight_bytes(BEFORE_TABLES, 4) == weights[4096:4100]
