"""Does a model fit, and if not, what would: devices, splits, contexts, slots, slices of the model."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4c.checkpoint.checkpoint import Checkpoint, WeightInfo
from dsv4c.errors import PlanError
from dsv4c.plan.execution_plan import ExecutionPlan
from dsv4c.planning.layers import ModelPlan, extent_layer, plan_model, plane_bytes
from dsv4c.planning.source import PlanSource
from dsv4c.planning.splits import Share, check_ep, check_tp, rank_weight_bytes, share_bytes, share_of
from dsv4c.planning.targets import PlanTarget
from dsv4c.recipe import Recipe

DEFAULT_CONTEXT = 8192
_MAX_DEVICES = 512
# FP4 to INT8 doubles; state and arena are small beside the weights of a large model.
_LARGEST_GROWTH = 4


@dataclass(frozen=True)
class Fit:
    """What one device holds. Bytes; `margin` is what is left of `usable`, negative where it does not fit."""

    memory: int
    reserved: int
    weights: int
    state: int
    arena: int

    @property
    def needed(self) -> int:
        return self.reserved + self.weights + self.state + self.arena

    @property
    def margin(self) -> int:
        return self.memory - self.needed

    @property
    def fits(self) -> bool:
        return self.margin >= 0

    @property
    def used(self) -> float:
        """Share of the memory."""
        return self.needed / self.memory if self.memory else math.inf


@dataclass(frozen=True)
class Slice:
    """What of the model fits one device: the first `layers` main layers whole, or all with `experts` each."""

    layers: int
    experts: int


def default_context(max_context: int) -> int:
    """Positions that plans and builds count with unless told otherwise."""
    return min(DEFAULT_CONTEXT, max_context)


def build_fit(plan: ExecutionPlan, target: PlanTarget) -> Fit:
    """A whole plan on one device, with one sequence of the default context: what `build` checks."""
    blocks = -(-default_context(plan.max_context) // plan.block_tokens)
    return Fit(
        memory=target.memory_bytes,
        reserved=target.reserved_bytes,
        weights=plan.weights.size_bytes,
        state=sum(plane_bytes(plane, 1, blocks) for plane in plan.state.planes),
        arena=max(bucket.arena_bytes for bucket in plan.buckets),
    )


def check_memory(checkpoint: Checkpoint, recipe: Recipe, target: PlanTarget) -> None:
    """Refuse a large model that does not fit within seconds; what passes is checked again when it is lowered."""
    if sum(map(stored_bytes, checkpoint.weights.values())) * _LARGEST_GROWTH < target.memory_bytes:
        return
    plan = plan_model(checkpoint.config, checkpoint.weights, recipe)
    state = plan.state_bytes(1, default_context(checkpoint.config.max_position_embeddings))
    fit = Fit(target.memory_bytes, target.reserved_bytes, plan.weight_bytes, state, plan.arena_bytes)
    require_fit(fit, target, str(checkpoint.path))


def require_fit(fit: Fit, target: PlanTarget, what: str) -> None:
    """Raise PlanError where a model does not fit the memory of a target."""
    if fit.fits:
        return
    needs = f"weights {fit.weights / 1e9:.2f} GB, state of one slot {fit.state / 1e9:.2f} GB"
    needs += f", arena {fit.arena / 1e9:.2f} GB{_reserved_text(fit)}"
    raise PlanError(
        f"{what} does not fit {target.product} ({target.name}): {needs} need {fit.needed / 1e9:.2f} GB, memory is "
        f"{fit.memory / 1e9:.2f} GB",
        hint="`dsv4c plan` says what would fit; `--memory GB` is for an engine of another machine, `--force` builds "
        "all the same",
    )


def _reserved_text(fit: Fit) -> str:
    return f" and {fit.reserved / 1e9:.2f} GB for driver and system" if fit.reserved else ""


class Capacity:
    """The memory of `target` against a plan. Where there are several devices, the draft module is counted too."""

    def __init__(self, plan: ModelPlan, target: PlanTarget, source: PlanSource) -> None:
        self.plan = plan
        self.target = target
        self.draft_bytes = sum(map(stored_bytes, source.draft_weights.values()))
        self._shares = share_bytes(plan)
        self._with_draft = dict(self._shares)
        for info in source.draft_weights.values():
            self._with_draft[share_of(info.name)] += stored_bytes(info)

    def weights(self, tp: int = 1, ep: int = 1) -> int:
        """On one device: the engine's weights, or with others its part of them and of the draft module."""
        return self.plan.weight_bytes if tp * ep == 1 else rank_weight_bytes(self._with_draft, tp, ep)

    def fit(self, slots: int, context: int, tp: int = 1, ep: int = 1) -> Fit:
        """`slots` are those of all devices together; a group of tp ranks keeps the state of its own."""
        return Fit(
            memory=self.target.memory_bytes,
            reserved=self.target.reserved_bytes,
            weights=self.weights(tp, ep),
            state=self.plan.state_bytes(-(-slots // ep), context),
            arena=self.plan.arena_bytes,
        )

    def devices(self, slots: int, context: int) -> int | None:
        """How many devices hold the model if weights could be divided anyhow; None: the state alone is too much."""
        single = self.fit(slots, context)
        if single.fits:
            return 1
        room = single.memory - single.reserved - single.state - single.arena
        return max(2, -(-(self.plan.weight_bytes + self.draft_bytes) // room)) if room > 0 else None

    def smallest_split(self, slots: int, context: int) -> tuple[int, int] | None:
        """The legal (tp, ep) of fewest devices that fits, of these the one with the largest margin."""
        tps = [tp for tp in _up_to(self.plan.config.num_attention_heads) if check_tp(self.plan, tp).legal]
        eps = [ep for ep in _up_to(self.plan.config.n_routed_experts) if check_ep(self.plan.config, ep).legal]
        fitting = [
            (tp * ep, -fit.margin, tp, ep)
            for tp in tps
            for ep in eps
            if tp * ep <= _MAX_DEVICES and (fit := self.fit(slots, context, tp, ep)).fits
        ]
        return min(fitting)[2:] if fitting else None

    def largest_context(self, slots: int, tp: int = 1, ep: int = 1) -> int:
        """The most positions that fit with this many slots, at most the model's; 0: none."""
        return _largest(lambda context: self.fit(slots, context, tp, ep).fits, self.plan.config.max_position_embeddings)

    def largest_slots(self, context: int, tp: int = 1, ep: int = 1) -> int:
        """The most sequences of this context that fit; 0: none."""
        unit = self.plan.state_bytes(1, context) - self.plan.session_bytes
        bound = max(self.target.memory_bytes // max(unit, 1), 1) * ep
        return _largest(lambda slots: self.fit(slots, context, tp, ep).fits, bound)

    def slice(self, slots: int, context: int) -> Slice:
        """What part of a model that does not fit one device would, with the whole model's state and arena."""
        single = self.fit(slots, context)
        room = single.memory - single.reserved - single.state - single.arena
        layers = [0] * len(self.plan.groups)
        outside = experts = 0
        for extent in self.plan.reduced.weights.extents:
            layer = extent_layer(extent)
            if layer is None:
                outside += extent.size_bytes
            else:
                layers[layer] += extent.size_bytes
            if extent.source and share_of(extent.source) is Share.EXPERTS:
                experts += self.plan.count(layer) * extent.size_bytes
        order = {index: number for number, group in enumerate(self.plan.groups) for index in group}
        whole, left = 0, room - outside
        while whole < len(order) and left >= layers[order[whole]]:
            left -= layers[order[whole]]
            whole += 1
        one = experts // self.plan.config.n_routed_experts
        return Slice(
            whole, max(min((room - (self.plan.weight_bytes - experts)) // one, self.plan.config.n_routed_experts), 0)
        )


def _up_to(size: int) -> Iterator[int]:
    return (count for count in range(1, min(size, _MAX_DEVICES) + 1) if size % count == 0)


def _largest(fits: Callable[[int], bool], bound: int) -> int:
    """The largest n in 1..bound with fits(n), which is monotone; 0 where there is none."""
    low, high = 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def stored_bytes(info: WeightInfo) -> int:
    """A weight and its scales as the checkpoint stores them."""
    return info.stored.size_bytes + (info.scales.size_bytes if info.scales else 0)
