"""Attention: one function that picks the kernel for the platform, with softmax in float32.

Keys may be attended to by queries of the same segment, in decoders at the same or a later position, under a
sliding window not much later. That one rule covers padding, packed documents and a cache. Not here:
projections (blocks.py) and the cache (cache.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.dense import operands
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

Kernel = Literal["auto", "xla", "tokamax"]


@dataclass(frozen=True)
class Visibility:
    """Which keys each query sees: those of its segment that are not ahead of it, or all of its segment."""

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

    causal: bool = field(default=True, metadata={"static": True})
    """Whether keys ahead of a query are hidden from it."""
    window: jax.Array | None = None
    """int32 []: of how many positions, its own among them, a query sees keys at most; None: all."""

    def mask(self) -> jax.Array:
        """bool [B, T, S]."""
        seen = self.q_segments[:, :, None] == self.k_segments[:, None, :]
        if self.causal:
            seen &= self.ahead() <= 0
        if self.window is not None:
            seen &= jnp.abs(self.ahead()) < self.window
        return seen

    def ahead(self) -> jax.Array:
        """int32 [B, T, S]: by how many positions each key is ahead of each query."""
        return self.k_positions[:, None, :] - self.q_positions[:, :, None]

    def row(self, at: jax.Array) -> Visibility:
        """That of one row of the batch."""

        def of(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, at, 1)

        return replace(
            self,
            q_positions=of(self.q_positions),
            q_segments=of(self.q_segments),
            k_positions=of(self.k_positions),
            k_segments=of(self.k_segments),
        )

    def part(self, start: int, end: int, reach: int) -> Visibility:
        """That of queries `start` to `end` and the first `reach` keys."""
        return replace(
            self,
            q_positions=self.q_positions[:, start:end],
            q_segments=self.q_segments[:, start:end],
            k_positions=self.k_positions[:, :reach],
            k_segments=self.k_segments[:, :reach],
        )


jax.tree_util.register_dataclass(Visibility)


@dataclass(frozen=True)
class Scores:
    """What becomes of a query's product with a key before the softmax."""

    scale: float
    """It is multiplied with this first."""
    softcap: float | None = None
    """c of c·tanh(score / c) (Gemma 2)."""
    slopes: np.ndarray | jax.Array | None = None
    """[K, G]: how much a score falls with every position between key and query (ALiBi)."""

    def of(self, products: jax.Array, visible: Visibility) -> jax.Array:
        """Scores [B, K, G, T, S] from products that carry the scale already; −inf where nothing is seen."""
        scores = products
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if self.slopes is not None:
            scores += self.bias(visible, scores.dtype)
        return jnp.where(visible.mask()[:, None, None], scores, jnp.finfo(scores.dtype).min)

    def bias(self, visible: Visibility, dtype: jnp.dtype) -> jax.Array:
        """ALiBi's part [B, K, G, T, S]: −slope · distance."""
        assert self.slopes is not None
        distance = jnp.abs(visible.ahead()).astype(dtype)
        return -jnp.asarray(self.slopes, dtype)[:, :, None, None] * distance[:, None, None]


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes of `heads` heads, float64 [heads]: 2^(−8/n·i) for n heads, i from 1, where n is a power of two;
    else those of the power below, and of the next power every other one (Press et al. 2022, and the code
    that its authors published for other numbers)."""
    power = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    more = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power) + 1, 2))
    return np.concatenate([slopes, more])


def attention(
    place: Placement, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility, scores: Scores,
    kernel: Kernel = "auto",
) -> jax.Array:  # fmt: skip
    """Scaled dot-product attention with grouped query heads.

    Args:
        q: [B, T, K, G, E]: G query heads share each of K key/value heads.
        k, v: [B, S, K, E].
        visible: positions and segments of queries and keys.
        scores: scale, soft cap and ALiBi slopes.
        kernel: `auto` takes tokamax's fused kernel where `fuses` says so, and XLA elsewhere.

    Returns:
        [B, T, K, G, E] in q's dtype.
    """
    if kernel == "auto":
        device, lengths = place.device, (q.shape[1], k.shape[1])
        fused = fuses(device.platform, device.device_kind, *lengths, scores.slopes is not None)
        kernel = "tokamax" if fused else "xla"
    if kernel == "tokamax":
        return _tokamax(place, q, k, v, visible, scores)
    return _xla(place.on_cpu, q, k, v, visible, scores)


def fuses(platform: str, device_kind: str, queries: int, keys: int, alibi: bool) -> bool:
    """Whether attention is computed by a fused kernel, which holds no scores, unless told otherwise.

    On GPUs wherever there is more than one query a row. tokamax's TPU kernel works from v5 on, in tiles of
    128 queries and keys, and takes no bias; what it does not take runs in blocks on XLA, since tokamax's own
    stand-in would hold all scores at once.

    Args:
        platform, device_kind: as JAX names them: `tpu`, `TPU v5 lite`.
        queries, keys: T and S.
        alibi: scores fall with the distance.
    """
    if platform != "tpu":
        return platform == "gpu" and queries > 1
    tiled = queries % TPU_TILE == 0 and keys % TPU_TILE == 0
    return tiled and not alibi and not device_kind.startswith(("TPU v2", "TPU v3", "TPU v4"))


TPU_TILE = 128
"""Queries and keys that tokamax's TPU kernel computes together."""


def _xla(
    cpu: bool, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility, scores: Scores
) -> jax.Array:
    block = query_block(q.shape[1])
    attend = partial(_block, cpu, scores)
    if block == q.shape[1]:
        return attend(q, k, v, visible)
    outs = []
    for start in range(0, q.shape[1], block):
        end = start + block  # past the length in the last block: slices stop there by themselves
        reach = end if visible.ordered and visible.causal else k.shape[1]
        part = visible.part(start, end, reach)
        outs.append(jax.checkpoint(attend)(q[:, start:end], k[:, :reach], v[:, :reach], part))
    return jnp.concatenate(outs, axis=1)


def query_block(length: int) -> int:
    """Queries per block on the XLA path: 128 in short sequences, 512 in long ones.

    A block bounds the scores held at once to B·H·block·S, which the backward pass computes again. In whole
    sequences it leaves out keys that lie behind its last query.
    """
    return min(length, 128 if length <= 1024 else 512)


def _block(
    cpu: bool, how: Scores, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility
) -> jax.Array:
    dtype, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    # as [B, K, G, T, E]: products then come out in the order in which they are used
    q = jnp.moveaxis(q, 1, 3) * how.scale
    rows = q.shape[0] * q.shape[3]
    q, k, v = operands(cpu, rows, q, k, v)
    scores = how.of(jnp.einsum("bkgte,bske->bkgts", q, k, preferred_element_type=wide), visible)
    (weights,) = operands(cpu, rows, jax.nn.softmax(scores, axis=-1).astype(dtype))
    return jnp.moveaxis(jnp.einsum("bkgts,bske->bkgte", weights, v).astype(dtype), 3, 1)


def _tokamax(
    place: Placement, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility, scores: Scores
) -> jax.Array:
    """tokamax's kernel on each device's own rows and heads: the partitioner cannot cut a Pallas kernel."""
    batch, _, heads, *_ = place.plan.activation("attention_out")
    row = partition_spec((batch, ()))
    window = None if visible.window is None else partition_spec(())
    slopes = None if scores.slopes is None else jnp.asarray(scores.slopes)

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(
            partition_spec((batch, (), heads, (), ())),
            partition_spec((batch, (), heads, ())),
            partition_spec((batch, (), heads, ())),
            replace(
                visible, q_positions=row, q_segments=row, k_positions=row, k_segments=row, window=window
            ),
            None if slopes is None else partition_spec((heads, ())),
        ),
        out_specs=partition_spec((batch, (), heads, (), ())),
        check_vma=False,  # a Pallas call does not say how its result varies over the mesh
    )  # fmt: skip
    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility, slopes: jax.Array | None
    ) -> jax.Array:
        attend = partial(_fused, place.device.platform, replace(scores, slopes=slopes))
        # On a TPU the kernel takes one mask for all rows.
        if place.device.platform == "tpu" and q.shape[0] > 1:
            return row_by_row(attend, q, k, v, visible)
        return attend(q, k, v, visible)

    return local(q, k, v, visible, slopes)


def row_by_row(
    attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility
) -> jax.Array:
    """`attend` on one row of the batch after the other; a TPU's kernels work so anyway."""

    def one(at: jax.Array) -> jax.Array:
        arrays = (jax.lax.dynamic_slice_in_dim(x, at, 1) for x in (q, k, v))
        return attend(*arrays, visible.row(at))[0]

    return jax.lax.map(one, jnp.arange(q.shape[0]))


def _fused(
    platform: str, scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, visible: Visibility
) -> jax.Array:
    """On one device: tokamax's kernel for its kind."""
    import tokamax

    merged, bias = q.reshape(*q.shape[:2], -1, q.shape[-1]), None
    if scores.slopes is not None:
        bias = scores.bias(visible, jnp.promote_types(q.dtype, jnp.float32))
        bias = bias.reshape(bias.shape[0], -1, *bias.shape[3:])
    # By name on a TPU: what its kernel does not take is then an error, not computed with all scores at hand.
    implementation: Any = "mosaic_tpu" if platform == "tpu" else None
    _keep_command_line()
    out = tokamax.dot_product_attention(
        merged, k, v, bias, visible.mask()[:, None], scale=scores.scale, logits_soft_cap=scores.softcap,
        implementation=implementation,
    )  # fmt: skip
    return out.reshape(q.shape)


def _keep_command_line() -> None:
    """The first time that tokamax reads one of its options it parses sys.argv, and would refuse our own."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
