"""Cuts a long text into windows that a model of limited context can score, every token exactly once.

Not here: running the model and adding up log-likelihoods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """What the model reads, and the tokens that are scored in this window."""

    inputs: tuple[int, ...]
    """At most max_length token ids."""
    targets: tuple[int, ...]
    """The next tokens of the LAST len(targets) inputs; the inputs before those are only context."""


def rolling_windows(
    tokens: Sequence[int] | np.ndarray, prefix_token: int, max_length: int, context: int = 1
) -> list[Window]:
    """Cuts a text so that each of its tokens is the target of exactly one window.

    The first window reads prefix_token and predicts max_length tokens. Each later one predicts the next
    max_length - context + 1 tokens; it reads max_length tokens, so the last one, which has fewer left to
    predict, has more context. This is the convention of EleutherAI's lm-evaluation-harness.

    Args:
        tokens: the ids of the text, without BOS; an empty text gives no window.
        prefix_token: stands in front of the first token, usually BOS or EOS.
        max_length: most tokens that the model reads at once.
        context: least number of inputs up to and with the one that predicts a window's first target;
            1 makes windows overlap by nothing but that input.

    Returns:
        The windows, in the order of the text.

    Raises:
        ConfigError: not 1 <= context <= max_length.
    """
    if not 1 <= context <= max_length:
        raise ConfigError(f"context is {context}; it must be from 1 to max_length ({max_length})")
    ids = [int(token) for token in tokens]
    if not ids:
        return []
    done = min(max_length, len(ids))
    windows = [Window((prefix_token, *ids[: done - 1]), tuple(ids[:done]))]
    while done < len(ids):
        end = min(done + max_length - context + 1, len(ids))
        windows.append(Window(tuple(ids[end - 1 - max_length : end - 1]), tuple(ids[done:end])))
        done = end
    return windows


def batch_windows(
    windows: Sequence[Window], batch: int, length: int, pad_id: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Lays windows out one per row, in order, in batches of one shape; empty rows complete the last batch.

    Args:
        windows: any number.
        batch: B, rows in each batch.
        length: T, at least the longest window's inputs.
        pad_id: the token, and the target, of places that are not scored.

    Yields:
        Arrays [B, T] as packing gives them: tokens int32, targets int32, segment_ids int32 (1 for the window,
        0 in padding), positions int32, weights float32 (1 on the window's targets, else 0).
    """
    assert batch >= 1, batch
    for first in range(0, len(windows), batch):
        arrays = {
            "tokens": np.full((batch, length), pad_id, np.int32),
            "targets": np.full((batch, length), pad_id, np.int32),
            "segment_ids": np.zeros((batch, length), np.int32),
            "positions": np.zeros((batch, length), np.int32),
            "weights": np.zeros((batch, length), np.float32),
        }
        for row, window in enumerate(windows[first : first + batch]):
            used, scored = len(window.inputs), len(window.targets)
            assert scored <= used <= length, (scored, used, length)
            arrays["tokens"][row, :used] = window.inputs
            arrays["targets"][row, used - scored : used] = window.targets
            arrays["segment_ids"][row, :used] = 1
            arrays["positions"][row, :used] = np.arange(used)
            arrays["weights"][row, used - scored : used] = 1.0
        yield arrays
