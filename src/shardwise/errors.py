"""The few kinds of mistakes that a user can make, each with one readable line.

Not for broken invariants of our own code: those are `assert`s and keep their traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ShardwiseError(Exception):
    """A mistake that the person at the terminal can mend; the message says how."""


class ConfigError(ShardwiseError):
    """An option, a configuration key, a model configuration or a partition rule is wrong."""


class MeshError(ShardwiseError):
    """A mesh cannot be read, or the devices cannot host it."""


class CheckpointError(ShardwiseError):
    """A model folder, file or training checkpoint is missing, broken or does not fit."""


class DataError(ShardwiseError):
    """A text, JSONL or token file is missing, empty or broken."""


class ContextError(ShardwiseError):
    """More tokens were asked for than the model's context or the cache holds."""


def did_you_mean(name: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message: `; did you mean 'mlp'?`, or nothing."""
    near = get_close_matches(name, list(allowed), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""
