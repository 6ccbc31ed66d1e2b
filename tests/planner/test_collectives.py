"""Bytes moved and sums of collectives. Not here: where the records come from."""

from __future__ import annotations

import pytest

from shardwise.partition.mesh import MeshSpec
from shardwise.planner.collectives import Collective, Op, moved_by_axes, totals

MESH = MeshSpec(2, 4, 2)


def one(op: Op, axes: tuple[str, ...], payload: int = 800, count: int = 1) -> Collective:
    return Collective(op, axes, "float32", payload, count, count > 1, "forward", "test")


@pytest.mark.parametrize(
    ("op", "axes", "moved"),
    [
        ("all-gather", ("fsdp",), 600),
        ("reduce-scatter", ("fsdp",), 600),
        ("all-to-all", ("fsdp",), 600),
        ("all-reduce", ("fsdp",), 1200),
        ("collective-permute", ("fsdp",), 800),
        ("all-reduce", ("dp", "fsdp"), 1400),
        ("all-gather", (), 800),
    ],
)
def test_moved_bytes_are_those_of_ring_algorithms(op: Op, axes: tuple[str, ...], moved: float) -> None:
    assert one(op, axes).moved(MESH) == moved
    assert one(op, axes, count=3).moved(MESH) == 3 * moved


def test_totals_group_by_axes_and_op_with_the_most_moved_first() -> None:
    given = [one("all-gather", ("tp",), 10), one("all-reduce", ("fsdp",), 8, 2), one("all-reduce", ("fsdp",))]
    sums = totals(given, MESH)
    assert list(sums) == [(("fsdp",), "all-reduce"), (("tp",), "all-gather")]
    first = sums[("fsdp",), "all-reduce"]
    assert (first.count, first.payload, first.moved) == (3, 816, 816 * 1.5)
    assert moved_by_axes([*given, one("all-gather", ("fsdp",), 8)], MESH) == {
        ("fsdp",): 816 * 1.5 + 6,
        ("tp",): 5,
    }
