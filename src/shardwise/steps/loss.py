"""Cross-entropy under every layout of the head, a part of the sequence at a time, with masks and z-loss.

Logits exist only for one chunk of tokens, and of the vocabulary only what a device holds. When
differentiated, the gradient of a chunk is formed while its logits are at hand, so that the head's product is
not computed twice. Not here: scores of given tokens (score.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.models.dense import operands
from shardwise.models.head import Head, HeadShard, HeadValues
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

CHUNK_BYTES = 64 << 20
"""Logits held at once on a device, in bytes; at least one position of every row."""


def chunk_length(rows: int, length: int, vocab: int, itemsize: int = 4) -> int:
    """Positions per chunk so that rows × positions × vocab logits take about CHUNK_BYTES, chunks being even.

    Args:
        rows, vocab: those on one device.
    """
    most = max(1, CHUNK_BYTES // (rows * vocab * itemsize))
    chunks = -(-length // most)
    return -(-length // chunks)


def chunks_of(rows: int, length: int, vocab: int, itemsize: int) -> tuple[int, int]:
    """Positions per chunk and number of chunks, where the head's operands have `itemsize` bytes an element:
    logits are float32 at least. Other arguments as for chunk_length."""
    step = chunk_length(rows, length, vocab, max(4, itemsize))
    return step, -(-length // step)


def cross_entropy(
    place: Placement,
    hidden: jax.Array,
    head: Head,
    targets: jax.Array,
    weights: jax.Array,
    z_loss: float,
) -> jax.Array:
    """Σ weight · (NLL + z_loss · log²Z) over all tokens of all devices; differentiable in hidden and head.

    Args:
        hidden: [B, T, D].
        head: [V, D].
        targets: int32 [B, T].
        weights: float32 [B, T]; 0 leaves a token out. Scale them to average: the sum is not divided here.
        z_loss: coefficient of the log-partition penalty (PaLM, arXiv:2204.02311, §5).
    """
    hidden = head.pad_hidden(place, hidden)
    given = (hidden, head.values)

    @jax.custom_vjp
    def total(x: jax.Array, values: HeadValues) -> jax.Array:
        return _total(place, head, z_loss, x, values, targets, weights, False)[0]

    def forward(x: jax.Array, values: HeadValues) -> tuple[jax.Array, tuple[jax.Array, HeadValues]]:
        value, *gradients = _total(place, head, z_loss, x, values, targets, weights, True)
        return value, tuple(gradients)

    def backward(gradients: tuple[jax.Array, HeadValues], cotangent: jax.Array) -> Any:
        dx, dw = jax.tree.map(lambda g, x: (g * cotangent).astype(x.dtype), gradients, given)
        # Held as it was made: else it may be gathered before the cast, twice as wide.
        return place.constrain(dx, (place.spread("batch"), (), head.weight.contract_axes)), dw

    total.defvjp(forward, backward)
    return total(*given)


def _total(
    place: Placement,
    head: Head,
    z_loss: float,
    x: jax.Array,
    values: HeadValues,
    targets: jax.Array,
    weights: jax.Array,
    differentiate: bool,
) -> tuple[Any, ...]:
    """The sum; where it is differentiated also its gradients in `x` and `values`."""
    batch = place.spread("batch")
    x_spec, row_spec, scalar = head.hidden_spec(place), partition_spec((batch, ())), partition_spec(())

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(x_spec, head.specs, row_spec, row_spec),
        out_specs=(scalar, x_spec, head.specs) if differentiate else (scalar,),
        check_vma=False,  # sums over the mesh are written out below
    )
    def local(x: jax.Array, values: HeadValues, targets: jax.Array, weights: jax.Array) -> tuple[Any, ...]:
        shard = HeadShard(place, head, values)
        columns, wide = shard.columns, jnp.promote_types(x.dtype, jnp.float32)

        def one(carry: tuple[Any, ...], chunk: tuple[jax.Array, ...]) -> tuple[Any, jax.Array | None]:
            x, targets, weights = chunk
            logits = shard.logits(x)
            lse, normed = columns.log_sum_exp(logits, columns.max(logits))
            weights = weights.astype(wide)
            nll = lse - columns.pick(logits, targets)
            loss = carry[0] + jnp.sum(weights * (nll + z_loss * jnp.square(lse)))
            if not differentiate:
                return (loss,), None
            slope = weights * (1 + 2 * z_loss * lse)
            one_hot = (targets[..., None] == columns.ids).astype(wide)
            dlogits = normed * slope[..., None] - one_hot * weights[..., None]
            capped = shard.slope(logits)
            dlogits = dlogits if capped is None else dlogits * capped
            dx, dw = _products(place, dlogits.astype(x.dtype), shard.weight, x)
            new = (dw,) if shard.bias is None else (dw, jnp.sum(dlogits, axis=(0, 1)))
            return (loss, jax.tree.map(jnp.add, carry[1], new)), dx

        sums = tuple(jnp.zeros(a.shape, wide) for a in (shard.weight, shard.bias) if a is not None)
        start = (jnp.zeros((), wide), sums)
        chunks = in_chunks(shard.weight.shape[0], x, targets, weights)
        carry, dx = jax.lax.scan(one, start[: 1 + differentiate], chunks)
        loss = jax.lax.psum(carry[0], batch)
        if not differentiate:
            return (loss,)
        dx = joined(dx, x.shape[1]).astype(x.dtype)
        dx = jax.lax.psum(dx, head.vocab_axes) if head.vocab_axes else dx
        dw, *db = (g.astype(x.dtype) for g in carry[1])
        gradients = (head.weight.scatter(dw, batch), *(jax.lax.psum(g, batch) for g in db))
        if not place.on_cpu:
            # Else a compiler may put the sum over devices off to the end of the backward pass, and keep each
            # device's part, float32 and of the whole vocabulary, beside what the layers take.
            dx, gradients = jax.lax.optimization_barrier((dx, gradients))
        return loss, dx, gradients

    return local(x, values, targets, weights)


def _products(
    place: Placement, dlogits: jax.Array, weight: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the logits' product in `x` [b, t, d] and in `weight` [v, d], from [b, t, v]."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dlogits, weight, x = operands(place.on_cpu, x.size // x.shape[-1], dlogits, weight, x)
    dx = jnp.einsum("btv,vd->btd", dlogits, weight, preferred_element_type=wide)
    return dx, jnp.einsum("btv,btd->vd", dlogits, x, preferred_element_type=wide)


def in_chunks(vocab: int, x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """[b, T, …] arrays as [chunks, b, t, …]; what is added to fill the last chunk has weight and target 0.

    Args:
        vocab: logits a position on one device.
    """
    rows, length = x.shape[:2]
    step, chunks = chunks_of(rows, length, vocab, x.dtype.itemsize)

    def split(array: jax.Array) -> jax.Array:
        fill = [(0, 0)] * array.ndim
        fill[1] = (0, chunks * step - length)
        return jnp.moveaxis(jnp.pad(array, fill).reshape(rows, chunks, step, *array.shape[2:]), 1, 0)

    return tuple(split(array) for array in (x, *others))


def joined(chunked: jax.Array, length: int) -> jax.Array:
    """The inverse of in_chunks: [chunks, b, t, …] → [b, T, …]."""
    joined = jnp.moveaxis(chunked, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]
