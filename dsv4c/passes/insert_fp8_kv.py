"""The rounding of the KV cache that the model was trained with becomes its storage.

    ring, entries: bfloat16 rows that were rounded through e4m3 -> packed rows (e4m3 and bf16) and exponents
    index keys:    bfloat16 rows that were rounded through e2m1 -> e2m1 (or e4m3) codes and exponents

Nothing changes in value: a rounded row packs and unpacks exactly. Where every channel is rotary none is rounded, and
the cache stays bfloat16.
"""

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from dsv4c.errors import PassError
from dsv4c.graph.annotations import (
    StatePlane,
    get_info,
    get_layer,
    get_placeholder,
    set_layer,
    set_placeholder,
    value_of,
)
from dsv4c.graph.state_ops import INDEX_GROUP, packed_row_bytes, packed_scale_bytes
from dsv4c.passes.pass_manager import PassContext

dsv4 = torch.ops.dsv4

# Which argument of which operator holds a plane, and where its scales go.
_KV_ARGUMENTS = (
    (dsv4.attention.default, 2, 3),
    (dsv4.attention.default, 4, 5),
    (dsv4.compress.default, 9, 10),
    (dsv4.commit_ring.default, 1, 2),
    (dsv4.select_entries.default, 2, 3),
)


def insert_fp8_kv(gm: GraphModule, ctx: PassContext) -> PassResult:
    recipe, info = ctx.recipe, get_info(gm)
    if "fp8" not in (recipe.kv, recipe.index_keys) and recipe.index_keys != "fp4":
        return PassResult(gm, False)
    if info.numerics != "reference":
        raise PassError(
            "FP8 storage of the KV cache would change the exact numerics",
            hint='build with `numerics = "reference"`, or with `kv = "f32"` and `index_keys = "f32"`',
        )
    modified = False
    for plane in list(gm.graph.nodes):
        if plane.op != "placeholder" or not isinstance(get_placeholder(plane), StatePlane):
            continue
        is_keys = any(user.target is dsv4.select_entries.default for user in plane.users)
        is_kv = any(user.target is dsv4.attention.default for user in plane.users)
        if is_keys and recipe.index_keys != "f32":
            _replace(gm, plane, *_key_format(plane, recipe.index_keys == "fp4"))
        elif is_kv and recipe.kv == "fp8" and info.config.rotary_dim < info.config.head_dim:
            head_dim, rotary_dim = info.config.head_dim, info.config.rotary_dim
            widths = packed_row_bytes(head_dim, rotary_dim), packed_scale_bytes(head_dim, rotary_dim)
            _replace(gm, plane, torch.uint8, *widths)
        else:
            continue
        modified = True
    return PassResult(gm, modified)


def _key_format(plane: Node, fp4: bool) -> tuple[torch.dtype, int, int]:
    width = int(value_of(plane).shape[-1])
    scales = -(-width // INDEX_GROUP)
    return (torch.float4_e2m1fn_x2, width // 2, scales) if fp4 else (torch.float8_e4m3fn, width, scales)


def _replace(gm: GraphModule, plane: Node, dtype: torch.dtype, row: int, scales: int) -> None:
    data = _plane_like(gm, plane, "packed", dtype, row)
    exponents = _plane_like(gm, data, "exponents", torch.uint8, scales)
    for user in list(plane.users):
        args = list(user.args)
        for target, at, scales_at in _KV_ARGUMENTS:
            if user.target is target and args[at] is plane:
                args[at], args[scales_at] = data, exponents
        user.args = tuple(args)


def _plane_like(gm: GraphModule, plane: Node, suffix: str, dtype: torch.dtype, width: int) -> Node:
    with gm.graph.inserting_after(plane):
        node = gm.graph.placeholder(f"{plane.name.removesuffix('_packed')}_{suffix}")
    value = value_of(plane)
    with value.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.empty((*value.shape[:-1], width), dtype=dtype)
    set_placeholder(node, get_placeholder(plane))
    set_layer(node, get_layer(plane))
    return node
