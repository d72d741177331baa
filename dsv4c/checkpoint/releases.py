"""The released DeepSeek-V4 models: how a config and its draft module tell which one a checkpoint is.

Shapes of the backbone are the same in all releases of a family, so the draft module decides: an MTP block belongs to
the previews, DSpark stages to the later ones. (The repositories named `...-DSpark` hold preview weights with DSpark
stages; headers cannot tell them from the later releases.) `-Base` variants have FP8 instead of FP4 experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import Encoding

DraftKind = Literal["mtp", "dspark"]
# Tells how the routed experts are stored, which is the same in every layer of a release.
FIRST_EXPERT = "layers.0.ffn.experts.0.w1.weight"
DRAFT_NAMES: dict[DraftKind, str] = {"mtp": "MTP", "dspark": "DSpark"}


@dataclass(frozen=True)
class Family:
    """Sizes that no two families share, and the names of the releases by draft module."""

    name: str
    parameters: str  # all / active for a token
    hidden_size: int
    layers: int
    heads: int
    q_lora_rank: int
    o_groups: int
    experts: int
    inner: int
    releases: dict[DraftKind, str]


FAMILIES = (
    Family("V4-Flash", "284B / 13B", 4096, 43, 64, 1024, 8, 256, 2048, {"mtp": "preview", "dspark": "0731"}),
    Family("V4-Pro", "1.6T / 49B", 7168, 61, 128, 1536, 16, 384, 3072, {"mtp": "preview", "dspark": "0813"}),
)


@dataclass(frozen=True)
class ModelIdentity:
    """What a checkpoint is called; `release` is None where there is no draft module to tell."""

    family: str
    parameters: str
    release: str | None
    draft: str | None

    def to_text(self) -> str:
        """`V4-Flash 0731 (284B / 13B parameters), DSpark draft module`."""
        release = f" {self.release}" if self.release else ""
        draft = f"{self.draft} draft module" if self.draft else "no draft module"
        return f"{self.family}{release} ({self.parameters} parameters), {draft}"


def draft_kind(names: Iterable[str]) -> DraftKind | None:
    """The draft module that these tensors (`mtp.*`) belong to; None for no tensors."""
    kind: DraftKind | None = None
    for name in names:
        if ".main_proj." in name or ".markov_head." in name:
            return "dspark"
        kind = "mtp"
    return kind


def identify(config: ModelConfig, draft: DraftKind | None, experts: Encoding | None) -> ModelIdentity | None:
    """The released model that these sizes are of; None for any other model.

    `draft` is the module that the weights hold, `experts` how the routed experts are stored.
    """
    sizes = (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.q_lora_rank,
        config.o_groups,
        config.n_routed_experts,
        config.moe_intermediate_size,
    )
    for family in FAMILIES:
        if sizes == (
            family.hidden_size,
            family.layers,
            family.heads,
            family.q_lora_rank,
            family.o_groups,
            family.experts,
            family.inner,
        ):
            base = "-Base" if experts is Encoding.FP8_BLOCK else ""
            release = family.releases[draft] if draft else None
            return ModelIdentity(family.name + base, family.parameters, release, DRAFT_NAMES[draft] if draft else None)
    return None
