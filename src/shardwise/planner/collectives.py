"""The words in which communication is predicted and audited: one record per collective of a step.

Imports no JAX. Not here: where the records come from (partitioned.py reads them from a compiled program).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from shardwise.partition.mesh import MeshSpec

Op = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]
Phase = Literal["forward", "backward", "update"]


@dataclass(frozen=True)
class Collective:
    """One collective of a step: what moves, over which mesh axes, how often and why."""

    op: Op
    axes: tuple[str, ...]
    """Mesh axes over which its groups run, in mesh order; () if none fits (`note` then lists the groups)."""
    dtype: str
    """JAX's name: `float32`, `bfloat16`, `int32`, …"""
    payload: int
    """Bytes of the whole buffer on one device in one run: the result of an all-gather, the operand of an
    all-reduce, reduce-scatter, all-to-all or permute."""
    count: int
    """Runs in one step: the product of the trip counts of the loops around it."""
    in_loop: bool
    """Whether a loop (over layers, micro-batches or chunks of the loss) is around it."""
    phase: Phase
    """Part of the step that runs it; a step that takes no gradient is all `forward`."""
    cause: str
    """In an audit the operation and the lines of source behind it; in a prediction the parameter path or the
    activation's name."""
    note: str = ""
    """What a reader should know besides, such as a form that the compiler chose."""

    def moved(self, mesh: MeshSpec) -> float:
        """Bytes that one device sends in all runs, with ring algorithms over N devices.

        All-gather, reduce-scatter and all-to-all send (N−1)/N of the payload, an all-reduce twice that, a
        permute all of it. Where no mesh axis fits, N is taken as large: the bound for any group.
        """
        n = mesh.size(self.axes)
        share = (n - 1) / n if self.axes else 1.0
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.op, share)
        return factor * self.payload * self.count


@dataclass(frozen=True)
class Total:
    """Sums over collectives of one kind."""

    count: int
    payload: int
    """Bytes over all runs."""
    moved: float
    """Bytes that one device sends."""


def totals(collectives: Iterable[Collective], mesh: MeshSpec) -> dict[tuple[tuple[str, ...], Op], Total]:
    """Sums by (axes, op), the most bytes moved first."""
    sums: dict[tuple[tuple[str, ...], Op], Total] = {}
    for c in collectives:
        old = sums.get((c.axes, c.op), Total(0, 0, 0.0))
        sums[c.axes, c.op] = Total(
            old.count + c.count, old.payload + c.payload * c.count, old.moved + c.moved(mesh)
        )
    return dict(sorted(sums.items(), key=lambda item: -item[1].moved))


def moved_by_axes(collectives: Iterable[Collective], mesh: MeshSpec) -> dict[tuple[str, ...], float]:
    """Bytes that one device sends, by mesh axes."""
    sums: dict[tuple[str, ...], float] = {}
    for (axes, _), total in totals(collectives, mesh).items():
        sums[axes] = sums.get(axes, 0.0) + total.moved
    return sums
