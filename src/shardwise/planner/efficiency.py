"""One number per chip and kind of work: the part of the peak rate that real programs reach.

Not here: where the numbers are checked (benchmarks/planner_validation.py).
"""

from __future__ import annotations

from typing import Literal

from shardwise.runtime.chips import Chip

Work = Literal["train", "prefill", "decode"]

_BY_KIND: dict[str, dict[Work, float]] = {
    "tpu": {"train": 0.75, "prefill": 0.75, "decode": 0.8},
    "gpu": {"train": 0.65, "prefill": 0.65, "decode": 0.7},
    "cpu": {"train": 0.8, "prefill": 0.8, "decode": 0.8},
}
_BY_CHIP: dict[str, dict[Work, float]] = {}


def efficiency(chip: Chip, work: Work) -> float:
    """Of the peak rate of products (train, prefill) or of memory's bandwidth (decode)."""
    return _BY_CHIP.get(chip.name, {}).get(work, _BY_KIND[chip.kind][work])
