"""The cache: every row is written at its own place and nowhere else; shapes are those of the plan's slots."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.cache import cache_shape, outgrown, write_rows
from shardwise.models.config import ModelConfig, RopeConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh

CONFIG = ModelConfig(
    vocab_size=11, embed_dim=4, num_layers=3, num_heads=5, num_kv_heads=1, head_dim=2, mlp_dim=4,
    max_position=8,
)  # fmt: skip


def test_each_row_is_written_at_its_own_start_and_nothing_else_changes() -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(size=(3, 7, 2, 4)).astype(np.float32)
    new = rng.normal(size=(3, 2, 2, 4)).astype(np.float32)
    starts = np.array([0, 5, 2], np.int32)
    want = old.copy()
    for row, start in enumerate(starts):
        want[row, start : start + 2] = new[row]
    np.testing.assert_array_equal(write_rows(jnp.asarray(old), jnp.asarray(new), jnp.asarray(starts)), want)


def test_a_row_outgrows_its_cache_where_it_passes_the_original_context_of_longrope_and_nowhere_else() -> None:
    rope = RopeConfig("longrope", original_max_position=6, short_factor=(1.0,), long_factor=(2.0,))
    config = replace(CONFIG, rope=rope)
    for before, after, want in (
        ([4, 5], [5, 6], False),
        ([5, 6], [6, 7], True),
        ([7, 8], [8, 9], False),
        ([3, 3], [3, 8], True),
        ([0, 0], [9, 7], False),  # an empty row has nothing to lose
    ):
        assert outgrown(config, np.array(before), np.array(after)) is want, (before, after)
    windowed = replace(CONFIG, local_rope=rope, windows=(2, 0, 2))
    assert outgrown(windowed, np.array([6]), np.array([7]))
    assert not outgrown(CONFIG, np.array([6]), np.array([7]))


def test_the_cache_holds_every_slot_in_the_compute_dtype_cut_over_batch_and_heads() -> None:
    plan = plan_model(CONFIG, MeshSpec(1, 2, 4))
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
