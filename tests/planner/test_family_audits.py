"""The compiled step of every family is what was predicted: bytes, runs and FLOPs of each kind.

Not here: rules, head layouts and swaps (test_audit.py).
"""

from __future__ import annotations

from typing import Literal

import pytest
from tests.families.test_on_meshes import CASES, FIRST
from tests.parity.family_cases import FamilyCase, model_config
from tests.planner.audits import ALL, BOTH, FSDP, TP, Case, as_expected

from shardwise.partition.mesh import MeshSpec

MESHES = (BOTH, TP, FSDP, ALL)
TASKS: tuple[Literal["train", "prefill", "decode"], ...] = ("train", "prefill", "decode")
# Of every family one training step, and of every third a prefill or decode; the full matrix is slow.
FEW = [("train", case, MESHES[i % 3]) for i, case in enumerate(FIRST)]
FEW += [(TASKS[1 + i % 2], case, MESHES[(i + 1) % 3]) for i, case in enumerate(FIRST) if i % 3 == 0]
MANY = [(task, case, mesh) for case in FIRST for mesh in MESHES for task in TASKS]
MANY += [("train", case, MESHES[i % 3]) for i, case in enumerate(CASES) if case not in FIRST]
MANY = [one for one in MANY if one not in FEW]


@pytest.mark.parametrize(
    ("task", "case", "mesh"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MANY)],
    ids=lambda value: value.name if isinstance(value, FamilyCase) else str(value),
)
def test_the_compiled_step_moves_and_computes_what_was_predicted(
    task: Literal["train", "prefill", "decode"], case: FamilyCase, mesh: MeshSpec
) -> None:
    config = model_config(case)
    if task != "train" and not config.causal:
        pytest.skip("an encoder has no cache")
    assert as_expected(Case(task, mesh, config).audit) == []
