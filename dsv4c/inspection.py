"""`dsv4c inspect` of a checkpoint: what the folder holds, from its config and headers alone."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from dsv4c.checkpoint.checkpoint import Checkpoint, WeightInfo
from dsv4c.checkpoint.config import LayerConfig, LayerKind
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.releases import DRAFT_NAMES, FIRST_EXPERT, draft_kind, identify
from dsv4c.wording import counted


@dataclass(frozen=True)
class EncodingTotal:
    """Weights of one encoding; `size_bytes` counts their scales too."""

    tensors: int
    size_bytes: int


@dataclass(frozen=True)
class DraftSummary:
    """The draft module, which is read and checked but in no engine yet."""

    kind: str
    total: EncodingTotal
    compiled: bool = False


@dataclass(frozen=True)
class CheckpointSummary:
    """`layers` counts the main layers by kind, as `csa/4` where a compressed entry stands for 4 tokens.

    `name` is what a released model is called, None for others. `tensors`, `parameters` and `encodings` are of the main
    model. The ids of the hash tables are no parameters.
    """

    name: str | None
    model_type: str
    naming: str
    layers: dict[str, int]
    hash_routed_layers: int
    experts: int
    experts_per_token: int
    shared_experts: int
    hidden_size: int
    vocab_size: int
    max_context: int
    shards: int
    tensors: int
    parameters: int
    encodings: dict[str, EncodingTotal]
    draft: DraftSummary | None
    tokenizer_files: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_text(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.layers.items())
        layers = sum(self.layers.values())
        total_bytes = sum(total.size_bytes for total in self.encodings.values())
        lines = [
            *([f"name         {self.name}"] if self.name else []),
            f"model        {self.model_type}, {self.naming} naming, {counted(self.shards, 'shard')}",
            f"layers       {layers}: {kinds}",
            f"experts      {self.experts}, {self.experts_per_token} a token, {self.shared_experts} shared",
            f"routing      {counted(self.hash_routed_layers, 'layer')} by hash table, "
            f"{layers - self.hash_routed_layers} by score",
            f"sizes        hidden {self.hidden_size}, vocabulary {self.vocab_size}, context {self.max_context}",
            f"weights      {counted(self.tensors, 'tensor')}, {counted(self.parameters, 'parameter')}, "
            f"{total_bytes:,} bytes with scales",
            *(f"  {name:<10} {_total_text(total)}" for name, total in self.encodings.items()),
            f"draft        {self._draft_text()}",
            f"tokenizer    {', '.join(self.tokenizer_files) or 'none'}",
        ]
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])

    def _draft_text(self) -> str:
        if self.draft is None:
            return "none"
        return f"{self.draft.kind}, {_total_text(self.draft.total)}: read, not compiled yet"


def summarize_checkpoint(checkpoint: Checkpoint) -> CheckpointSummary:
    """Counts an opened checkpoint; reads no weight."""
    config = checkpoint.config
    by_encoding: dict[str, list[WeightInfo]] = {}
    for weight in checkpoint.weights.values():
        by_encoding.setdefault(weight.encoding.value, []).append(weight)
    draft = draft_kind(checkpoint.draft_weights)
    identity = identify(config, draft, checkpoint.weights[FIRST_EXPERT].encoding)
    return CheckpointSummary(
        name=identity.to_text() if identity else None,
        model_type=config.model_type,
        naming=checkpoint.naming,
        layers=dict(Counter(map(_kind_text, config.layers))),
        hash_routed_layers=sum(layer.hash_routed for layer in config.layers),
        experts=config.n_routed_experts,
        experts_per_token=config.num_experts_per_tok,
        shared_experts=config.n_shared_experts,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        shards=len(checkpoint.shard_paths),
        tensors=len(checkpoint.weights),
        parameters=sum(
            math.prod(weight.shape) for weight in checkpoint.weights.values() if weight.encoding is not Encoding.INT64
        ),
        encodings={name: _total(by_encoding[name]) for name in sorted(by_encoding)},
        draft=DraftSummary(DRAFT_NAMES[draft], _total(checkpoint.draft_weights.values())) if draft else None,
        tokenizer_files=sorted(checkpoint.tokenizer_files()),
        warnings=list(checkpoint.warnings),
    )


def _kind_text(layer: LayerConfig) -> str:
    return layer.kind.value if layer.kind is LayerKind.WINDOW else f"{layer.kind.value}/{layer.ratio}"


def _total(weights: Iterable[WeightInfo]) -> EncodingTotal:
    sizes = [weight.stored.size_bytes + (weight.scales.size_bytes if weight.scales else 0) for weight in weights]
    return EncodingTotal(len(sizes), sum(sizes))


def _total_text(total: EncodingTotal) -> str:
    return f"{counted(total.tensors, 'tensor')}, {total.size_bytes:,} bytes"
