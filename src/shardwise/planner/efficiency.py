"""One number per chip and kind of work: the part of the peak rate that real programs reach.

The numbers are medians over published runs, as benchmarks/planner_validation.py prints them with `--fit`;
nothing else of the cost model is fitted. A chip with fewer than ten well-documented runs takes its class's.
"""

from __future__ import annotations

from typing import Literal

from shardwise.runtime.chips import Chip

Work = Literal["train", "prefill", "decode"]

_BY_KIND: dict[str, dict[Work, float]] = {
    # Prefill has no runs of its own: it is the forward half of training's products.
    "tpu": {"train": 0.68, "prefill": 0.68, "decode": 0.95},
    "gpu": {"train": 0.60, "prefill": 0.60, "decode": 0.75},
    # The table's rates of a CPU are measured ones.
    "cpu": {"train": 1.0, "prefill": 1.0, "decode": 1.0},
}
_BY_CHIP: dict[str, dict[Work, float]] = {
    "a100-40": {"train": 0.667, "prefill": 0.667},
    "a100-80": {"train": 0.679, "prefill": 0.679},
    "h100": {"train": 0.458, "prefill": 0.458},
    "v6e": {"train": 0.641, "prefill": 0.641},
}


def efficiency(chip: Chip, work: Work) -> float:
    """Of the peak rate of products (train, prefill) or of memory's bandwidth (decode)."""
    return _BY_CHIP.get(chip.name, {}).get(work, _BY_KIND[chip.kind][work])
