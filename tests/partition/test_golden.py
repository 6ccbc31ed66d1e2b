"""Plans of real models are those under version control; whoever changes how tensors are cut sees it there."""

from __future__ import annotations

import pytest
from tests.partition.make_golden import CASES, FOLDER, golden, text

from shardwise.partition.presets import load_rules

RENEW = "if this is meant, run python -m tests.partition.make_golden and read its changes"


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_golden_one(name: str) -> None:
    saved = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert text(golden(name)).splitlines() == saved.splitlines(), RENEW


def test_there_is_no_golden_plan_without_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES), RENEW


@pytest.mark.parametrize("logical", ["vocab", "embed", "heads", "kv_heads", "mlp"])
def test_a_changed_rule_shows_in_the_golden_plan(logical: str) -> None:
    name = "llama3-8b_fsdp8_tp4"
    changed = golden(name, load_rules("fsdp+tp").changed({logical: ()}))
    assert changed["parameters"] != golden(name)["parameters"]
