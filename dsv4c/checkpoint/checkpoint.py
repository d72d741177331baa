"""A DeepSeek-V4 checkpoint folder: checked from config and headers on opening, weights read one at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dsv4c.checkpoint.config import ModelConfig, read_config
from dsv4c.checkpoint.formats import Encoding, dequantize_fp4, dequantize_fp8
from dsv4c.checkpoint.mapped_shards import MappedShards
from dsv4c.checkpoint.names import NamedTensors, resolve_names, scale_name
from dsv4c.checkpoint.safetensors import StoredTensor, read_tensors
from dsv4c.checkpoint.shapes import Shapes, dspark_shapes, head_shapes, layer_shapes, mtp_shapes
from dsv4c.checkpoint.storage import check_storage
from dsv4c.errors import CheckpointError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class WeightInfo:
    """A weight by its official name. `shape` is logical; `block` is the (rows, columns) that share one scale."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    block: tuple[int, int] | None
    stored: StoredTensor
    scales: StoredTensor | None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint. `weights` are the main model's, in the order of `expected_weights`."""

    path: Path
    config: ModelConfig
    weights: Mapping[str, WeightInfo]
    draft_weights: Mapping[str, WeightInfo]
    naming: str
    warnings: list[str]
    shard_paths: tuple[Path, ...]
    _shards: MappedShards = field(default_factory=MappedShards, repr=False)

    def _info(self, name: str) -> WeightInfo:
        info = self.weights.get(name) or self.draft_weights.get(name)
        if info is None:
            raise KeyError(name)
        return info

    def codes(self, name: str) -> Tensor:
        """The stored values, memory-mapped: the stored dtype (FP4: uint8 [O, I/2]).

        Not to be written to. Raises KeyError for an unknown name.
        """
        return self._shards.view(self._info(name).stored)

    def scales(self, name: str) -> Tensor | None:
        """The stored scales, memory-mapped: UE8M0 bytes as uint8, or float32; None for an unquantised weight."""
        stored = self._info(name).scales
        return None if stored is None else self._shards.view(stored)

    def values(self, name: str) -> Tensor:
        """The weight in its logical shape as a new float32 tensor (int64 for `tid2eid`)."""
        info = self._info(name)
        codes, scales = self.codes(name), self.scales(name)
        if info.encoding is Encoding.FP8_BLOCK:
            assert scales is not None and info.block is not None
            return dequantize_fp8(codes, scales, info.block)
        if info.encoding is Encoding.FP4_GROUP:
            assert scales is not None
            return dequantize_fp4(codes, scales)
        return codes.to(torch.int64 if info.encoding is Encoding.INT64 else torch.float32, copy=True)

    def release(self, name: str) -> None:
        """Drops the pages of a weight and its scales after use, so that resident memory does not grow."""
        info = self._info(name)
        self._shards.release(info.stored)
        if info.scales is not None:
            self._shards.release(info.scales)

    def tokenizer_files(self) -> dict[str, Path]:
        """Those of tokenizer.json, tokenizer_config.json and chat_template.jinja that exist, by file name."""
        return {name: self.path / name for name in _TOKENIZER_FILES if (self.path / name).is_file()}

    def tokenizer_texts(self) -> dict[str, str]:
        """Their texts by file name. Raises CheckpointError where one cannot be read or is not UTF-8."""
        texts = {}
        for name, path in self.tokenizer_files().items():
            try:
                texts[name] = path.read_text(encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise CheckpointError(
                    f"{path} is not UTF-8 (byte {error.start})", hint="the file is damaged; download it again"
                ) from error
        return texts


def expected_weights(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Official name -> logical shape of every weight of the main model; scales are not listed."""
    shapes: Shapes = {"embed.weight": (config.vocab_size, config.hidden_size)}
    for index, layer in enumerate(config.layers):
        shapes |= layer_shapes(f"layers.{index}", config, layer)
    shapes |= head_shapes(config)
    shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _weight(name: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor], config: ModelConfig) -> WeightInfo:
    stored, scales = tensors[name], tensors.get(scale_name(name))
    encoding, block = check_storage(name, shape, stored, scales, config.weight_block_size)
    return WeightInfo(name, shape, encoding, block, stored, scales)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(f"`{name}`" for name in listed[:_NAMES_SHOWN]) + more


def _with_scales(names: Iterable[str]) -> set[str]:
    return {name for weight in names for name in (weight, scale_name(weight))}


def _check_complete(folder: Path, named: NamedTensors, shapes: Shapes, layers: int) -> None:
    missing = shapes.keys() - named.main.keys()
    if missing:
        strange = f"; tensors of no known name: {_some(named.unknown)}" if named.unknown else ""
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shapes)} tensors are missing: {_some(missing)} "
            f"({named.naming} naming){strange}",
            hint="download the missing shards, or correct config.json if it is of another model",
        )
    extra = {named.main[name].name for name in named.main.keys() - _with_scales(shapes)} | named.unknown.keys()
    if extra:
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors do not belong to the model of config.json: {_some(extra)}",
            hint=f"config.json says {layers} layers; check that it is of this model",
        )


def _draft_shapes(draft: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[str, Shapes]:
    """(kind, shapes) of the draft module, as its tensors show; the config may announce another or none."""
    indices = (name.split(".")[1] for name in draft)
    stages = 1 + max((int(index) for index in indices if index.isascii() and index.isdigit()), default=0)
    projection = draft.get("mtp.0.main_proj.weight")
    markov = next((tensor for name, tensor in draft.items() if name.endswith(".markov_w1.weight")), None)
    # A stage number beyond any model is a stray name, not a module to enumerate.
    if stages > config.num_hidden_layers:
        return "mtp", {}
    if projection is None and markov is None:
        return "mtp", mtp_shapes(config, stages)
    features = projection.shape[-1] // config.hidden_size if projection and projection.shape else stages
    rank = markov.shape[-1] if markov and markov.shape else 1
    return "dspark", dspark_shapes(config, stages, features, rank)


def _read_draft(draft: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, WeightInfo], list[str]]:
    """The draft module's weights, and warnings: it can be ignored without changing what the model computes."""
    announced = config.draft
    if not draft:
        if announced is None:
            return {}, []
        return {}, [f"config.json announces a draft module ({announced.kind}), the weights have no `mtp.*` tensors"]
    kind, shapes = _draft_shapes(draft, config)
    messages = []
    if announced is None or announced.kind != kind:
        says = announced.kind if announced else "no draft module"
        messages.append(f"config.json announces {says}, the weights have the tensors of {kind}")
    if missing := shapes.keys() - draft.keys():
        messages.append(f"the draft module ({kind}) lacks {len(missing)} tensors: {_some(missing)}")
    if unknown := draft.keys() - _with_scales(shapes):
        messages.append(f"{len(unknown)} tensors are unknown to the draft module ({kind}): {_some(unknown)}")
    weights = {name: _weight(name, shape, draft, config) for name, shape in shapes.items() if name in draft}
    return weights, messages


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a checkpoint folder, checking everything that config and headers tell; reads no weight.

    Raises CheckpointError: a missing or damaged file, missing or extra tensors, a shape, dtype or scale that does not
    fit the config. A problem with the draft module's completeness is a warning.
    """
    config = read_config(folder)
    tensors = read_tensors(folder)
    named = resolve_names(tensors, config)
    shapes = expected_weights(config)
    _check_complete(folder, named, shapes, config.num_hidden_layers)
    weights = {name: _weight(name, shape, named.main, config) for name, shape in shapes.items()}
    draft_weights, messages = _read_draft(named.draft, config)
    experts = {info.encoding for name, info in weights.items() if ".ffn.experts." in name}
    if config.expert_dtype == "fp4" and experts != {Encoding.FP4_GROUP}:
        stored = ", ".join(sorted(encoding.value for encoding in experts))
        messages.append(f"config.json says `expert_dtype` 'fp4', the experts are stored as {stored}")
    shard_paths = tuple(sorted({tensor.shard for tensor in tensors.values()}))
    return Checkpoint(folder, config, weights, draft_weights, named.naming, messages, shard_paths)
