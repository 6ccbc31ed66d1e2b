"""FLOPs and parameter counts follow from the shapes, counted here by hand."""

from __future__ import annotations

import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.flops import (
    forward_flops_per_token,
    matmul_parameters,
    parameter_count,
    train_flops_per_token,
)
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec

# q and o: 2·(6·4)·10; k and v: 2·(2·4)·10; gate, up and down: 3·10·14
LAYER_MATRICES = 2 * 24 * 10 + 2 * 8 * 10 + 3 * 10 * 14


def config(tied: bool, biases: bool = False) -> ModelConfig:
    return ModelConfig(
        vocab_size=11, embed_dim=10, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=4, mlp_dim=14,
        max_position=8, tie_embeddings=tied, qkv_bias=biases, attention_out_bias=biases, mlp_bias=biases,
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [MeshSpec(), MeshSpec(2, 3, 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_without_padding_and_a_tied_head_once(mesh: MeshSpec, tied: bool) -> None:
    tables, norms = 11 * 10 * (1 if tied else 2), 10 * (2 * 3 + 1)
    assert parameter_count(plan_model(config(tied), mesh)) == 3 * LAYER_MATRICES + tables + norms
    biases = 3 * (24 + 2 * 8 + 10 + 2 * 14 + 10)
    with_biases = parameter_count(plan_model(config(tied, True), mesh))
    assert with_biases == 3 * LAYER_MATRICES + tables + norms + biases


@pytest.mark.parametrize("tied", [True, False])
def test_every_token_meets_all_matrices_and_the_head_once_but_not_the_look_up(tied: bool) -> None:
    assert matmul_parameters(plan_model(config(tied), MeshSpec())) == 3 * LAYER_MATRICES + 11 * 10


def test_attention_is_counted_over_the_keys_that_a_causal_query_sees() -> None:
    plan, length = plan_model(config(True), MeshSpec()), 8
    seen = sum(position + 1 for position in range(length)) / length  # keys a query, on average
    attention = 3 * 2 * (2 * 24 * seen)  # layers · two products · multiply and add over 24 features
    assert forward_flops_per_token(plan, length) == 2 * (3 * LAYER_MATRICES + 110) + attention
    assert train_flops_per_token(plan, length) == 3 * forward_flops_per_token(plan, length)
