"""`dsv4c run --routing-counts`: a trace that a recipe takes, from an engine that was built to count."""

import json
import os
from pathlib import Path

import pytest

from dsv4c.checkpoint.checkpoint import open_checkpoint
from dsv4c.cli.main import main
from dsv4c.recipe import load_recipe
from dsv4c.runtime import Engine
from tests.fixtures import TINY_OFFICIAL

PROMPT = [0, 35, 79, 4000]


@pytest.fixture(scope="module")
def counting_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    recipe = folder / "counting.toml"
    recipe.write_text('target = "cpu"\n[experts]\ncounts = true\n', encoding="utf-8")
    build = ["build", str(TINY_OFFICIAL), "--target", "cpu", "--recipe", str(recipe)]
    assert main([*build, "-o", str(folder / "counting.dsv4c")]) == 0
    return folder / "counting.dsv4c"


def answer(capsys: pytest.CaptureFixture[str], engine: Path, *arguments: str) -> list[int]:
    capsys.readouterr()
    prompt = " ".join(map(str, PROMPT))
    assert main(["run", str(engine), prompt, "--ids", "--max-tokens", "8", "--json", *arguments]) == 0
    token_ids: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return token_ids


def test_the_file_is_a_trace_for_a_recipe(
    counting_engine: Path, tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = ("--routing-counts", str(tmp_path / "trace.json"))
    found = answer(capsys, counting_engine, *option)
    recipe = tmp_path / "traced.toml"
    recipe.write_text('target = "h100"\n[experts]\ntopology = "traced"\ntrace = "trace.json"\n', encoding="utf-8")
    experts = load_recipe(recipe).experts
    assert experts is not None and experts.trace is not None
    config = open_checkpoint(TINY_OFFICIAL).config
    assert sorted(experts.trace.layers) == list(range(config.num_hidden_layers))
    # The last token of the answer is none that a step has run.
    rows = [*PROMPT, *found[:-1]]
    with Engine.open(counting_engine) as engine, engine.session(context=64) as session:
        session.step(rows, [0] * len(rows), list(range(len(rows))), [])
        counts = session.routing_counts()
    for layer, row in zip(counts.layers, counts.counts.tolist(), strict=True):
        assert experts.trace.counts(layer, config.n_routed_experts) == tuple(row)
        assert sum(row) == len(rows) * config.num_experts_per_tok
    # Another run writes over it, with the same; and counting changes no answer.
    assert answer(capsys, counting_engine, *option) == answer(capsys, tiny_engine) == found
    assert load_recipe(recipe).experts == experts


def test_counting_engines_say_so(counting_engine: Path, tiny_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    line = "counts      how often each of 16 experts of 8 layers is chosen: 1,024 bytes a session\n"
    for engine, expected in ((counting_engine, True), (tiny_engine, False)):
        assert main(["inspect", str(engine)]) == 0
        out = capsys.readouterr().out
        assert (line in out) == expected and ("count_routing, embedding" in out) == expected
    assert main(["verify", "--replay", str(counting_engine)]) == 0


@pytest.mark.parametrize("place", ["file", "absent", "folder"])
def test_engine_without_counts(
    tiny_engine: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is generated or written."""
    file = {"file": tmp_path / "a.json", "absent": tmp_path / "no" / "a.json", "folder": tmp_path}[place]
    capsys.readouterr()
    assert main(["run", str(tiny_engine), "word", "--routing-counts", str(file)]) == 10
    out, err = capsys.readouterr()
    assert out == "" and "error: the engine does not count its routing\n\nhint: build it with `counts = true`" in err
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_written(
    counting_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_only = tmp_path / "locked"
    read_only.mkdir(mode=0o500)
    other = tmp_path / "other.dsv4c"
    other.write_bytes(counting_engine.read_bytes())
    places = [
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "a.json", "no is not there or read-only"),
        (counting_engine, "is an engine; the counts would replace it"),
        (other, "is an engine; the counts would replace it"),
    ]
    if os.geteuid() != 0:  # root writes everywhere
        places.append((read_only / "a.json", "locked is not there or read-only"))
    before = counting_engine.read_bytes()
    for place, message in places:
        capsys.readouterr()
        assert main(["run", str(counting_engine), "word", "--routing-counts", str(place)]) == 12
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and message in err and "\n\nhint: name " in err
    assert counting_engine.read_bytes() == before


def test_a_disk_that_is_full(counting_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    capsys.readouterr()
    arguments = ["run", str(counting_engine), "word", "--max-tokens", "2", "--routing-counts", "/dev/full"]
    assert main(arguments) == 12
    assert "error: cannot write /dev/full: No space left on device\n\nhint: " in capsys.readouterr().err
