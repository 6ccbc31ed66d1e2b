"""Accuracy of a classifier on labelled texts.

Not here: reading them (data/labelled.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from shardwise.data.labelled import Encoded, LabelledDataset
from shardwise.evaluation.scores import Scorer, stacked
from shardwise.models.parameters import Params
from shardwise.partition.plan import Plan


@dataclass(frozen=True)
class Accuracy:
    """What was measured."""

    accuracy: float
    """Part of the texts whose label was the likeliest; of equal ones the lowest id is taken."""
    nll: float
    """Mean negative log-likelihood of the labels, in nats."""
    texts: int

    @property
    def standard_error(self) -> float:
        """Of the accuracy, as of a mean of independent texts: √(p(1−p)/(n−1)); 0 for a single text."""
        p, n = self.accuracy, self.texts
        return float((p * (1 - p) / (n - 1)) ** 0.5) if n > 1 else 0.0

    def __str__(self) -> str:
        return (
            f"accuracy {self.accuracy:.4f} ± {self.standard_error:.4f}  nll {self.nll:.4f}"
            f"  on {self.texts:,} texts"
        )


def measure(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    params: Params,
    encoded: Encoded,
    *,
    length: int,
    batch: int,
    compute_dtype: str,
    param_dtype: str,
) -> Accuracy:
    """Classify every text.

    Args:
        length: at least the longest text's tokens.
        batch: texts computed at a time; does not change the result.
    """
    sizes = encoded.store.offsets[1:] - encoded.store.offsets[:-1]
    scorer = Scorer.fitting(
        plan, mesh, batch, length, rows=encoded.labels.size, longest=int(sizes.max()),
        compute_dtype=compute_dtype, param_dtype=param_dtype,
    )  # fmt: skip
    rows = LabelledDataset(encoded, scorer.length, seed=0, epochs=1, shuffle=False)
    scores = scorer(params, stacked((rows[i] for i in range(len(rows))), scorer.batch))
    return Accuracy(scores.accuracy, scores.nll, scores.scored)
