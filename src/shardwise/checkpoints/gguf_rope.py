"""Rotary settings of a GGUF file, as config.json spells them.

Not here: other settings (`gguf_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoints.gguf_architectures import Architecture
from shardwise.checkpoints.gguf_metadata import Metadata, shortest
from shardwise.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"


def rope_settings(meta: Metadata, architecture: Architecture) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`; or `rope_parameters` for each kind of layer, if they differ.

    Raises:
        CheckpointError: a scaling that is not supported, or no base where the architecture has no usual one.
    """
    stated = meta.get("rope.freq_base", architecture.rope_base)
    base = shortest(meta.require("rope.freq_base") if stated is None else stated)
    scaling = _declared_scaling(meta)
    windows = architecture.windows
    if windows is None or windows.rope_base is None:
        return {"rope_theta": base, "rope_scaling": scaling}
    local = shortest(meta.get("rope.freq_base_swa", windows.rope_base))
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": base, **(scaling or {"rope_type": "default"})},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
    }


def _declared_scaling(meta: Metadata) -> dict[str, Any] | None:
    """Rotary scaling that metadata state; without a type llama.cpp takes linear."""
    kind = meta.get("rope.scaling.type", "linear")
    factor = shortest(meta.get("rope.scaling.factor", meta.get("rope.scale_linear", 0.0)))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "linear":
        raise CheckpointError(f"{meta.file}: rope scaling {kind!r} is not supported; supported: none, linear")
    return {"rope_type": "linear", "factor": factor}


def add_llama3_scaling(config: dict[str, Any], divisors: np.ndarray, file: Path) -> None:
    """Set `config`'s llama3 rope scaling to what `rope_freqs.weight` was made from.

    Converters write what each frequency is divided by and drop the settings, so the usual settings are tried
    until one gives the same divisors. Formula: `_compute_llama3_parameters` of transformers.

    Args:
        config: has `rope_theta`, `rope_scaling`, `head_dim` and `max_position_embeddings`.
        divisors: the tensor, float32 [E/2].
        file: for messages.

    Raises:
        CheckpointError: no known setting gives these divisors, or another scaling is declared.
    """
    if config["rope_scaling"] is not None:
        raise CheckpointError(f"{file}: has {ROPE_FREQS} besides another rope scaling; not supported")
    if divisors.dtype == np.float32 and divisors.shape == (config["head_dim"] // 2,):
        if np.all(divisors == 1.0):
            return
        # Wavelengths grow along the head up to about rope_theta, so the last one is scaled in full.
        factor = shortest(divisors[-1])
        lengths = [8192, *(2**power for power in range(10, 21)), config["max_position_embeddings"]]
        for high_freq_factor in (4.0, 2.0, 8.0, 16.0, 32.0):
            for length in lengths:
                scaling = {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": length,
                }
                wanted = llama3_divisors(config["head_dim"], config["rope_theta"], scaling)
                # Converters compute in float32: some units in the last place (1e-7), which one subtraction of
                # near-equal numbers lets grow. Other candidates differ by whole factors.
                if np.allclose(wanted, divisors, rtol=1e-4, atol=0):
                    config["rope_scaling"] = scaling
                    return
    raise CheckpointError(
        f"{file}: {ROPE_FREQS} of shape {divisors.shape} matches no known llama3 rope scaling; not supported"
    )


def llama3_divisors(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """What llama3 scaling divides each frequency by, float64 [E/2]."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
