"""Documents packed in one row do not see each other, whatever the family's positions and windows are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.families.test_on_meshes import FIRST
from tests.parity.conftest import load_on
from tests.parity.families import all_cases
from tests.parity.family_cases import FamilyCase, model_config, write_checkpoint

from shardwise.partition.rows import put_rows

LENGTHS, ROW = (5, 7, 3), 16
SHORT = [
    replace(case, name=f"{case.name}_window_4", config={**case.config, "sliding_window": 4})
    for case in all_cases()
    if case.name in ("mistral", "mixtral")
]
"""Windows that end within a document of 5 or 7 tokens."""
FORM_350M = [case for case in all_cases() if case.name == "opt_350m_form"]
DECODERS = [*(case for case in FIRST if model_config(case).causal), *SHORT, *FORM_350M]


def packed(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [16, V] of documents of 5, 7 and 3 tokens in one row, padded by one."""
    segments = np.repeat([1, 2, 3, 0], (*LENGTHS, ROW - sum(LENGTHS)))[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, 1)])[None].astype(np.int32)
    batch = {
        "tokens": tokens, "targets": np.zeros_like(tokens), "segment_ids": segments, "positions": positions,
        "weights": np.zeros(tokens.shape, np.float32),
    }  # fmt: skip
    out = model.step("logits", 1, ROW)(model.params, put_rows(model.plan, model.mesh, batch))
    return np.asarray(out)[0]


@pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.name)
def test_packed_documents_have_the_logits_that_each_has_alone(case: FamilyCase, tmp_path: Path) -> None:
    """Case C310."""
    model = load_on(write_checkpoint(case, tmp_path))
    tokens = np.random.default_rng(case.seed).integers(0, case.vocab, (1, ROW)).astype(np.int32)
    found, start = packed(model, tokens), 0
    for length in LENGTHS:
        alone = model.logits(tokens[:, start : start + length])[0]
        worst = np.abs(found[start : start + length] - alone).max()
        assert worst <= 1e-4 * np.abs(alone).max(), f"document of {length}"
        start += length
    changed = tokens.copy()
    changed[0, : LENGTHS[0]] = (changed[0, : LENGTHS[0]] + 1) % case.vocab
    again = packed(model, changed)
    assert np.array_equal(found[LENGTHS[0] : sum(LENGTHS)], again[LENGTHS[0] : sum(LENGTHS)])
