"""Every family's cases against stored logits of transformers: whole sequences, padding, the cache, meshes.

Not here: Llama's own cases (test_goldens.py) and the live comparison (test_family_live.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import load_on
from .families import all_cases
from .family_cases import (
    GROWING,
    FamilyCase,
    golden_logits,
    growing,
    grows,
    inputs,
    kept,
    model_config,
    weight_sum,
    write_checkpoint,
)
from .test_goldens import assert_close

CASES = tuple(all_cases())
DECODERS = tuple(case for case in CASES if model_config(case).causal)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[FamilyCase], Any]:
    """Function: a case as a float32 shardwise.Model on one device, loaded at the first call."""
    models: dict[str, Any] = {}

    def get(case: FamilyCase) -> Any:
        if case.name not in models:
            models[case.name] = load_on(write_checkpoint(case, tmp_path_factory.mktemp(case.name)))
        return models[case.name]

    return get


@every_case
def test_golden_is_of_these_weights(case: FamilyCase) -> None:
    assert golden_logits(case)["weight_sum"] == pytest.approx(weight_sum(case), rel=1e-12)


@every_case
def test_logits_equal_transformers_with_padding_left_and_right_and_to_200_positions(
    case: FamilyCase, load: Callable[[FamilyCase], Any]
) -> None:
    model, golden = load(case), golden_logits(case)
    for batch in inputs(case):
        ours = model.logits(batch.tokens, batch.attention_mask)
        assert_close(kept(ours, batch), golden[batch.name], f"{case.name} {batch.name}")


@pytest.mark.parametrize("case", DECODERS, ids=lambda case: case.name)
def test_cached_decode_equals_transformers_without_a_cache(
    case: FamilyCase, load: Callable[[FamilyCase], Any]
) -> None:
    model, golden = load(case), golden_logits(case)
    for name, prefill in (("plain", 7), ("long", 190)):
        batch = next(batch for batch in inputs(case) if batch.name == name)
        ours = model.cached_logits(batch.tokens, prefill)
        place = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)[batch.keep]
        known = place >= prefill - 1
        if any(rope.changes_always for rope in model.config.ropes):
            known = place == batch.tokens.shape[1] - 1  # places before were made of a shorter sequence
        assert known.any(), "nothing is compared"
        assert_close(ours[batch.keep][known], golden[name][known], f"{case.name} {name} from the cache")


@pytest.mark.parametrize("case", filter(grows, DECODERS), ids=lambda case: case.name)
def test_a_cache_that_outgrows_its_context_equals_transformers_on_all_tokens_at_every_step(
    case: FamilyCase, load: Callable[[FamilyCase], Any]
) -> None:
    ours = load(case).cached_logits(growing(case)[-1], GROWING[0])[0, GROWING[0] - 1 :]
    assert_close(ours, golden_logits(case)["growing"], f"{case.name} growing from {GROWING[0]} tokens")


@every_case
def test_export_gives_back_every_tensor_bit_for_bit(
    case: FamilyCase, load: Callable[[FamilyCase], Any], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    write_checkpoint(case, tmp_path / "in")
    load(case).export(tmp_path / "out")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape, name
        assert tensor.tobytes() == after[name].tobytes(), name
