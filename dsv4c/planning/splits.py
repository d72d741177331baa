"""How a model may be split over devices, and what each of them then holds.

Tensor parallel (tp): attention heads with their output groups, the shared and routed experts' inner width and the
vocabulary are divided; projections into the latents, compressors, indexer, router, norms and hyper-connections are on
every rank, and so is the state, as there is a single key/value head. Expert parallel (ep): each group of tp ranks has
1/ep of the routed experts and of the sequences, and everything else whole. tp x ep devices in all.
"""

import enum
import re
from dataclasses import dataclass

from dsv4c.checkpoint.config import ModelConfig
from dsv4c.checkpoint.formats import Encoding
from dsv4c.checkpoint.tensor_classes import EXPERT
from dsv4c.graph.annotations import Parameter
from dsv4c.planning.layers import ModelPlan, extent_layer

# Ranks that a table shows: what servers have, and a few that are asked for in vain.
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
EP_SIZES = (1, 2, 3, 4, 6, 8, 16, 32)
_TENSOR_SPLIT = re.compile(r"^(embed|head)\.|\.attn\.(wq_b|wo_a|wo_b)\.|\.attn\.attn_sink$|\.shared_experts\.")


class Share(enum.Enum):
    """Which ranks hold a weight."""

    TENSOR = "divided by tp"
    EXPERTS = "divided by tp and ep"
    REPLICATED = "on every rank"


def share_of(name: str) -> Share:
    """How a tensor is split, by its official name (an expert's may have `{expert}` for its number)."""
    if EXPERT.fullmatch(name.replace("{expert}", "0")):
        return Share.EXPERTS
    return Share.TENSOR if _TENSOR_SPLIT.search(name) else Share.REPLICATED


def share_bytes(plan: ModelPlan) -> dict[Share, int]:
    """Bytes of the engine's weights by share, without the gaps between them."""
    sizes = dict.fromkeys(Share, 0)
    for extent in plan.reduced.weights.extents:
        share = share_of(extent.source) if isinstance(extent.what, Parameter) else Share.REPLICATED
        sizes[share] += plan.count(extent_layer(extent)) * extent.size_bytes
    return sizes


def rank_weight_bytes(sizes: dict[Share, int], tp: int, ep: int) -> int:
    """Weights on one of tp x ep devices."""
    return sizes[Share.REPLICATED] + -(-sizes[Share.TENSOR] // tp) + -(-sizes[Share.EXPERTS] // (tp * ep))


@dataclass(frozen=True)
class SplitCheck:
    """One value of tp or ep, and why it is not possible (empty: it is)."""

    ranks: int
    reasons: tuple[str, ...]

    @property
    def legal(self) -> bool:
        return not self.reasons


def check_tp(plan: ModelPlan, tp: int) -> SplitCheck:
    """Whether every matrix that tp divides comes apart in whole heads, groups and scale blocks."""
    config = plan.config
    reasons = [
        f"{what} ({size:,}) {'are' if what.endswith('s') else 'is'} not divisible by {tp}"
        for what, size in (
            ("attention heads", config.num_attention_heads),
            ("output groups", config.o_groups),
            ("the experts' inner width", config.moe_intermediate_size),
            ("the vocabulary", config.vocab_size),
        )
        if size % tp
    ]
    if not reasons:
        reasons = _block_reasons(plan, tp)
    return SplitCheck(tp, tuple(reasons))


def check_ep(config: ModelConfig, ep: int) -> SplitCheck:
    """Experts are whole, and every group has as many."""
    experts = config.n_routed_experts
    return SplitCheck(ep, (f"experts ({experts}) are not divisible by {ep}",) if experts % ep else ())


def _block_reasons(plan: ModelPlan, tp: int) -> list[str]:
    """Scale blocks that a border between ranks would cut."""
    config, reasons = plan.config, []
    inner = config.moe_intermediate_size // tp
    for what, leaf, rows, columns in (
        ("a rank's query rows", ".attn.wq_b.weight", config.num_attention_heads // tp * config.head_dim, None),
        ("a rank's output rank", ".attn.wo_a.weight", config.o_groups // tp * config.o_lora_rank, None),
        ("a rank's output rank", ".attn.wo_b.weight", None, config.o_groups // tp * config.o_lora_rank),
        ("a rank's part of the shared expert", ".shared_experts.w1.weight", inner, None),
        ("a rank's part of the shared expert", ".shared_experts.w2.weight", None, inner),
        ("a rank's part of an expert", ".experts.{expert}.w1.weight", inner, None),
        ("a rank's part of an expert", ".experts.{expert}.w2.weight", None, inner),
    ):
        parameter = _find(plan, leaf)
        if parameter is None or parameter.block is None:
            continue
        name = _NAMES.get(parameter.stored_as, parameter.stored_as.value)
        for size, block in ((rows, parameter.block[0]), (columns, parameter.block[1])):
            if tp > 1 and size is not None and size % block:
                reason = f"{what} ({size}) does not end on a border of the {name} scale blocks of {block}"
                if reason not in reasons:
                    reasons.append(reason)
    return reasons


_NAMES = {
    Encoding.FP8_BLOCK: "FP8",
    Encoding.FP4_GROUP: "FP4",
    Encoding.INT8_GROUP: "INT8",
    Encoding.INT4_GROUP: "INT4",
}


def _find(plan: ModelPlan, leaf: str) -> Parameter | None:
    for extent in plan.reduced.weights.extents:
        if isinstance(extent.what, Parameter) and any(source.endswith(leaf) for source in extent.what.sources):
            return extent.what
    return None
