"""What a step sees of a parameter: cast as it lies, gathered over fsdp alone, trimmed of what fsdp needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import named_sharding

CONFIG = ModelConfig(
    vocab_size=101,
    embed_dim=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=10,
    max_position=8,
)


def placement(*sizes: int) -> Placement:
    plan = plan_model(CONFIG, MeshSpec(*sizes))
    mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    return Placement(plan, mesh, jnp.dtype("bfloat16"))


@pytest.mark.parametrize(
    ("sizes", "path"), [((1, 2, 2), "layers/mlp/down_proj/kernel"), ((1, 7, 1), "layers/attn/q_proj/kernel")]
)
def test_a_layers_weight_is_cast_where_it_lies_then_gathered_over_fsdp_and_trimmed(
    sizes: tuple[int, int, int], path: str
) -> None:
    place = placement(*sizes)
    d = place.plan[path]
    assert "fsdp" in sum(d.spec, ())
    if sizes[1] == 7:
        assert d.shape != d.use_shape, "7 divides no dim, so that the weight is stored padded"
    value = np.random.default_rng(0).normal(size=d.use_shape[1:]).astype(np.float32)
    padded = np.pad(value, [(0, s - u) for s, u in zip(d.shape[1:], d.use_shape[1:], strict=True)])
    stored_as = named_sharding(place.mesh, d.spec[1:])

    @jax.jit
    def both(layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        return place.stored(path, layer), place.weight(path, layer)

    stored, weight = both(jax.device_put(padded, stored_as))
    assert stored.dtype == weight.dtype == jnp.bfloat16
    assert stored.shape == d.shape[1:] and stored.sharding.is_equivalent_to(stored_as, stored.ndim)
    assert weight.shape == d.use_shape[1:]
    assert weight.sharding.is_equivalent_to(named_sharding(place.mesh, d.at_use()[1:]), weight.ndim)
    np.testing.assert_array_equal(np.asarray(weight), value.astype(jnp.bfloat16))


def test_activations_are_cut_by_batch_and_heads_and_stay_whole_in_embed() -> None:
    place = placement(2, 2, 2)
    hidden, heads = jax.jit(
        lambda x, q: (
            place.activation("residual", x),
            place.activation("query", q),
        )
    )(np.zeros((4, 3, 12)), np.zeros((4, 3, 2, 1, 1)))
    assert hidden.sharding.shard_shape(hidden.shape) == (1, 3, 12)
    assert heads.sharding.shard_shape(heads.shape) == (1, 3, 1, 1, 1)


def test_on_one_device_nothing_is_constrained() -> None:
    place = placement(1, 1, 1)
    x = jnp.zeros((2, 2))
    assert place.constrain(x, ((), ())) is x
    assert place.on_cpu


@pytest.mark.parametrize(
    ("sizes", "batch", "vocab"),
    [
        ((1, 1, 1), (), ()),
        ((2, 1, 1), ("dp",), ()),
        ((1, 2, 2), ("fsdp",), ("tp",)),
        ((2, 2, 2), ("dp", "fsdp"), ("tp",)),
    ],
)
def test_collectives_name_only_mesh_axes_of_more_than_one_device(
    sizes: tuple[int, int, int], batch: tuple[str, ...], vocab: tuple[str, ...]
) -> None:
    place = placement(*sizes)
    assert (place.spread("batch"), place.spread("vocab")) == (batch, vocab)
    assert place.spread_spec((("dp", "fsdp"), (), ("tp",))) == (batch, (), vocab)
