"""Sizes that no axis divides: the compiled step still moves and computes what was predicted.

Kernels are then stored padded for fsdp, heads, mlp and vocabulary padded for tp, kv heads repeated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.planner.audits import SEQUENCE, Case, as_expected

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.predict import predict

FIVE = ModelConfig(
    vocab_size=103, embed_dim=62, num_layers=2, num_heads=5, num_kv_heads=5, head_dim=4, mlp_dim=90,
    max_position=64,
)  # fmt: skip
SIX = replace(FIVE, embed_dim=50, num_heads=6, num_kv_heads=3, mlp_dim=91, tie_embeddings=True)
ODD = {"5 heads": FIVE, "6 heads of 3": SIX}
MESHES = [MeshSpec(1, 4, 2), MeshSpec(1, 2, 3), MeshSpec(2, 4, 1), MeshSpec(1, 1, 7), MeshSpec(2, 2, 2)]
FEW = [("train", "5 heads", MeshSpec(1, 4, 2), None), ("train", "6 heads of 3", MeshSpec(1, 4, 2), "hidden"),
       ("train", "6 heads of 3", MeshSpec(1, 2, 3), None), ("decode", "5 heads", MeshSpec(1, 2, 3), "hidden"),
       ("prefill", "6 heads of 3", MeshSpec(1, 1, 7), None)]  # fmt: skip
MANY = [
    (task, odd, mesh, head)
    for task in ("train", "prefill", "decode")
    for odd in ODD
    for mesh in MESHES
    for head in ((None, "hidden", "replicated") if mesh.tp > 1 else (None,))
]
MANY = [one for one in MANY if one not in FEW]


@pytest.mark.parametrize(
    ("task", "odd", "mesh", "head"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in MANY)],
    ids=str,
)
def test_the_compiled_step_of_odd_sizes_is_what_was_predicted(
    task: Any, odd: str, mesh: MeshSpec, head: Any
) -> None:
    assert as_expected(Case(task, mesh, ODD[odd], head=head).audit) == []


def test_a_length_that_its_axis_does_not_divide_is_refused_with_lengths_that_it_does() -> None:
    case = Case(mesh=MeshSpec(1, 2, 2), rules=SEQUENCE)
    with pytest.raises(
        ConfigError, match="tp 2 does not divide length 11; take a multiple, such as 10 or 12"
    ):
        predict(case.plan, replace(case.workload, length=11))


def test_under_policy_replicate_it_stays_whole_as_predicted() -> None:
    rules = SEQUENCE.changed(policy={"length": "replicate"})
    assert as_expected(Case(mesh=MeshSpec(1, 2, 2), rules=rules, more=(("length", 11),)).audit) == []
