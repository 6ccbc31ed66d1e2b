"""Compute the stored reference logits with transformers' Llama; needs torch and transformers, not shardwise.

    python -m tests.parity.make_goldens   # from the root of the repository; writes tests/parity/goldens/*.npz

Not for checking shardwise: test_goldens.py reads the files, test_live.py reuses the two functions here.
Eager attention, float32, no cache; position ids count the real tokens of each row.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from .cases import CASES, GOLDENS, LOGIT_BOUND, Batch, inputs, weight_sums, write_checkpoint


def load_reference(folder: Path) -> LlamaForCausalLM:
    """Load a folder as transformers' LlamaForCausalLM in float32; AssertionError if a tensor does not fit."""
    model, report = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    wrong = {kind: names for kind, names in report.items() if names}
    assert not wrong, f"{folder}: transformers reports {wrong}"
    return model.eval()


def reference_logits(
    model: LlamaForCausalLM, tokens: np.ndarray, mask: np.ndarray | None = None
) -> np.ndarray:
    """float32 [B, T, V] for int32 [B, T] tokens and an int32 [B, T] mask of real tokens."""
    arguments = {}
    if mask is not None:
        attention_mask = torch.from_numpy(mask.astype(np.int64))
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        arguments = {"attention_mask": attention_mask, "position_ids": positions}
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        return model(input_ids=ids, use_cache=False, **arguments).logits.float().numpy()


def batch_logits(model: LlamaForCausalLM, batch: Batch) -> np.ndarray:
    """float32 [kept positions, V] of one batch."""
    return reference_logits(model, batch.tokens, batch.attention_mask)[batch.keep]


def main() -> None:
    """Write one file a golden name; cases that share a name must agree."""
    GOLDENS.mkdir(exist_ok=True)
    made: dict[str, dict[str, np.ndarray]] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = load_reference(write_checkpoint(case, Path(folder)))
            arrays = {batch.name: batch_logits(model, batch) for batch in inputs(case)}
        for name, first in made.get(case.golden, {}).items():
            assert np.abs(arrays[name] - first).max() <= LOGIT_BOUND / 10 * np.abs(first).max(), (
                case.name,
                name,
            )
        if case.golden not in made:
            made[case.golden] = arrays
            np.savez_compressed(GOLDENS / f"{case.golden}.npz", weight_sums=weight_sums(case), **arrays)
        print(
            f"{case.name:28s} max|logit| " + " ".join(f"{k}={np.abs(v).max():.2f}" for k, v in arrays.items())
        )
    size = sum(path.stat().st_size for path in GOLDENS.glob("*.npz"))
    print(f"{len(made)} files, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
