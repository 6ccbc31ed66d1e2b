"""Cross-entropy with the vocabulary cut over `tp`, a part of the sequence at a time, with masks and z-loss.

Logits exist only for one chunk of tokens and one shard of the vocabulary. When differentiated, the gradient
of a chunk is formed while its logits are at hand, so that the head's product is not computed twice.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from shardwise.models.dense import operands
from shardwise.models.vocabulary import VocabTable, mask_padding
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


def token_nll(
    place: Placement, hidden: jax.Array, head: VocabTable, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of every target and whether it is the likeliest id.

    Args:
        hidden: [B, T, D].
        head: [V, D].
        targets: int32 [B, T].

    Returns:
        float32 (or wider) [B, T] in nats, and bool [B, T].
    """
    batch = place.spread("batch")

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(partition_spec((batch, (), ())), partition_spec(head.spec), partition_spec((batch, ()))),
        out_specs=partition_spec((batch, ())),
        check_vma=False,
    )
    def local(x: jax.Array, w: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        w = head.gather(w)
        terms = _Terms(place, w)

        def one(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
            x, targets = chunk
            logits, best = terms.logits(x)
            lse, _ = terms.log_sum_exp(logits, best)
            picked = terms.pick(logits, targets)
            return None, (lse - picked, picked >= best)

        _, (nll, right) = jax.lax.scan(one, None, _chunks(w.shape[0], x, targets))
        return _joined(nll, x.shape[1]), _joined(right, x.shape[1])

    return local(hidden, head.value, targets)


def cross_entropy(
    place: Placement,
    hidden: jax.Array,
    head: VocabTable,
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

    @jax.custom_vjp
    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return _total(place, head, z_loss, x, w, targets, weights, False)[0]

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        value, dx, dw = _total(place, head, z_loss, x, w, targets, weights, True)
        return value, (dx, dw)

    def backward(gradients: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx, dw = gradients
        return (dx * cotangent).astype(hidden.dtype), (dw * cotangent).astype(head.value.dtype)

    total.defvjp(forward, backward)
    return total(hidden, head.value)


def _total(
    place: Placement,
    head: VocabTable,
    z_loss: float,
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    differentiate: bool,
) -> tuple[jax.Array, ...]:
    """The sum; where it is differentiated also its gradients in `x` and `w`."""
    batch, vocab = place.spread("batch"), place.spread("vocab")
    x_spec, w_spec = partition_spec((batch, (), ())), partition_spec(head.spec)
    row_spec = partition_spec((batch, ()))
    scalar = partition_spec(())

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(x_spec, w_spec, row_spec, row_spec),
        out_specs=(scalar, x_spec, w_spec) if differentiate else (scalar,),
        check_vma=False,  # sums over the mesh are written out below
    )
    def local(x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, ...]:
        w = head.gather(w)
        terms = _Terms(place, w)
        wide = terms.wide

        def one(
            carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
            x, targets, weights = chunk
            logits, best = terms.logits(x)
            lse, normed = terms.log_sum_exp(logits, best)
            weights = weights.astype(wide)
            nll = lse - terms.pick(logits, targets)
            loss = carry[0] + jnp.sum(weights * (nll + z_loss * jnp.square(lse)))
            if not differentiate:
                return (loss,), None
            slope = weights * (1 + 2 * z_loss * lse)
            dlogits = normed * slope[..., None] - terms.one_hot(targets) * weights[..., None]
            dlogits = dlogits.astype(x.dtype)
            dlogits, w_, x_ = terms.operands(targets.size, dlogits, w, x)
            dx = jnp.einsum("btv,vd->btd", dlogits, w_, preferred_element_type=wide)
            dw = carry[1] + jnp.einsum("btv,btd->vd", dlogits, x_, preferred_element_type=wide)
            return (loss, dw), dx

        start = (jnp.zeros((), wide), jnp.zeros(w.shape, wide))[: 1 + differentiate]
        carry, dx = jax.lax.scan(one, start, _chunks(w.shape[0], x, targets, weights))
        loss = jax.lax.psum(carry[0], batch)
        if not differentiate:
            return (loss,)
        dx = _joined(dx, x.shape[1]).astype(x.dtype)
        dx = jax.lax.psum(dx, vocab) if vocab else dx
        dw = carry[1].astype(w.dtype)
        if head.spec[1]:
            dw = jax.lax.psum_scatter(dw, "fsdp", scatter_dimension=1, tiled=True)
        dw = jax.lax.psum(dw, tuple(axis for axis in batch if not (axis == "fsdp" and head.spec[1])))
        return loss, dx, dw

    return local(x, w, targets, weights)


class _Terms:
    """Inside a shard_map: what cross-entropy needs of one shard's logits, summed over the vocabulary."""

    def __init__(self, place: Placement, w: jax.Array):
        self.w = w
        self.operands = partial(operands, place.on_cpu)
        self.axes = place.spread("vocab")
        self.vocab_size = place.plan.config.vocab_size
        self.padded = place.plan.padding.vocab > self.vocab_size
        self.first = jax.lax.axis_index(self.axes) * w.shape[0] if self.axes else 0
        self.wide = jnp.promote_types(w.dtype, jnp.float32)

    def logits(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [b, t, v] of this shard, padded ids −inf, and the greatest of all shards [b, t]."""
        out = jnp.einsum(
            "btd,vd->btv", *self.operands(x.size // x.shape[-1], x, self.w), preferred_element_type=self.wide
        )
        if self.padded:
            out = mask_padding(out, self.vocab_size, self.first)
        best = jnp.max(out, axis=-1)
        return out, jax.lax.pmax(best, self.axes) if self.axes else best

    def log_sum_exp(self, logits: jax.Array, best: jax.Array) -> tuple[jax.Array, jax.Array]:
        """log Σ exp over all shards [b, t], and this shard's probabilities [b, t, v]."""
        powers = jnp.exp(logits - best[..., None])
        total = self._sum(jnp.sum(powers, axis=-1))
        return best + jnp.log(total), powers / total[..., None]

    def pick(self, logits: jax.Array, targets: jax.Array) -> jax.Array:
        """The target's logit [b, t], from whichever shard holds it."""
        mine = targets - self.first
        found = (mine >= 0) & (mine < logits.shape[-1])
        picked = jnp.take_along_axis(logits, jnp.where(found, mine, 0)[..., None], axis=-1)[..., 0]
        return self._sum(jnp.where(found, picked, 0))

    def one_hot(self, targets: jax.Array) -> jax.Array:
        """[b, t, v]: 1 where this shard holds the target."""
        ids = self.first + jnp.arange(self.w.shape[0], dtype=targets.dtype)
        return (targets[..., None] == ids).astype(self.wide)

    def _sum(self, value: jax.Array) -> jax.Array:
        return jax.lax.psum(value, self.axes) if self.axes else value


def _chunks(vocab: int, x: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """[b, T, …] arrays as [chunks, b, t, …]; what is added to fill the last chunk has weight and target 0."""
    rows, length = x.shape[:2]
    step = chunk_length(rows, length, vocab, max(4, x.dtype.itemsize))
    chunks = -(-length // step)

    def split(array: jax.Array) -> jax.Array:
        fill = [(0, 0)] * array.ndim
        fill[1] = (0, chunks * step - length)
        return jnp.moveaxis(jnp.pad(array, fill).reshape(rows, chunks, step, *array.shape[2:]), 1, 0)

    return tuple(split(array) for array in (x, *others))


def _joined(chunked: jax.Array, length: int) -> jax.Array:
    """The inverse of _chunks: [chunks, b, t, …] → [b, T, …]."""
    joined = jnp.moveaxis(chunked, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]
