"""The key/value cache: slots (rows) with a length each, one array per layer and kind.

Arrays are passed in and out of a step and donated. A paged cache will keep this interface. Not here: who
gets which slot (serving/).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.config import ModelConfig
from shardwise.partition.constraints import Placement


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers for B rows of at most S tokens; S is the same for all rows."""

    keys: tuple[jax.Array, ...]
    """Per layer, [B, S, K, E] in the compute dtype, K being the slots of HeadSlots."""
    values: tuple[jax.Array, ...]
    """Per layer, [B, S, K, E]."""
    lengths: jax.Array
    """int32 [B]: tokens that each row holds."""

    @property
    def capacity(self) -> int:
        """S: tokens that a row can hold."""
        return self.keys[0].shape[1]


def cache_shape(place: Placement, batch: int, capacity: int) -> KVCache:
    """The shapes of an empty cache (jax.ShapeDtypeStruct leaves with shardings)."""
    from shardwise.partition.plan import named_sharding

    config, slots = place.plan.config, place.plan.padding.heads.slots
    array = jax.ShapeDtypeStruct(
        (batch, capacity, slots, config.head_dim),
        place.compute_dtype,
        sharding=named_sharding(place.mesh, place.plan.activation("kv_cache")),
    )
    lengths = jax.ShapeDtypeStruct(
        (batch,), jnp.int32, sharding=named_sharding(place.mesh, (place.plan.batch_axes(),))
    )
    layers = (array,) * config.num_layers
    return KVCache(layers, layers, lengths)


def outgrown(config: ModelConfig, before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a row grows to a length at which it turns by other frequencies (RopeConfig.changes_at).

    Keys, and what layers above the first made of them, are then others from the row's first token on: its
    cache is of no more use, and the caller computes it anew from the tokens.

    Args:
        before, after: int [rows]: tokens that each row holds, and that it will hold.
    """
    lengths = [rope.changes_at for rope in config.ropes if rope.changes_at is not None]
    return any(((before > 0) & (before < length) & (length <= after)).any() for length in lengths)


def write_rows(cache: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    """Write each row's new tokens at that row's own position.

    Args:
        cache: [B, S, K, E].
        new: [B, T, K, E].
        starts: int32 [B]; starts + T must not exceed S (the caller checks on the host).

    One dynamic_update_slice a row, batched: a scatter by index would make the partitioner gather the cache.
    """
    return jax.vmap(lambda row, update, at: jax.lax.dynamic_update_slice_in_dim(row, update, at, 0))(
        cache, new.astype(cache.dtype), starts
    )
