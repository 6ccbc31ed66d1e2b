"""What a tiny model of a family is, its random weights, and its token batches; NumPy and safetensors only.

Names and shapes of tensors come from shardwise's own families; that they are the right ones is shown by
transformers, which loads the same files and reports whatever is missing, left over or misshapen.
Not here: the cases themselves (families/).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shardwise.checkpoints.load import tensor_files
from shardwise.families import config_from_hf, get_family
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import declared_params

from .cases import GOLDENS, Batch, draw_batches

FAMILY_GOLDENS = GOLDENS / "families"
GROWING = (59, 70)
"""Lengths, in tokens, of the shortest and the longest of the sequences of `growing`."""


@dataclass(frozen=True)
class FamilyCase:
    """One tiny model."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    """The content of config.json."""
    seed: int
    """Seed of the weights; the token batches use it too."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding table."""
        return int(self.config["vocab_size"])


def model_config(case: FamilyCase) -> ModelConfig:
    """Ours."""
    return config_from_hf(case.config)


def weights(case: FamilyCase) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face name: matrices N(0, 0.15), norm scales N(1, 0.3) (or N(0, 0.3) where
    one is added to them), biases N(0, 0.5). Each tensor's stream comes from the seed and its name."""
    config = model_config(case)
    kinds = {param.path: param.use.kind for param in declared_params(config)}
    sizes, tensors = config.sizes(), {}
    for tensor in get_family(config.family).tensor_names(config):
        layers = range(config.num_layers) if "{layer}" in tensor.hf_name else (0,)
        for name in (file for layer in layers for file in tensor_files(config, tensor, layer)):
            mean, deviation = {"scale": (1.0, 0.3), "bias": (0.0, 0.5)}.get(kinds[tensor.path], (0.0, 0.15))
            mean = 0.0 if config.norm_plus_one else mean
            if tensor.copies and tensor.copies[0] in tensors:  # one parameter under two names
                tensors[name] = tensors[tensor.copies[0]].copy()
                continue
            random = np.random.RandomState((case.seed + zlib.crc32(name.encode())) % 2**32)
            tensors[name] = random.normal(mean, deviation, tensor.hf_shape(sizes)).astype(np.float32)
    return tensors


def weight_sum(case: FamilyCase) -> float:
    """Σ|w| in float64; shows that a golden is of these weights."""
    return float(sum(np.abs(w, dtype=np.float64).sum() for w in weights(case).values()))


def write_checkpoint(case: FamilyCase, folder: Path) -> Path:
    """Write `config.json` and `model.safetensors` (float32) into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(case.config), indent=2) + "\n")
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def inputs(case: FamilyCase) -> tuple[Batch, ...]:
    """2 × 20 plain, left padded and right padded, and one row of 200 positions.

    An encoder's padding is its padding token, which no real token is: transformers counts positions by it.
    """
    batches = draw_batches(case.seed + 1, case.vocab)
    if model_config(case).causal:
        return batches
    pad = int(case.config.get("pad_token_id", 1))
    return tuple(replace(batch, tokens=_padded_with(pad, batch)) for batch in batches)


def _padded_with(pad: int, batch: Batch) -> np.ndarray:
    tokens = np.where(batch.tokens == pad, pad + 1, batch.tokens)
    return tokens if batch.attention_mask is None else np.where(batch.attention_mask, tokens, pad)


def kept(logits: np.ndarray, batch: Batch) -> np.ndarray:
    """Those that are compared: logits of kept positions, or all of a classifier's."""
    return logits if logits.ndim == 2 else logits[batch.keep]


def grows(case: FamilyCase) -> bool:
    """Whether rows turn by other frequencies where they grow beyond the context before stretching, which in
    these cases is 64 tokens."""
    return any(rope.depends_on_length for rope in model_config(case).ropes)


def growing(case: FamilyCase) -> list[np.ndarray]:
    """The first GROWING[0], …, GROWING[1] tokens of the long batch, each int32 [1, n]."""
    (long,) = (batch.tokens for batch in inputs(case) if batch.name == "long")
    return [long[:, :length] for length in range(GROWING[0], GROWING[1] + 1)]


def golden_logits(case: FamilyCase) -> dict[str, np.ndarray]:
    """The stored reference: batch name → float32 [kept positions, V]; also `weight_sum`, and for a case that
    `grows` as "growing" the last position's logits [lengths, V] of each whole sequence of `growing`."""
    with np.load(FAMILY_GOLDENS / f"{case.name}.npz") as stored:
        return {name: stored[name] for name in stored.files}
