"""Bytes and FLOPs of a decode step, and the tokens a second that memory bandwidth allows.

From the launches of the decode plan (dsv4c/plan/cost.py), with what the context decides put in: an HCA layer reads
every compressed entry, a CSA layer scores every index key and reads the selected entries, every layer reads its window.
Open groups (a few rows a layer) are not counted. In a step of N sequences weights are read once, and of the routed
experts those that N uniform choices of k hit; for capacity all experts count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4c.graph.annotations import Parameter
from dsv4c.plan.cost import tensor_bytes
from dsv4c.plan.execution_plan import Launch, TensorRef
from dsv4c.planning.expert_budget import RoutedExperts
from dsv4c.planning.layers import ModelPlan
from dsv4c.planning.routed_experts import expert_stacks, routed_experts
from dsv4c.planning.splits import Share, share_of
from dsv4c.step_abi import Space

_GATHERS = ("embedding", "route_hash", "gather_rows")
_ATTENTIONS = ("attention", "attention_unrotated")


@dataclass(frozen=True)
class Scan:
    """State that a row of attention or of the indexer reads: one row for `ratio` positions, `limit` at most.

    Nothing is read up to `unread` rows: an indexer need not score what it selects whole.
    """

    count: int  # layers
    row_bytes: int
    row_flops: int
    ratio: int
    limit: int | None
    unread: int = 0

    def rows(self, context: int) -> int:
        rows = context // self.ratio
        if rows <= self.unread:
            return 0
        return rows if self.limit is None else min(rows, self.limit)


@dataclass(frozen=True)
class DecodeTraffic:
    """A decode step. Bytes of weights read once a step, by how they are split; the rest a sequence."""

    fixed_bytes: dict[Share, int]
    experts: tuple[RoutedExperts, ...]
    row_bytes: int
    row_flops: int
    scans: tuple[Scan, ...]

    def weight_bytes(self, slots: int, tp: int = 1, ep: int = 1) -> float:
        """Weights that one device reads in a step of `slots` sequences over all tp x ep devices."""
        fixed = sum(size / (tp if share is Share.TENSOR else 1) for share, size in self.fixed_bytes.items())
        hit = sum(layer.count * layer.hit_bytes(slots) for layer in self.experts)
        return fixed + hit / (tp * ep)

    def state_bytes(self, context: int) -> int:
        """State that one sequence reads at this many positions."""
        return sum(scan.count * scan.rows(context) * scan.row_bytes for scan in self.scans)

    def flops(self, context: int) -> int:
        """Of one token, on all devices together."""
        return self.row_flops + sum(scan.count * scan.rows(context) * scan.row_flops for scan in self.scans)

    def step_bytes(self, slots: int, context: int, tp: int = 1, ep: int = 1) -> float:
        """All that one device moves in a step; its sequences are a share of 1/ep, whose state every tp rank reads."""
        return self.weight_bytes(slots, tp, ep) + slots / ep * (self.state_bytes(context) + self.row_bytes)

    def tokens_per_second(
        self, slots: int, context: int, bandwidth: float, flops: float | None, tp: int = 1, ep: int = 1
    ) -> float:
        """Of all sequences together, bound by bandwidth (bytes/s a device) or arithmetic; communication is free."""
        seconds = self.step_bytes(slots, context, tp, ep) / bandwidth
        if flops is not None:
            seconds = max(seconds, slots * self.flops(context) / (flops * tp * ep))
        return slots / seconds


def decode_traffic(plan: ModelPlan) -> DecodeTraffic:
    """The terms of a decode step, from the launches of the smallest bucket."""
    bucket = plan.reduced.buckets[0]
    fixed: dict[Share, int] = dict.fromkeys(Share, 0)
    experts: list[RoutedExperts] = []
    scans: list[Scan] = []
    row_bytes = row_flops = 0
    for launch in bucket.launches:
        count = plan.count(launch.layer)
        moved, flops = launch.bytes_moved, launch.flops
        routed = routed_experts(launch, count)
        if routed is not None:
            experts.append(routed)
            moved -= round(routed.hit_bytes(bucket.tokens))
        for ref in _read_once(launch):
            for share, size in _shares(plan, ref):
                fixed[share] += count * size
            moved -= tensor_bytes(ref)
        found = _scans(launch, count)
        for scan in found:
            # What the plan counts at the bucket's capacity is counted by context instead.
            rows = bucket.tokens * (scan.limit or 0)
            moved -= rows * _plan_row_bytes(launch)
            flops -= rows * scan.row_flops
        if launch.kernel == "select_entries":
            rows = bucket.tokens * _integer(launch, 7)
            moved -= rows * _plan_row_bytes(launch)
            flops -= rows * found[0].row_flops
        scans += found
        row_bytes += count * moved
        row_flops += count * flops
    rows = bucket.tokens
    return DecodeTraffic(fixed, tuple(experts), row_bytes // rows, row_flops // rows, tuple(scans))


def _read_once(launch: Launch) -> list[TensorRef]:
    """The weights that a step reads whole: neither experts nor tables that are read by rows."""
    if launch.kernel in _GATHERS:
        return []
    by_need = [*expert_stacks(launch), *(launch.args[3:4] if launch.kernel == "placed_experts" else ())]
    weights = (arg for arg in launch.args if isinstance(arg, TensorRef) and arg.space is Space.WEIGHT)
    return [ref for ref in weights if ref not in by_need]


def _shares(plan: ModelPlan, ref: TensorRef) -> Iterator[tuple[Share, int]]:
    """Bytes of a weight by share: a merged matrix is made of several tensors, which may be split differently."""
    offset, end = ref.offset, ref.offset + tensor_bytes(ref)
    while offset < end:
        extent = plan.extents_by_offset[offset]
        yield share_of(extent.source) if isinstance(extent.what, Parameter) else Share.REPLICATED, extent.size_bytes
        offset += extent.size_bytes


def _integer(launch: Launch, index: int) -> int:
    value = launch.args[index]
    assert isinstance(value, int)
    return value


def _row_bytes(args: Sequence[object]) -> int:
    """Bytes of one row of a plane and of its scales."""
    return sum(ref.sizes[-1] * ref.dtype.size_bytes for ref in args if isinstance(ref, TensorRef))


def _plan_row_bytes(launch: Launch) -> int:
    """As the plan's cost counts a row of state: without scales."""
    return _row_bytes(launch.args[2:3])


def _scans(launch: Launch, count: int) -> list[Scan]:
    """What an attention or indexer launch reads of the state (argument lists: dsv4c/graph/state_ops.py)."""
    args = launch.args
    if launch.kernel == "select_entries":
        q = args[0]
        assert isinstance(q, TensorRef)
        heads = q.sizes[1] * q.sizes[2]
        return [Scan(count, _row_bytes(args[2:4]), 2 * heads, _integer(launch, 8), None, _integer(launch, 7))]
    if launch.kernel not in _ATTENTIONS:
        return []
    q, entries, selected = args[0], args[4], args[6]
    assert isinstance(q, TensorRef)
    flops = 4 * q.sizes[1] * q.sizes[2]
    scans = [Scan(count, _row_bytes(args[2:4]), flops, 1, _integer(launch, 11))]
    if isinstance(entries, TensorRef):
        limit = selected.sizes[1] if isinstance(selected, TensorRef) else None
        scans.append(Scan(count, _row_bytes(args[4:6]), flops, _integer(launch, 12), limit))
    return scans
