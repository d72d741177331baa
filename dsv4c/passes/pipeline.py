"""The passes of a build, in order: the one list."""

from dsv4c.passes.canonicalize import canonicalize
from dsv4c.passes.count_routing import count_routing
from dsv4c.passes.fuse_attention_rope import fuse_attention_rope
from dsv4c.passes.fuse_expert_ffn import fuse_expert_ffn
from dsv4c.passes.fuse_mhc import fuse_mhc
from dsv4c.passes.fuse_mhc_norm import fuse_mhc_norm
from dsv4c.passes.fuse_router import fuse_router
from dsv4c.passes.fuse_row_chain import fuse_row_chain
from dsv4c.passes.fuse_swiglu import fuse_swiglu
from dsv4c.passes.insert_fp8_kv import insert_fp8_kv
from dsv4c.passes.lower_aten import lower_aten
from dsv4c.passes.merge_projections import merge_projections
from dsv4c.passes.pass_manager import Pass
from dsv4c.passes.place_experts import place_experts
from dsv4c.passes.plan_state import plan_state
from dsv4c.passes.quantize_weights import quantize_weights


def build_pipeline() -> list[Pass]:
    """Every pass sees what the ones before it made; the comments say where the order matters."""
    return [
        canonicalize,
        # The mHC mixers are three quarters of the nodes; the later passes are faster without them.
        fuse_mhc,
        fuse_expert_ffn,
        fuse_router,
        # After the expert FFN, whose pattern holds the same gate.
        fuse_swiglu,
        # After all fusions, whose patterns are aten.
        lower_aten,
        # Weights get scales as operands, which only dsv4 operators take.
        quantize_weights,
        # After the storage is known: only equal storage merges, and inputs are rounded once.
        merge_projections,
        insert_fp8_kv,
        # Before the routers go into `placed_experts`, where nothing sees their choices.
        count_routing,
        # After the storage is known: only some is packed. The router is an operator by then.
        place_experts,
        # Fewer launches where kernels are launched one by one (CUDA targets). Behind all passes that know the operators
        # of their own: `quantize_weights` puts roundings in, `insert_fp8_kv` looks for the attention.
        fuse_attention_rope,
        # The mixer goes first: a norm that has one user could join either.
        fuse_mhc_norm,
        fuse_row_chain,
        # Last: it measures the state planes as they are now.
        plan_state,
    ]
