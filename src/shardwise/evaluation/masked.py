"""Pseudo-perplexity of a masked language model: every token of a text is hidden once, by itself, and found.

Salazar et al. 2020 (arXiv:1910.14659, §2.1, §2.3). Not here: the loss of many tokens hidden at once, which
training shows (training/objectives.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from shardwise.errors import ConfigError
from shardwise.evaluation.perplexity import Perplexity
from shardwise.evaluation.scores import Scorer, stacked
from shardwise.models.parameters import Params
from shardwise.partition.plan import Plan


@dataclass(frozen=True)
class Frame:
    """What stands around the tokens that are scored."""

    before: tuple[int, ...]
    """In front of every window, as the tokenizer begins a text."""
    behind: tuple[int, ...]
    """Behind every window, as it ends one."""
    mask_id: int
    """Stands for the hidden token."""

    def room(self, length: int) -> int:
        """Tokens of a text that fit a window of `length`.

        Raises:
            ConfigError: none does.
        """
        room = length - len(self.before) - len(self.behind)
        if room < 1:
            around = len(self.before) + len(self.behind)
            raise ConfigError(f"--length is {length}, but {around} tokens stand around each text; raise it")
        return room


def measure(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    params: Params,
    texts: Sequence[np.ndarray],
    *,
    frame: Frame,
    length: int,
    batch: int,
    compute_dtype: str,
    param_dtype: str,
) -> Perplexity:
    """Score texts, each on its own; a text of n tokens takes n rows.

    A text too long for a window is cut into the fewest windows, of even size, that do not see each other.

    Args:
        texts: int32 ids of each, without what stands around; at least one has a token.
        length: most tokens in a window with what stands around.
        batch: rows computed at a time; does not change the result.
    """
    windows = [window for text in texts for window in _windows(text, frame.room(length))]
    assert windows, "no token to score"
    around = len(frame.before) + len(frame.behind)
    scorer = Scorer.fitting(
        plan, mesh, batch, length, rows=sum(map(len, windows)), longest=max(map(len, windows)) + around,
        compute_dtype=compute_dtype, param_dtype=param_dtype,
    )  # fmt: skip
    rows = (row for window in windows for row in hidden_in_turn(window, frame, scorer.length))
    scores = scorer(params, stacked(rows, scorer.batch))
    return Perplexity(scores.nll, scores.scored, scores.accuracy, len(windows), pseudo=True)


def _windows(text: np.ndarray, room: int) -> list[np.ndarray]:
    count = -(-len(text) // room)
    return np.array_split(text, count) if count else []


def hidden_in_turn(window: np.ndarray, frame: Frame, length: int) -> Iterator[dict[str, np.ndarray]]:
    """For each token of a window a row in which it is hidden and the only target: arrays [length] as
    data/packing makes them."""
    tokens = np.array([*frame.before, *window, *frame.behind], np.int32)
    used, first = tokens.size, len(frame.before)
    segment_ids, positions = np.zeros((2, length), np.int32)
    segment_ids[:used], positions[:used] = 1, np.arange(used)
    for place in range(first, first + len(window)):
        row = {
            "tokens": np.zeros(length, np.int32),
            "targets": np.zeros(length, np.int32),
            "segment_ids": segment_ids,
            "positions": positions,
            "weights": np.zeros(length, np.float32),
        }
        row["tokens"][:used] = tokens
        row["tokens"][place] = frame.mask_id
        row["targets"][place] = tokens[place]
        row["weights"][place] = 1.0
        yield row
