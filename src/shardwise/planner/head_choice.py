"""Which way to cut the output head for a job: the three layouts side by side, and the cheapest.

Not here: how the head works under each (models/head.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from shardwise.partition.plan import Plan
from shardwise.partition.rules import HeadLayout
from shardwise.planner.collectives import Collective
from shardwise.planner.predict import Ledger, itemsize, predict
from shardwise.planner.predict_head import head_cause
from shardwise.runtime.chips import Chip
from shardwise.steps.workload import Workload


@dataclass(frozen=True)
class LayoutCost:
    """One layout, for one step on one device; with a tied table, the look-up is counted too."""

    layout: HeadLayout
    weight_bytes: int
    """The head's part at use."""
    flops: int
    moved: float
    """Bytes sent."""
    messages: int
    """Collectives."""
    seconds: float
    """Predicted: products or reading the weight, whichever is longer, then sending."""


@dataclass(frozen=True)
class HeadChoice:
    """The layouts compared, the cheapest first."""

    costs: tuple[LayoutCost, ...]
    chip: Chip
    tied: bool

    @property
    def layout(self) -> HeadLayout:
        """The cheapest."""
        return self.costs[0].layout

    def lines(self) -> list[str]:
        """The comparison as text, a line each."""
        ends = "head and look-up (tied)" if self.tied else "head"
        head = f"{ends}, a step on one device; times for {self.chip.name}"
        table = [
            f"  {c.layout:<10} {c.seconds * 1e3:>8.4g} ms  weight {_bytes(c.weight_bytes):>7}"
            f" {c.flops / 1e9:>9.4g} GFLOP {_bytes(c.moved):>7} in {c.messages} messages"
            for c in self.costs
        ]
        return [f"head layout {self.layout}: the cheapest of three ({head})", *table]

    def summary(self) -> str:
        """The comparison in one line."""
        costs = [
            f"{c.layout} {c.seconds * 1e3:.3g} ms ({_bytes(c.moved)} in {c.messages} messages,"
            f" {c.flops / 1e9:.3g} GFLOP)"
            for c in self.costs
        ]
        return f"head layout {self.layout} (auto; a step on one device, predicted): {'; '.join(costs)}"


def choose_head_layout(make: Callable[[HeadLayout], Plan], workload: Workload, chip: Chip) -> HeadChoice:
    """Compare the layouts for a workload.

    Args:
        make: the plan with a given head layout.
    """
    costs = [_cost(make(layout), layout, workload, chip) for layout in get_args(HeadLayout)]
    tied = make("vocab").config.tie_embeddings
    return HeadChoice(tuple(sorted(costs, key=lambda c: (c.seconds, c.moved))), chip, tied)


def _cost(plan: Plan, layout: HeadLayout, workload: Workload, chip: Chip) -> LayoutCost:
    ledger = predict(plan, workload)
    path = plan.head_path
    assert path is not None, "a model without a head over the vocabulary has no layouts"
    causes = {head_cause(path), "lm_head/bias"} | ({path} if plan.config.tie_embeddings else set())
    flops = sum(f.amount for f in ledger.flops if f.cause in causes)
    sent = [c for c in ledger.collectives if c.cause in causes and c.phase != "update"]
    decision = plan[path]
    weight = ledger.local(decision.use_shape, decision.at_use()) * itemsize(workload.compute_dtype)
    reads = weight * _passes(ledger, decision.use_shape[0] // plan.mesh.size(decision.at_use()[0]))
    seconds = max(flops / chip.flops(workload.compute_dtype), reads / chip.memory_bandwidth)
    seconds += _sending(sent, plan, chip)
    moved = sum(c.moved(plan.mesh) for c in sent)
    return LayoutCost(layout, weight, flops, moved, sum(c.count for c in sent), seconds)


def _passes(ledger: Ledger, vocab: int) -> int:
    """How often the weight is read: once a chunk of logits, three times where gradients are formed too."""
    workload = ledger.workload
    if workload.task not in ("train", "score"):
        return 1
    _, chunks = ledger.chunks(vocab)
    return 3 * chunks * workload.grad_accum_steps if ledger.trains else chunks


def _sending(sent: Iterable[Collective], plan: Plan, chip: Chip) -> float:
    """Seconds of all collectives, one after the other.

    A large payload goes round a ring, N−1 hops for each of its two halves; one of a few numbers is exchanged
    whole in ⌈log₂ N⌉ rounds instead (Thakur et al. 2005, doi:10.1177/1094342005051521). The faster counts.
    """
    total = 0.0
    for c in sent:
        devices = plan.mesh.size(c.axes)
        hops = (devices - 1) * (2 if c.op == "all-reduce" else 1)
        ring = c.moved(plan.mesh) / chip.ring + c.count * hops * chip.latency
        if c.op == "all-reduce":
            rounds = math.ceil(math.log2(devices))
            ring = min(ring, c.count * rounds * (chip.latency + c.payload / chip.ring))
        total += ring
    return total


def _bytes(amount: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:.0f} B"
