"""Recipes: those that come with dsv4c load, and what is wrong in one is named."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dsv4c.errors import RecipeError
from dsv4c.recipe import ExpertsRecipe, Recipe, load_recipe, parse_recipe, recipes_folder
from dsv4c.target import TARGETS

CPU: dict[str, Any] = {"target": "cpu"}


def test_cpu_recipe_writes_out_the_defaults() -> None:
    assert Recipe.for_target("cpu", None) == Recipe(target=TARGETS["cpu"]) == parse_recipe(CPU)


def test_reference_recipe_is_the_override() -> None:
    path = recipes_folder() / "cpu-reference.toml"
    reference = Recipe.for_target("cpu", path)
    assert (reference.numerics, reference.kv, reference.index_keys) == ("reference", "fp8", "fp4")
    assert Recipe.for_target("cpu", None).with_overrides(numerics="reference") == reference
    assert reference.with_overrides(numerics="exact") == Recipe.for_target("cpu", None)


@pytest.mark.parametrize("name", ["cpu-reference", "cpu-reference.toml"])
def test_recipe_of_dsv4c_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Recipe.for_target("cpu", Path(name)).numerics == "reference"
    # A file of that name here goes first.
    (tmp_path / name).write_text('target = "cpu"', encoding="utf-8")
    assert Recipe.for_target("cpu", Path(name)).numerics == "exact"
    with pytest.raises(RecipeError, match="there is no recipe absent/cpu-reference"):
        Recipe.for_target("cpu", Path("absent") / name)


def test_override_with_the_same_numerics_keeps_the_state_encodings() -> None:
    recipe = parse_recipe(CPU | {"numerics": "reference", "kv": "f32", "index_keys": "fp8"})
    assert recipe.with_overrides(numerics="reference") == recipe
    assert recipe.with_overrides() == recipe


@pytest.mark.parametrize("path", sorted(recipes_folder().glob("*.toml")), ids=lambda path: path.name)
def test_every_recipe_loads_and_names_every_key(path: Path) -> None:
    load_recipe(path)
    text = path.read_text(encoding="utf-8")
    assert [key.name for key in fields(Recipe) if key.name not in text] == []


def test_dict_for_the_manifest_reads_back() -> None:
    recipe = Recipe.for_target("cpu", None)
    assert parse_recipe(recipe.to_dict()) == recipe


def test_h100_recipe_writes_out_the_defaults() -> None:
    written = Recipe.for_target("h100", None)
    assert written.experts == ExpertsRecipe() == parse_recipe({"target": "h100"}).experts
    text = (recipes_folder() / "h100.toml").read_text(encoding="utf-8")
    table = text[text.index("[experts]") :]
    assert [key.name for key in fields(ExpertsRecipe) if f"\n{key.name} = " not in table] == []
    assert parse_recipe(written.to_dict()) == written


@pytest.mark.parametrize(
    ("table", "key"), [({"layout": "packed"}, "layout"), ({"counts": True, "group_sms": 4, "trace": ""}, "group_sms")]
)
def test_targets_without_cuda_only_count(table: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=rf"`experts\.{key}` is for targets with CUDA kernels; target 'cpu' has none"):
        parse_recipe(CPU | {"experts": table})
    with pytest.raises(RecipeError, match=r"`experts\.topology` is for targets with CUDA kernels"):
        Recipe(TARGETS["cpu"], experts=ExpertsRecipe(topology="pinned", counts=True))


def test_routing_counts_are_off_unless_asked_for() -> None:
    plain = Recipe.for_target("cpu", None)
    assert "experts" not in plain.to_dict() and not plain.counts_routing
    assert parse_recipe(CPU | {"experts": {"counts": False}}) == parse_recipe(CPU | {"experts": {}}) == plain
    counting = parse_recipe(CPU | {"experts": {"counts": True}})
    assert counting.counts_routing and counting.to_dict()["experts"] == {"counts": True}
    assert parse_recipe(counting.to_dict()) == counting != plain
    assert counting.with_overrides(numerics="reference").counts_routing
    hopper = parse_recipe({"target": "h100", "experts": {"counts": True}})
    assert hopper.counts_routing and not parse_recipe({"target": "h100"}).counts_routing
    assert parse_recipe(hopper.to_dict()) == hopper


def test_a_trace_is_found_from_the_recipe_and_its_path_is_in_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text('{"experts": 2, "layers": {"0": [3, 1]}}', encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text('target = "h100"\n[experts]\ntopology = "traced"\ntrace = "counts.json"', encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.experts is not None and recipe.experts.trace is not None
    assert recipe.experts.trace.counts(0, 2) == (3, 1)
    assert recipe.to_dict()["experts"] == {
        "layout": "packed",
        "topology": "traced",
        "group_sms": 4,
        "trace": recipe.experts.trace.digest,
        "l2_resident": "none",
        "counts": False,
    }


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ("packed", "`experts` is not a table", "[experts]"),
        ({"layot": "packed"}, "unknown key `experts.layot`", "did you mean `experts.layout`?"),
        ({"layout": "tiled"}, "`experts.layout` is 'tiled'", '"packed", "checkpoint"'),
        ({"topology": "ring"}, "`experts.topology` is 'ring'", '"striped", "pinned", "traced"'),
        ({"group_sms": 0}, "`experts.group_sms` is 0", "from 1 to 256"),
        ({"group_sms": True}, "`experts.group_sms` is True", "whole number"),
        (
            {"topology": "pinned", "group_sms": 115},
            "`experts.group_sms` is 115; an engine for 'h100' is for cards of 114 and 132 SMs",
            "from 1 to 114",
        ),
        ({"l2_resident": "all"}, "`experts.l2_resident` is 'all'", '"none", "experts"'),
        ({"trace": 7}, "`experts.trace` is 7", "path"),
        ({"topology": "traced"}, '`experts.topology` is "traced" without a trace', "choose another topology"),
        ({"topology": "traced", "trace": "absent.json"}, "cannot read the routing trace absent.json", "trace"),
        ({"counts": 1}, "`experts.counts` is 1", "`true` or `false`"),
        ({"counts": "yes"}, "`experts.counts` is 'yes'", "`true` or `false`"),
        ({"layout": "checkpoint", "topology": "pinned"}, 'and `topology = "pinned"`', "packed"),
    ],
)
def test_wrong_value_of_the_experts_table_is_named(table: Any, message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse_recipe({"target": "h100", "experts": table})
    assert message in raised.value.message
    assert raised.value.hint is not None and hint in raised.value.hint


def test_a_trace_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text('{"experts": 2, "layers": {"0": [3, 1]}}', encoding="utf-8")
    with pytest.raises(RecipeError, match=r'`experts.topology` is "striped"'):
        parse_recipe({"target": "h100", "experts": {"trace": "counts.json"}}, tmp_path)


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"numeric": "exact"}, "unknown key `numeric`", "did you mean `numerics`?"),
        ({"weights": {"expert": "stored"}}, "unknown key `weights.expert`", "did you mean `weights.experts`?"),
        ({"weights": {"experts": "int3"}}, "`weights.experts` is 'int3'", '"stored", "fp8", "fp4", "int8", "int4"'),
        ({"weights": {"dense": "fp4"}}, "`weights.dense` is 'fp4'", '"stored", "fp8", "int8", "int4"'),
        ({"weights": {"experts_group": 16}}, "`weights.experts_group` is 16", "32, 64, 128"),
        ({"weights": {"dense_group": "64"}}, "`weights.dense_group` is '64'", "32, 64, 128"),
        ({"weights": {"rounding": "up"}}, "`weights.rounding` is 'up'", '"nearest", "search"'),
        ({"weights": "stored"}, "`weights` is not a table", "[weights]"),
        ({"experts": {"count": True}}, "unknown key `experts.count`", "did you mean `experts.counts`?"),
        ({"experts": {"counts": 0}}, "`experts.counts` is 0", "`true` or `false`"),
        ({"experts": True}, "`experts` is not a table", "[experts]"),
        ({"numerics": "exakt"}, "`numerics` is 'exakt'", '"exact", "reference"'),
        ({"numerics": ["exact"]}, "`numerics` is ['exact']", '"exact"'),
        ({"zzz": 1}, "unknown key `zzz`", "known: target, numerics"),
        ({"kv": "fp8"}, "`kv` is 'fp8'; exact numerics keep it in", "leave `kv` out"),
        ({"index_keys": "fp4"}, "`index_keys` is 'fp4'; exact numerics", "leave `index_keys` out"),
        ({"kv": "int8", "numerics": "reference"}, "`kv` is 'int8'", '"f32", "fp8"'),
        ({"decode_buckets": [4, 1]}, "`decode_buckets` is [4, 1]", "smallest first"),
        ({"decode_buckets": [1, 1]}, "`decode_buckets` is [1, 1]", "once"),
        ({"decode_buckets": [0]}, "`decode_buckets` is 0", "whole number from 1"),
        ({"mixed_buckets": []}, "`mixed_buckets` is empty", "prefill"),
        ({"mixed_buckets": 32}, "`mixed_buckets` is 32", "list"),
        ({"mixed_buckets": [32, 99999]}, "`mixed_buckets` is 99999", "to 16384"),
        ({"rollback_rows": True}, "`rollback_rows` is True", "whole number"),
        ({"rollback_rows": -1}, "`rollback_rows` is -1", "from 0"),
        ({"golden_tokens": "24"}, "`golden_tokens` is '24'", "whole number"),
        ({"target": "orin"}, "target 'orin' cannot be built yet", "cpu, h100"),
        ({"target": 7}, "`target` is missing or not a string", 'target = "cpu"'),
    ],
)
def test_wrong_value_is_named(change: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(RecipeError) as raised:
        parse_recipe(CPU | change)
    assert message in raised.value.message
    assert raised.value.hint is not None and hint in raised.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target = cpu", "is not TOML"),
        ('numerics = "exact"', "`target` is missing"),
        ('target = "cpu"\nkvv = "f32"', "unknown key `kvv`"),
    ],
)
def test_error_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert raised.value.message.startswith(str(path)) and message in raised.value.message


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe") as raised:
        load_recipe(tmp_path / "absent.toml")
    assert raised.value.hint is not None and "cpu, cpu-" in raised.value.hint
    with pytest.raises(RecipeError, match="cannot read recipe"):
        load_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'target = "\xff"')
    with pytest.raises(RecipeError, match="cannot read recipe"):
        load_recipe(tmp_path / "latin.toml")
