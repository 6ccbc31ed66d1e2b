"""Every family's cases against the installed transformers, with other weights and tokens than stored ones.

Run with `-m parity` in an interpreter that has torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from .conftest import load_on
from .families import all_cases
from .family_cases import GROWING, FamilyCase, growing, grows, inputs, write_checkpoint
from .test_goldens import assert_close

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the live comparison needs torch and transformers"
)

from .make_family_goldens import load_reference, reference_logits  # noqa: E402  (imports torch)

pytestmark = pytest.mark.parity

LIVE = tuple(replace(case, seed=case.seed + 50_000) for case in all_cases())


@pytest.mark.parametrize("case", LIVE, ids=lambda case: case.name)
def test_logits_equal_transformers_before_and_after_export(case: FamilyCase, tmp_path: Path) -> None:
    folder = write_checkpoint(case, tmp_path / "in")
    model, reference = load_on(folder), load_reference(folder, case)
    for batch in inputs(case):
        ours = model.logits(batch.tokens, batch.attention_mask)
        theirs = reference_logits(reference, batch.tokens, batch.attention_mask)
        real = slice(None)
        if batch.attention_mask is not None and ours.ndim == 3:
            real = batch.attention_mask.astype(bool)
        assert_close(ours[real], theirs[real], f"{case.name} {batch.name}")
    if grows(case):
        fresh = load_reference(folder, case)
        theirs = np.stack([reference_logits(fresh, tokens)[0, -1] for tokens in growing(case)])
        ours = model.cached_logits(growing(case)[-1], GROWING[0])[0, GROWING[0] - 1 :]
        assert_close(ours, theirs, f"{case.name} growing")
    model.export(tmp_path / "out")
    batch = inputs(case)[-1]
    reloaded = reference_logits(load_reference(tmp_path / "out", case), batch.tokens)
    assert_close(model.logits(batch.tokens), reloaded, f"{case.name} exported")
