"""Batches on the mesh: each row arrives whole, where the plan says, from all rows or from a process's own."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import Plan
from shardwise.partition.rows import local_rows, put_rows

CONFIG = ModelConfig(
    vocab_size=11,
    embed_dim=4,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    mlp_dim=4,
    max_position=8,
)


def on(*sizes: int) -> tuple[Plan, jax.sharding.Mesh]:
    plan = plan_model(CONFIG, MeshSpec(*sizes))
    return plan, build_mesh(plan.mesh)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 8), (8, 1, 1)])
def test_arrays_of_any_rank_are_cut_by_rows_and_are_otherwise_whole(sizes: tuple[int, int, int]) -> None:
    plan, mesh = on(*sizes)
    given = {"a": np.arange(8), "b": np.arange(24).reshape(8, 3), "c": np.arange(48.0).reshape(8, 2, 3)}
    placed = put_rows(plan, mesh, given)
    assert list(placed) == ["a", "b", "c"]
    for name, array in placed.items():
        np.testing.assert_array_equal(array, given[name])
        assert array.sharding.shard_shape(array.shape) == (8 // plan.batch_multiple(), *array.shape[1:])


def test_a_process_that_holds_all_devices_holds_all_rows() -> None:
    plan, mesh = on(2, 2, 2)
    assert local_rows(plan, mesh, 8) == list(range(8))


def test_rows_given_in_any_order_arrive_in_their_own_places() -> None:
    plan, mesh = on(2, 2, 2)
    whole = np.random.default_rng(0).integers(0, 100, (8, 3))
    order = [6, 1, 0, 7, 3, 2, 5, 4]
    placed = put_rows(plan, mesh, {"tokens": whole[order]}, order, 8)
    np.testing.assert_array_equal(placed["tokens"], whole)
