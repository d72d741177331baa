"""What a plan is made from: a checkpoint's headers, or a config alone with the encodings of the released models."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4c.checkpoint.checkpoint import WeightInfo, expected_weights, open_checkpoint
from dsv4c.checkpoint.config import ModelConfig, parse_config
from dsv4c.checkpoint.formats import FP4_GROUP, Encoding
from dsv4c.checkpoint.names import scale_name
from dsv4c.checkpoint.releases import FIRST_EXPERT, DraftKind, ModelIdentity, draft_kind, identify
from dsv4c.checkpoint.safetensors import INDEX_NAME, StoredTensor, read_json
from dsv4c.checkpoint.shapes import Shapes, dspark_shapes, mtp_shapes
from dsv4c.checkpoint.tensor_classes import DENSE, EXPERT
from dsv4c.errors import InputError

_MAX_CONFIG_BYTES = 8 << 20
# Of the released DSpark modules, for configs that do not say.
_MARKOV_RANK = 256
_ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
_NO_FILE = Path()  # of tensors that are only assumed


@dataclass(frozen=True)
class PlanSource:
    """A model without its weights' values. `assumed`: encodings as in the releases, not read from headers."""

    path: Path
    config: ModelConfig
    weights: Mapping[str, WeightInfo]
    draft_weights: Mapping[str, WeightInfo]
    draft: DraftKind | None
    assumed: bool
    naming: str | None
    shards: int
    tokenizer_bytes: int
    warnings: list[str]

    @property
    def identity(self) -> ModelIdentity | None:
        """Which released model this is."""
        return identify(self.config, self.draft, self.weights[FIRST_EXPERT].encoding)


def open_source(path: Path) -> PlanSource:
    """A checkpoint folder, a folder with only `config.json`, or such a file.

    Raises InputError for anything else, and the CheckpointError of a checkpoint that is not whole.
    """
    if path.is_dir():
        if (path / INDEX_NAME).exists() or any(path.glob("*.safetensors")):
            return _from_checkpoint(path)
        config_path = path / "config.json"
        if not config_path.is_file():
            raise InputError(
                f"{path} has neither config.json nor safetensors files",
                hint="give a checkpoint folder, or a config.json",
            )
        return _from_config(config_path)
    if not path.exists():
        raise InputError(f"there is no {path}", hint="give a checkpoint folder, or a config.json")
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
        raise InputError(
            f"{path} is no config.json",
            hint="give a checkpoint folder, or a config.json; `dsv4c inspect` tells what an engine holds",
        )
    return _from_config(path)


def _from_checkpoint(folder: Path) -> PlanSource:
    checkpoint = open_checkpoint(folder)
    tokenizer = sum(len(json.dumps(text, ensure_ascii=False)) for text in checkpoint.tokenizer_texts().values())
    return PlanSource(
        path=folder,
        config=checkpoint.config,
        weights=checkpoint.weights,
        draft_weights=checkpoint.draft_weights,
        draft=draft_kind(checkpoint.draft_weights),
        assumed=False,
        naming=checkpoint.naming,
        shards=len(checkpoint.shard_paths),
        tokenizer_bytes=tokenizer,
        warnings=list(checkpoint.warnings),
    )


def _from_config(path: Path) -> PlanSource:
    data = read_json(path)
    config = parse_config(data, str(path))
    draft: Shapes = {}
    if config.draft is not None and config.draft.kind == "mtp":
        draft = mtp_shapes(config, config.draft.stages)
    elif config.draft is not None:
        targets, rank = data.get("dspark_target_layer_ids"), data.get("dspark_markov_rank")
        draft = dspark_shapes(
            config,
            config.draft.stages,
            len(targets) if isinstance(targets, list) and targets else config.draft.stages,
            rank if isinstance(rank, int) and rank > 0 else _MARKOV_RANK,
        )
    experts = "FP4" if config.expert_dtype == "fp4" else "FP8"
    return PlanSource(
        path=path,
        config=config,
        weights=released_weights(expected_weights(config), config),
        draft_weights=released_weights(draft, config),
        draft=config.draft.kind if config.draft else None,
        assumed=True,
        naming=None,
        shards=0,
        tokenizer_bytes=0,
        warnings=[f"no weights there: their encodings are assumed to be as released (FP8 dense, {experts} experts)"],
    )


def released_weights(shapes: Shapes, config: ModelConfig) -> dict[str, WeightInfo]:
    """How the released checkpoints store these tensors (spec 4.1): FP8 with a scale per block, FP4 with one per 32."""
    experts = Encoding.FP4_GROUP if config.expert_dtype == "fp4" else Encoding.FP8_BLOCK
    return {name: _released(name, shape, experts, config.weight_block_size) for name, shape in shapes.items()}


def _released(name: str, shape: tuple[int, ...], experts: Encoding, fp8_block: tuple[int, int]) -> WeightInfo:
    expert = EXPERT.fullmatch(name)
    if expert and experts is Encoding.FP4_GROUP:
        rows, columns = shape
        block = (1, FP4_GROUP)
        stored = _stored(name, "I8", (rows, columns // 2))
        return WeightInfo(name, shape, experts, block, stored, _scales(name, shape, block))
    if expert or DENSE.fullmatch(name):
        scales = _scales(name, shape, fp8_block)
        return WeightInfo(name, shape, Encoding.FP8_BLOCK, fp8_block, _stored(name, "F8_E4M3", shape), scales)
    if name.endswith(".tid2eid"):
        return WeightInfo(name, shape, Encoding.INT64, None, _stored(name, "I64", shape), None)
    if "hc_" in name or name.endswith(("attn_sink", ".ape", ".gate.bias")):
        return WeightInfo(name, shape, Encoding.F32, None, _stored(name, "F32", shape), None)
    return WeightInfo(name, shape, Encoding.BF16, None, _stored(name, "BF16", shape), None)


def _scales(name: str, shape: tuple[int, ...], block: tuple[int, int]) -> StoredTensor:
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return _stored(scale_name(name), "F8_E8M0", grid)


def _stored(name: str, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name, dtype, shape, _NO_FILE, 0, math.prod(shape) * _ITEM_BYTES[dtype])
