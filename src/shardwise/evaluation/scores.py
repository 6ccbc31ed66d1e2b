"""The sum over batches that every measurement here is made of: how likely given targets are.

Not here: which tokens or labels are the targets (perplexity.py, masked.py, labels.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from shardwise.models.parameters import Params
from shardwise.partition.padding import round_up
from shardwise.partition.plan import Plan
from shardwise.partition.rows import local_rows, put_rows
from shardwise.steps.build import Step, build_step
from shardwise.steps.workload import Workload

_LENGTH_STEP = 64
"""Short texts are computed at a multiple of this many tokens, not at the whole window's length."""


@dataclass(frozen=True)
class Scores:
    """What came out for all targets with a weight."""

    nll: float
    """Mean negative log-likelihood of a target, in nats."""
    scored: int
    """Targets."""
    accuracy: float
    """Part of them that were the model's first choice."""


@dataclass(frozen=True)
class Scorer:
    """A compiled `score` step and its sizes."""

    step: Step
    batch: int
    """B."""
    length: int
    """T."""

    @classmethod
    def fitting(
        cls, plan: Plan, mesh: jax.sharding.Mesh, batch: int, length: int, *, rows: int, longest: int,
        compute_dtype: str, param_dtype: str,
    ) -> Scorer:  # fmt: skip
        """A step no larger than its work.

        Args:
            batch: most rows at a time; the mesh may ask for a few more.
            length: most tokens a row.
            rows: how many there are in all.
            longest: tokens of the longest.
        """
        batch = round_up(min(batch, rows), plan.batch_multiple())
        length = round_up(min(length, round_up(longest, _LENGTH_STEP)), plan.length_multiple())
        workload = Workload("score", batch, length, compute_dtype=compute_dtype, param_dtype=param_dtype)
        return cls(build_step(plan, workload, tuple(mesh.devices.flat)), batch, length)

    def __call__(self, params: Params, batches: Iterable[dict[str, np.ndarray]]) -> Scores:
        """Score batches of arrays [B, T] as data/packing makes rows; all processes get all of them.

        The sum is taken in float64 on the host, in the order of the batches.
        """
        plan, mesh = self.step.plan, self.step.mesh
        rows = local_rows(plan, mesh, self.batch)
        total, right, count = 0.0, 0, 0
        for arrays in batches:
            mine = {name: array[rows] for name, array in arrays.items()}
            out = self.step(params, put_rows(plan, mesh, mine, rows, self.batch))
            nll, hit = (np.asarray(out[name].addressable_data(0)) for name in ("nll", "right"))
            scored = arrays["weights"][:, : nll.shape[1]] > 0  # a classifier has one target a row
            total += float(nll[scored].sum(dtype=np.float64))
            right += int(hit[scored].sum())
            count += int(scored.sum())
        assert count, "nothing to score"
        return Scores(total / count, count, right / count)


def stacked(rows: Iterable[dict[str, np.ndarray]], batch: int) -> Iterable[dict[str, np.ndarray]]:
    """Rows of arrays [T] as batches [B, T]; empty rows, of zeros, complete the last."""
    group: list[dict[str, np.ndarray]] = []
    for row in rows:
        group.append(row)
        if len(group) == batch:
            yield _stack(group)
            group = []
    if group:
        empty = {name: np.zeros_like(array) for name, array in group[0].items()}
        yield _stack([*group, *[empty] * (batch - len(group))])


def _stack(group: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in group]) for name in group[0]}
