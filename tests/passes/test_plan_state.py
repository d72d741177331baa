"""What a slot and a block cost."""

import pytest

from dsv4c.graph.annotations import PlannedPlane, get_state_layout
from dsv4c.passes.plan_state import plan_state
from dsv4c.step_abi import StateKind
from tests.graph.small_models import context, final_graph, walk


def layout(numerics: str) -> tuple[list[tuple[object, ...]], int, int]:
    planned = get_state_layout(final_graph("one_layer", numerics))  # type: ignore[arg-type]
    assert all(plane.layer == 0 for plane in planned.planes)

    def row(plane: PlannedPlane) -> tuple[object, ...]:
        return plane.name.removeprefix("s_l0_"), plane.kind.name, plane.rows, plane.ratio, plane.row_bytes

    return [row(plane) for plane in planned.planes], planned.slot_bytes, planned.block_bytes


def test_exact() -> None:
    # Head size 40, index heads of 16; window 20 and rollback 8; two groups of 4 and rollback 8; blocks of 256.
    planes, slot_bytes, block_bytes = layout("exact")
    assert planes == [
        ("ring", "SLOT", 28, 1, 40 * 4),
        ("compress_groups", "SLOT", 16, 1, 2 * 80 * 4),
        ("entries", "BLOCK", 64, 4, 40 * 4),
        ("index_groups", "SLOT", 16, 1, 2 * 32 * 4),
        ("index_keys", "BLOCK", 64, 4, 16 * 4),
    ]
    assert slot_bytes == 28 * 160 + 16 * 640 + 16 * 256
    assert block_bytes == 64 * 160 + 64 * 64


def test_reference() -> None:
    planes, slot_bytes, block_bytes = layout("reference")
    assert planes == [
        ("ring_packed", "SLOT", 28, 1, 48),
        ("ring_exponents", "SLOT", 28, 1, 8),
        ("compress_groups", "SLOT", 16, 1, 640),
        ("entries_packed", "BLOCK", 64, 4, 48),
        ("entries_exponents", "BLOCK", 64, 4, 8),
        ("index_groups", "SLOT", 16, 1, 256),
        ("index_keys_packed", "BLOCK", 64, 4, 8),
        ("index_keys_exponents", "BLOCK", 64, 4, 1),
    ]
    assert slot_bytes == 28 * 56 + 16 * 640 + 16 * 256
    assert block_bytes == 64 * (48 + 8 + 8 + 1)


@pytest.mark.parametrize("numerics", ["exact", "reference"])
def test_the_graph_stays_as_it_is(numerics: str) -> None:
    stage = walk("narrow", numerics, "fp8_fp4").stages["plan_state"]  # type: ignore[arg-type]
    assert not stage.modified and stage.before == stage.after
    gm = final_graph("one_layer", numerics)  # type: ignore[arg-type]
    planned = get_state_layout(gm)
    assert not plan_state(gm, context()).modified
    assert get_state_layout(gm) == planned
    assert {plane.kind for plane in planned.planes} == {StateKind.SLOT, StateKind.BLOCK}
