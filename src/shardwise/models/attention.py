"""Attention: one function that picks the kernel for the platform, with softmax in float32.

Keys may be attended to by queries of the same segment at the same or a later position. That one rule covers
causal batches, padding, packed documents and a cache. Not here: projections (transformer.py) and the cache
(cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from shardwise.models.dense import operands
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

Kernel = Literal["auto", "xla", "tokamax"]


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees: those of its segment that are not ahead of it."""

    q_positions: jax.Array
    """int32 [B, T]."""
    q_segments: jax.Array
    """int32 [B, T]; 0 marks padding."""
    k_positions: jax.Array
    """int32 [B, S]."""
    k_segments: jax.Array
    """int32 [B, S]."""
    ordered: bool = field(default=False, metadata={"static": True})
    """Queries and keys are the same places of whole sequences, in which positions only grow within a segment:
    no query sees a key of a greater index, so that those need not be computed."""

    def mask(self) -> jax.Array:
        """bool [B, T, S]."""
        same = self.q_segments[:, :, None] == self.k_segments[:, None, :]
        return same & (self.k_positions[:, None, :] <= self.q_positions[:, :, None])


jax.tree_util.register_dataclass(Visibility)


def attention(
    place: Placement, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility, kernel: Kernel = "auto"
) -> jax.Array:
    """Scaled dot-product attention with grouped query heads.

    Args:
        q: [B, T, K, G, E]: G query heads share each of K key/value heads.
        k, v: [B, S, K, E].
        visible: positions and segments of queries and keys.
        kernel: `auto` takes tokamax's fused kernel on GPU and TPU where there is more than one query a row,
            and XLA elsewhere.

    Returns:
        [B, T, K, G, E] in q's dtype. Scores are scaled by 1/√E (Vaswani et al. 2017, eq. 1).
    """
    if kernel == "auto":
        fused = place.mesh.devices.flat[0].platform in ("gpu", "tpu") and q.shape[1] > 1
        kernel = "tokamax" if fused else "xla"
    return _tokamax(place, q, k, v, visible) if kernel == "tokamax" else _xla(place.on_cpu, q, k, v, visible)


def _xla(cpu: bool, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
    block = query_block(q.shape[1])
    if block == q.shape[1]:
        return _block(cpu, q, k, v, visible)
    outs = []
    for start in range(0, q.shape[1], block):
        end = start + block  # past the length in the last block: slices stop there by themselves
        reach = end if visible.ordered else k.shape[1]
        part = Visibility(
            visible.q_positions[:, start:end],
            visible.q_segments[:, start:end],
            visible.k_positions[:, :reach],
            visible.k_segments[:, :reach],
        )
        outs.append(
            jax.checkpoint(_block, static_argnums=0)(cpu, q[:, start:end], k[:, :reach], v[:, :reach], part)
        )
    return jnp.concatenate(outs, axis=1)


def query_block(length: int) -> int:
    """Queries per block on the XLA path: 128 in short sequences, 512 in long ones.

    A block bounds the scores held at once to B·H·block·S, which the backward pass computes again. In whole
    sequences it leaves out keys that lie behind its last query.
    """
    return min(length, 128 if length <= 1024 else 512)


def _block(cpu: bool, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
    dtype, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    # as [B, K, G, T, E]: products then come out in the order in which they are used
    q = jnp.moveaxis(q, 1, 3) * q.shape[-1] ** -0.5
    rows = q.shape[0] * q.shape[3]
    q, k, v = operands(cpu, rows, q, k, v)
    scores = jnp.einsum("bkgte,bske->bkgts", q, k, preferred_element_type=wide)
    scores = jnp.where(visible.mask()[:, None, None], scores, jnp.finfo(wide).min)
    (weights,) = operands(cpu, rows, jax.nn.softmax(scores, axis=-1).astype(dtype))
    return jnp.moveaxis(jnp.einsum("bkgts,bske->bkgte", weights, v).astype(dtype), 3, 1)


def _tokamax(place: Placement, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
    """tokamax's kernel on each device's own rows and heads: the partitioner cannot cut a Pallas kernel."""
    import tokamax

    batch, _, heads, *_ = place.plan.activation("attention_out")

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(
            partition_spec((batch, (), heads, (), ())),
            partition_spec((batch, (), heads, ())),
            partition_spec((batch, (), heads, ())),
            partition_spec((batch, ())),
        ),
        out_specs=partition_spec((batch, (), heads, (), ())),
        check_vma=False,  # a Pallas call does not say how its result varies over the mesh
    )
    def local(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility) -> jax.Array:
        merged = q.reshape(*q.shape[:2], -1, q.shape[-1])
        out = tokamax.dot_product_attention(merged, k, v, mask=visible.mask()[:, None])
        return out.reshape(q.shape)

    return local(q, k, v, visible)
