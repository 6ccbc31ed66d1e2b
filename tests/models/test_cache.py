"""The cache: every row is written at its own place and nowhere else; shapes are those of the plan's slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.cache import cache_shape, write_rows
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh


def test_each_row_is_written_at_its_own_start_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(size=(3, 7, 2, 4)).astype(np.float32)
    new = rng.normal(size=(3, 2, 2, 4)).astype(np.float32)
    starts = np.array([0, 5, 2], np.int32)
    want = old.copy()
    for row, start in enumerate(starts):
        want[row, start : start + 2] = new[row]
    np.testing.assert_array_equal(write_rows(jnp.asarray(old), jnp.asarray(new), jnp.asarray(starts)), want)


def test_the_cache_holds_every_slot_in_the_compute_dtype_cut_over_batch_and_heads() -> None:
    config = ModelConfig(
        vocab_size=11,
        embed_dim=4,
        num_layers=3,
        num_heads=5,
        num_kv_heads=1,
        head_dim=2,
        mlp_dim=4,
        max_position=8,
    )
    plan = plan_model(config, MeshSpec(1, 2, 4))
    mesh = build_mesh(plan.mesh)
    cache = cache_shape(Placement(plan, mesh, jnp.dtype("bfloat16")), batch=6, capacity=16)
    assert cache.capacity == 16
    assert len(cache.keys) == len(cache.values) == 3
    for array in (*cache.keys, *cache.values):
        # One kv head, repeated in 4 slots that tp 4 divides.
        assert (array.shape, array.dtype) == ((6, 16, 4, 2), jnp.bfloat16)
        assert array.sharding.spec == jax.sharding.PartitionSpec(("dp", "fsdp"), None, "tp", None)
    assert cache.lengths.shape == (6,)
    assert cache.lengths.sharding.spec == jax.sharding.PartitionSpec(("dp", "fsdp"))
