"""Compute the stored reference logits of the families' cases with transformers; needs torch.

    python -m tests.parity.make_family_goldens [CASE…]   # from the root; all cases by default

Eager attention, float32, no cache; position ids count the real tokens of each row.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .families import all_cases
from .family_cases import (
    FAMILY_GOLDENS,
    FamilyCase,
    growing,
    grows,
    inputs,
    kept,
    weight_sum,
    write_checkpoint,
)


def load_reference(folder: Path, case: FamilyCase) -> Any:
    """Load a folder as the transformers class that its config names, in float32; AssertionError if a tensor
    does not fit."""
    kind = getattr(transformers, case.config["architectures"][0])
    # torch's grouped product takes no odd sizes
    experts = {"experts_implementation": "eager"} if "num_local_experts" in case.config else {}
    model, report = kind.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True, **experts
    )
    wrong = {what: names for what, names in report.items() if names}
    assert not wrong, f"{case.name}: transformers reports {wrong}"
    return model.eval()


def reference_logits(model: Any, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """float32 [B, T, V] for int32 [B, T] tokens and an int32 [B, T] mask of real tokens; of a classifier
    [B, labels], for which rows padded on the left are moved: it reads place 0, be that padding or not."""
    arguments: dict[str, Any] = {}
    if mask is not None and hasattr(model, "classifier"):
        order = np.argsort(1 - mask, axis=1, kind="stable")
        tokens, mask = np.take_along_axis(tokens, order, 1), np.take_along_axis(mask, order, 1)
    if mask is not None:
        arguments["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        # An encoder counts positions itself, from the tokens that are not padding.
        if model.can_generate() and "position_ids" in inspect.signature(model.forward).parameters:
            arguments["position_ids"] = (arguments["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        logits: np.ndarray = model(input_ids=ids, **arguments).logits.float().numpy()
    return logits


def main(names: list[str]) -> None:
    """Write one file a case."""
    unknown = set(names) - {case.name for case in all_cases()}
    if unknown:
        sys.exit(f"no case is called {', '.join(sorted(unknown))}; see tests/parity/families")
    FAMILY_GOLDENS.mkdir(exist_ok=True)
    for case in all_cases():
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = load_reference(write_checkpoint(case, Path(folder)), case)
            arrays = {
                batch.name: kept(reference_logits(model, batch.tokens, batch.attention_mask), batch)
                for batch in inputs(case)
            }
            if grows(case):
                # anew, because transformers' `dynamic` remembers the longest sequence that it has seen
                model = load_reference(write_checkpoint(case, Path(folder)), case)
                arrays["growing"] = np.stack([reference_logits(model, t)[0, -1] for t in growing(case)])
        np.savez_compressed(FAMILY_GOLDENS / f"{case.name}.npz", weight_sum=weight_sum(case), **arrays)
        print(f"{case.name:32s} " + " ".join(f"{k}={np.abs(v).max():.2f}" for k, v in arrays.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
