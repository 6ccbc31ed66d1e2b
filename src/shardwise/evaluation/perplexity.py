"""Perplexity of a model on a text: every token scored once, in windows that fit the model.

Not here: benchmarks by task (later in this folder).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardwise.errors import DataError
from shardwise.evaluation.scores import Scorer
from shardwise.evaluation.windows import batch_windows, rolling_windows
from shardwise.partition.plan import Plan


@dataclass(frozen=True)
class Perplexity:
    """What was measured."""

    nll: float
    """Mean negative log-likelihood of a token, in nats."""
    tokens: int
    """Tokens scored."""
    accuracy: float
    """Part of the tokens that were the model's first choice."""
    windows: int
    """Windows computed."""
    pseudo: bool = False
    """Of a masked language model: each token given all others of its window (masked.py)."""

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def __str__(self) -> str:
        name = "pseudo-perplexity" if self.pseudo else "perplexity"
        return f"nll {self.nll:.4f}  {name} {self.perplexity:.3f}  on {self.tokens:,} tokens"


def tokenize_texts(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text without BOS or EOS; what looks like a control token in it is spelled out."""
    from shardwise.data.tokens import encode_plain

    return [np.asarray(ids, np.int32) for ids in encode_plain(tokenizer, texts)]


def prefix_token(tokenizer: Any) -> int:
    """The id that stands in front of a text, so that its first token is scored too: BOS, or else EOS.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError("the tokenizer has neither BOS nor EOS to stand in front of the first token; set one")


def measure(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    params: Any,
    texts: Sequence[np.ndarray],
    *,
    prefix_token: int,
    length: int,
    batch: int,
    compute_dtype: str,
    param_dtype: str,
    context: int = 1,
) -> Perplexity:
    """Score texts, each on its own.

    Args:
        params: stacked or one array per layer.
        texts: int32 ids of each, without BOS; at least one has a token.
        prefix_token: stands in front of each text, so that its first token is scored too.
        length: most tokens in a window, at most the model's context.
        batch: windows computed at a time; does not change the result.
        context: see rolling_windows.

    The sum is taken in float64 on the host, in the order of the texts.
    """
    windows = [w for text in texts for w in rolling_windows(text, prefix_token, length, context)]
    assert windows, "no token to score"
    scorer = Scorer.fitting(
        plan, mesh, batch, length, rows=len(windows), longest=max(len(window.inputs) for window in windows),
        compute_dtype=compute_dtype, param_dtype=param_dtype,
    )  # fmt: skip
    scores = scorer(params, batch_windows(windows, scorer.batch, scorer.length))
    return Perplexity(scores.nll, scores.scored, scores.accuracy, len(windows))
