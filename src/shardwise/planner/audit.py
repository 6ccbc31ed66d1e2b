"""The compiled step beside its prediction: every collective and the FLOPs of one device.

Not here: predicting (predict.py) and reading compiled programs (partitioned.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax

from shardwise.partition.plan import Plan
from shardwise.planner.collectives import Collective, Op, Total, totals
from shardwise.planner.partitioned import partitioned_module
from shardwise.planner.predict import Ledger, predict
from shardwise.steps.build import build_step
from shardwise.steps.workload import Workload

ALLOWED_SHARE = 0.01
"""Of the bytes moved, what may be left unexplained."""


@dataclass(frozen=True)
class Row:
    """Predicted beside compiled for one kind of collective over some mesh axes."""

    axes: tuple[str, ...]
    op: Op
    predicted: Total
    compiled: Total


@dataclass(frozen=True)
class Audit:
    """What the compiler made of a step, against what was predicted."""

    plan: Plan
    workload: Workload
    predicted: tuple[Collective, ...]
    compiled: tuple[Collective, ...]
    predicted_flops: int
    """Of matrix products on one device in one step."""
    compiled_flops: int
    unexplained: tuple[Collective, ...]
    """Compiled, but not predicted: what is left of each kind, with its source lines."""
    absent: tuple[Collective, ...]
    """Predicted, but not compiled."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """By axes and op, the most bytes first."""
        sums = [totals(group, self.plan.mesh) for group in (self.predicted, self.compiled)]
        keys = dict.fromkeys((*sums[1], *sums[0]))
        none = Total(0, 0, 0.0)
        return tuple(Row(*key, sums[0].get(key, none), sums[1].get(key, none)) for key in keys)

    @property
    def moved(self) -> float:
        """Bytes that one device sends in the compiled step."""
        return sum(c.moved(self.plan.mesh) for c in self.compiled)

    @property
    def unexplained_share(self) -> float:
        """Bytes moved that were not predicted, or predicted and not moved, over all bytes compiled."""
        odd = sum(c.moved(self.plan.mesh) for c in (*self.unexplained, *self.absent))
        return odd / self.moved if self.moved else float(odd > 0)


def audit(plan: Plan, workload: Workload, devices: Sequence[jax.Device] | None = None) -> Audit:
    """Lower and compile the step on (fake) devices and compare.

    Args:
        devices: those of the mesh; default all.

    Raises:
        MeshError: the devices do not fit the plan's mesh.
    """
    module = partitioned_module(build_step(plan, workload, devices))
    return compared(plan, workload, module.collectives(plan.mesh), module.flops().total)


def compared(plan: Plan, workload: Workload, compiled: Iterable[Collective], flops: int) -> Audit:
    """The prediction beside what a compiler made of the step, wherever that was compiled.

    Args:
        compiled: its collectives.
        flops: of its matrix products.
    """
    ledger: Ledger = predict(plan, workload)
    compiled = tuple(compiled)
    unexplained, absent = _left_over(ledger.collectives, compiled)
    return Audit(
        plan,
        workload,
        tuple(ledger.collectives),
        compiled,
        sum(f.compiled for f in ledger.flops),
        flops,
        unexplained,
        absent,
    )


def _left_over(
    predicted: Iterable[Collective], compiled: Iterable[Collective]
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """What each has beyond the other. Two match that are of one op, axes and payload.

    Those of the same loop, and of the same phase in it, are paired first, so that what stays is told with the
    right source line.
    """
    want, got = tuple(predicted), tuple(compiled)
    for key in (_place, _loop, _kind):
        counts = [_counted(group, key) for group in (want, got)]
        want = tuple(_beyond(want, counts[0] - counts[1], key))
        got = tuple(_beyond(got, counts[1] - counts[0], key))
    return got, want


_Key = Callable[[Collective], tuple[object, ...]]


def _kind(c: Collective) -> tuple[object, ...]:
    return c.op, c.axes, c.payload


def _loop(c: Collective) -> tuple[object, ...]:
    return *_kind(c), c.in_loop


def _place(c: Collective) -> tuple[object, ...]:
    return *_loop(c), c.phase


def _counted(group: Iterable[Collective], key: _Key) -> Counter[tuple[object, ...]]:
    counts: Counter[tuple[object, ...]] = Counter()
    for c in group:
        counts[key(c)] += c.count
    return counts


def _beyond(
    group: Iterable[Collective], excess: Counter[tuple[object, ...]], key: _Key
) -> Iterable[Collective]:
    for c in group:
        count = min(c.count, excess[key(c)])
        if count > 0:
            excess[key(c)] -= count
            yield replace(c, count=count)
