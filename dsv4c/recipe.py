"""Recipes: the choices of a build, read from a TOML file into frozen, validated fields.

The keys of the file are the fields of `Recipe` (of `WeightsRecipe` in the table `[weights]`, of `ExpertsRecipe` in
`[experts]`), so what a recipe can say is what these classes say. A key that is left out has the default written here.
"""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, cast, get_args

from dsv4c.errors import RecipeError
from dsv4c.routing_trace import RoutingTrace, read_trace
from dsv4c.target import Feature, Target, find_target

Numerics = Literal["exact", "reference"]
ExpertEncoding = Literal["stored", "fp8", "fp4", "int8", "int4"]
DenseEncoding = Literal["stored", "fp8", "int8", "int4"]
Rounding = Literal["nearest", "search"]
KvEncoding = Literal["f32", "fp8"]
IndexKeyEncoding = Literal["f32", "fp4", "fp8"]
ExpertLayout = Literal["packed", "checkpoint"]
ExpertTopology = Literal["striped", "pinned", "traced"]
L2Resident = Literal["none", "experts"]

# Inputs that may share a scale in INT8 and INT4 weights.
GROUPS = (32, 64, 128)
# Rows of a step that a bucket may hold; beyond it the arena outgrows what a step gains.
MAX_BUCKET_TOKENS = 16384
# More SMs than any card has.
MAX_GROUP_SMS = 256
# How each setting of `numerics` keeps the KV cache and the index keys unless the recipe says otherwise.
_STATE_DEFAULTS: Mapping[Numerics, tuple[KvEncoding, IndexKeyEncoding]] = {
    "exact": ("f32", "f32"),
    "reference": ("fp8", "fp4"),
}


@dataclass(frozen=True)
class WeightsRecipe:
    """How weights lie in the engine: `stored` keeps the checkpoint's encoding bit for bit.

    `experts` are the routed experts, `dense` the shared experts and the projections of attention and indexer; nothing
    else is ever quantised. The groups count for int8 and int4, `rounding` for all that the build quantises.
    """

    experts: ExpertEncoding = "stored"
    dense: DenseEncoding = "stored"
    # INT4 gains much from small groups, INT8 next to nothing.
    experts_group: int = 32
    dense_group: int = 128
    # nearest: scales by rule; search: for each block the scale of least squared error among a few.
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        _require_choice("weights.experts", self.experts, get_args(ExpertEncoding))
        _require_choice("weights.dense", self.dense, get_args(DenseEncoding))
        _require_group("weights.experts_group", self.experts_group)
        _require_group("weights.dense_group", self.dense_group)
        _require_choice("weights.rounding", self.rounding, get_args(Rounding))


@dataclass(frozen=True)
class ExpertsRecipe:
    """How the routed experts run on a target with CUDA kernels, and whether the engine counts what is routed to them.

    `trace` is read from the file that the recipe names; the manifest has its digest.
    """

    # packed: one launch over reordered weights; checkpoint: several launches over weights as the checkpoint has them.
    layout: ExpertLayout = "packed"
    # Which SMs compute which expert (dsv4c/graph/topology.py).
    topology: ExpertTopology = "striped"
    group_sms: int = 4
    trace: RoutingTrace | None = None
    l2_resident: L2Resident = "none"
    # Of use on every target: how often each expert of each layer was chosen, for the host to read.
    counts: bool = False

    def __post_init__(self) -> None:
        _require_choice("experts.layout", self.layout, get_args(ExpertLayout))
        _require_choice("experts.topology", self.topology, get_args(ExpertTopology))
        _require_integer("experts.group_sms", self.group_sms, 1, MAX_GROUP_SMS)
        _require_choice("experts.l2_resident", self.l2_resident, get_args(L2Resident))
        if not isinstance(self.counts, bool):
            raise RecipeError(f"`experts.counts` is {self.counts!r}", hint="write `true` or `false`")
        if self.layout == "checkpoint" and self.topology != "striped":
            raise RecipeError(
                f'`experts` has `layout = "checkpoint"` and `topology = "{self.topology}"`',
                hint='that needs `layout = "packed"`',
            )
        if self.topology == "traced" and self.trace is None:
            raise RecipeError(
                '`experts.topology` is "traced" without a trace',
                hint="name the file in `experts.trace`, or choose another topology",
            )
        if self.topology != "traced" and self.trace is not None:
            raise RecipeError(
                f'`experts.trace` is given, `experts.topology` is "{self.topology}"',
                hint='only "traced" reads a trace: leave `experts.trace` empty',
            )


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a build besides the checkpoint; part of the engine's manifest."""

    target: Target
    # exact: fp32 activations and state; reference: the quantisation that the model was trained with.
    numerics: Numerics = "exact"
    weights: WeightsRecipe = field(default_factory=WeightsRecipe)
    # Where the target has no CUDA kernels None, or a table that says nothing but `counts`; elsewhere left out means the
    # defaults.
    experts: ExpertsRecipe | None = None
    kv: KvEncoding = "f32"
    index_keys: IndexKeyEncoding = "f32"
    # Rows of a step, one bucket each: `decode` has at most one row a sequence, `mixed` any.
    decode_buckets: tuple[int, ...] = (1, 4, 16)
    mixed_buckets: tuple[int, ...] = (32, 256)
    # How many positions `truncate` may go back below the highest one written.
    rollback_rows: int = 16
    # Tokens of the golden run that `dsv4c verify --replay` repeats.
    golden_tokens: int = 24

    def __post_init__(self) -> None:
        _require_choice("numerics", self.numerics, get_args(Numerics))
        if Feature.CUDA in self.target.features:
            experts = self.experts or ExpertsRecipe()
            _require_groups_on_every_card(experts, self.target)
            object.__setattr__(self, "experts", experts)
        elif self.experts is not None:
            default = ExpertsRecipe()
            _require_counts_only(
                [key.name for key in fields(default) if getattr(self.experts, key.name) != getattr(default, key.name)],
                self.target,
            )
            object.__setattr__(self, "experts", self.experts if self.experts.counts else None)
        _require_choice("kv", self.kv, get_args(KvEncoding))
        _require_choice("index_keys", self.index_keys, get_args(IndexKeyEncoding))
        if self.numerics == "exact":
            _require_exact_state("kv", self.kv)
            _require_exact_state("index_keys", self.index_keys)
        _require_buckets("decode_buckets", self.decode_buckets)
        _require_buckets("mixed_buckets", self.mixed_buckets)
        if not self.mixed_buckets:
            raise RecipeError("`mixed_buckets` is empty", hint="prefill runs in a mixed bucket; name at least one size")
        _require_integer("rollback_rows", self.rollback_rows, 0, 4096)
        _require_integer("golden_tokens", self.golden_tokens, 1, 4096)

    @property
    def counts_routing(self) -> bool:
        return self.experts is not None and self.experts.counts

    @staticmethod
    def for_target(name: str, path: Path | None) -> "Recipe":
        """The recipe in `path`, or the target's own one; a recipe for another target is refused.

        `path` may also be the name of a recipe that comes with dsv4c, with or without `.toml`; a file here goes first.
        """
        target = find_target(name)
        source = recipes_folder() / f"{name}.toml" if path is None else _find(path)
        recipe = load_recipe(source)
        if recipe.target != target:
            raise RecipeError(
                f"{source} is a recipe for target {recipe.target.name!r}, the build is for {name!r}",
                hint=f"use `--target {recipe.target.name}`, or another recipe",
            )
        return recipe

    def require_model(self, layers: int, experts: int) -> None:
        """Raises RecipeError where the recipe names a trace of another model than one of so many layers and experts."""
        if self.experts is not None and self.experts.trace is not None:
            self.experts.trace.require_model(layers, experts)

    def with_overrides(self, *, numerics: Numerics | None = None) -> "Recipe":
        """This recipe with options of the command line; other numerics bring their own state encodings."""
        if numerics is None or numerics == self.numerics:
            return self
        _require_choice("numerics", numerics, get_args(Numerics))
        kv, index_keys = _STATE_DEFAULTS[numerics]
        return replace(self, numerics=numerics, kv=kv, index_keys=index_keys)

    def to_dict(self) -> dict[str, object]:
        """The recipe as the manifest has it: the keys of the TOML file, every one written out."""
        values = {key.name: _plain(getattr(self, key.name)) for key in fields(self)}
        if self.experts is None:
            del values["experts"]
        elif Feature.CUDA not in self.target.features:
            values["experts"] = {"counts": self.experts.counts}
        return {**values, "target": self.target.name}


def recipes_folder() -> Path:
    """The recipes that come with dsv4c: inside the package where installed, beside it in a source tree."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def _find(path: Path) -> Path:
    """`path`, or the recipe of dsv4c that it names."""
    if path.exists() or path.parent != Path():
        return path
    bundled = recipes_folder() / (path.name if path.suffix == ".toml" else f"{path.name}.toml")
    return bundled if bundled.is_file() else path


def load_recipe(path: Path) -> Recipe:
    """Reads and checks a TOML recipe."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(
            f"there is no recipe {path}", hint=f"give a file, or the name of one that comes with dsv4c: {_available()}"
        ) from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"cannot read recipe {path}: {error.reason} at byte {error.start}", hint="TOML is written in UTF-8"
        ) from None
    except OSError as error:
        raise RecipeError(
            f"cannot read recipe {path}: {error.strerror}", hint="check the path and its permissions"
        ) from None
    try:
        return parse_recipe(tomllib.loads(text), path.parent)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(
            f"{path} is not TOML: {error}",
            hint='keys are written `name = "text"`, `name = 16` or `name = [1, 4]`; the recipes of dsv4c are examples',
        ) from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error.message}", hint=error.hint) from None


def parse_recipe(table: Mapping[str, object], folder: Path = Path()) -> Recipe:
    """A parsed TOML file -> `Recipe`. Files that it names are found from `folder`."""
    known = [key.name for key in fields(Recipe)]
    _refuse_unknown(table, known, "")
    values = dict(table)
    name = values.pop("target", None)
    if not isinstance(name, str):
        raise RecipeError("`target` is missing or not a string", hint='name it: `target = "cpu"`')
    target = find_target(name)
    numerics = values.setdefault("numerics", "exact")
    _require_choice("numerics", numerics, get_args(Numerics))
    kv, index_keys = _STATE_DEFAULTS[cast("Numerics", numerics)]
    values = {"kv": kv, "index_keys": index_keys, **values}
    for key in ("decode_buckets", "mixed_buckets"):
        sizes = values.get(key)
        if isinstance(sizes, list):
            values[key] = tuple(sizes)
    if "weights" in values:
        values["weights"] = _parse_weights(values["weights"])
    if "experts" in values:
        values["experts"] = _parse_experts(values["experts"], folder, target)
    # The types are those of the file until `__post_init__` has checked every field.
    return Recipe(target=target, **values)  # type: ignore[arg-type]


def _parse_weights(table: object) -> WeightsRecipe:
    if not isinstance(table, dict):
        raise RecipeError("`weights` is not a table", hint='write `[weights]`, then `experts = "stored"`')
    _refuse_unknown(table, [key.name for key in fields(WeightsRecipe)], "weights.")
    return WeightsRecipe(**table)


def _parse_experts(table: object, folder: Path, target: Target) -> ExpertsRecipe:
    if not isinstance(table, dict):
        raise RecipeError("`experts` is not a table", hint='write `[experts]`, then `layout = "packed"`')
    _refuse_unknown(table, [key.name for key in fields(ExpertsRecipe)], "experts.")
    if Feature.CUDA not in target.features:
        _require_counts_only(table, target)
    name = table.get("trace", "")
    if not isinstance(name, str):
        raise RecipeError(f"`experts.trace` is {name!r}", hint="give the path of a file, or an empty text for none")
    return ExpertsRecipe(**{**table, "trace": read_trace(folder / name) if name else None})


def _refuse_unknown(table: Mapping[str, object], known: Collection[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean `{prefix}{nearest[0]}`? " if nearest else ""
            raise RecipeError(
                f"unknown key `{prefix}{key}`",
                hint=f"{meant}known: {', '.join(prefix + name for name in known)}",
            )


def _require_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        names = ", ".join(f'"{choice}"' for choice in choices)
        raise RecipeError(f"`{key}` is {value!r}", hint=f"choose one of: {names}")


def _require_exact_state(key: str, value: str) -> None:
    if value != "f32":
        raise RecipeError(
            f'`{key}` is {value!r}; exact numerics keep it in "f32"',
            hint=f'leave `{key}` out, or use `numerics = "reference"`',
        )


def _require_group(key: str, value: object) -> None:
    if value not in GROUPS or isinstance(value, float):
        raise RecipeError(f"`{key}` is {value!r}", hint=f"choose one of: {', '.join(map(str, GROUPS))}")


def _require_integer(key: str, value: object, low: int, high: int) -> None:
    # bool is an int in Python, and TOML has `true`.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RecipeError(f"`{key}` is {value!r}", hint=f"give a whole number from {low} to {high}")


def _require_counts_only(keys: Iterable[str], target: Target) -> None:
    """The keys of `[experts]` on a target without CUDA kernels."""
    other = next((key for key in keys if key != "counts"), None)
    if other is not None:
        raise RecipeError(
            f"`experts.{other}` is for targets with CUDA kernels; target {target.name!r} has none",
            hint="leave it out, here `[experts]` has `counts` alone; how weights are stored is said in `[weights]`",
        )


def _require_groups_on_every_card(experts: ExpertsRecipe, target: Target) -> None:
    """An engine is for every card of its target: groups must fit the one with the fewest SMs."""
    counts = sorted(target.sm_counts)
    if experts.topology != "striped" and experts.group_sms > counts[0]:
        cards = " and ".join(str(count) for count in counts)
        raise RecipeError(
            f"`experts.group_sms` is {experts.group_sms}; an engine for {target.name!r} is for cards of {cards} SMs",
            hint=f"give a whole number from 1 to {counts[0]}",
        )


def _require_buckets(key: str, sizes: object) -> None:
    if not isinstance(sizes, tuple):
        raise RecipeError(f"`{key}` is {sizes!r}", hint="give a list of sizes, such as [1, 4, 16]")
    for size in sizes:
        _require_integer(key, size, 1, MAX_BUCKET_TOKENS)
    if list(sizes) != sorted(set(sizes)):
        raise RecipeError(f"`{key}` is {list(sizes)}", hint="list every size once, smallest first")


def _plain(value: object) -> object:
    if isinstance(value, WeightsRecipe):
        return asdict(value)
    if isinstance(value, ExpertsRecipe):
        chosen = {key.name: getattr(value, key.name) for key in fields(value)}
        # The digest of a trace stands for its file, whose path is this machine's.
        return {**chosen, "trace": value.trace.digest if value.trace else ""}
    return list(value) if isinstance(value, tuple) else value


def _available() -> str:
    return ", ".join(sorted(path.stem for path in recipes_folder().glob("*.toml"))) or "none found"
