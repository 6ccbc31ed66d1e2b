"""The next token, chosen without gathering the logits: greedy, temperature, top-k, top-p.

Every shard of the vocabulary works on its own columns; what is exchanged are maxima, counts and sums of one
number a row. The choice depends on the request's seed and the token's position alone: not on the mesh, the
padding or what else is in the batch. Ties take the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing float32 logits by less only overflows."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingParams:
    """How each of B rows is sampled."""

    temperature: jax.Array
    """float32 [B]; 0 is greedy."""
    top_k: jax.Array
    """int32 [B]; keep the k likeliest; 0 keeps all."""
    top_p: jax.Array
    """float32 [B]; keep the fewest likeliest ids whose probabilities sum to this (Holtzman et al. 2019,
    arXiv:1904.09751), after top_k; 1 keeps all."""
    seed: jax.Array
    """uint32 [B]."""


def greedy(place: Placement, logits: jax.Array) -> jax.Array:
    """The likeliest id of every row.

    Args:
        logits: [B, V] cut over the vocabulary; padded ids −inf.

    Returns:
        int32 [B].
    """
    return _over_vocab(place, lambda shard, logits: shard.argmax(logits), logits)


def sample(place: Placement, logits: jax.Array, params: SamplingParams, positions: jax.Array) -> jax.Array:
    """Draw the next id of every row by the Gumbel-max trick.

    Args:
        logits: float32 [B, V] cut over the vocabulary; padded ids −inf.
        positions: int32 [B]: position that the new token will take; with the seed it gives the random
            numbers.

    Returns:
        int32 [B].
    """

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    gumbel = place.constrain(
        jax.vmap(noise)(params.seed, positions),
        (place.plan.batch_axes(), place.plan.rules.mesh_axes("vocab")),
    )
    return _over_vocab(place, _sample_shard, logits.astype(jnp.float32), gumbel, rows=params)


def _sample_shard(shard: _Shard, logits: jax.Array, gumbel: jax.Array, params: SamplingParams) -> jax.Array:
    cold = params.temperature < GREEDY_BELOW
    # Subtracting first makes the greatest exactly 0, hence its power exactly 1. The other way round XLA may
    # fuse logits · (1 / temperature) − greatest into one rounding, and the greatest then misses itself by an
    # ulp.
    scaled = (logits - shard.max(logits)[:, None]) / jnp.where(cold, 1.0, params.temperature)[:, None]
    powers = jnp.exp(scaled)
    everything = jnp.iinfo(jnp.int32).max
    top_k = jnp.where(params.top_k > 0, params.top_k, everything)
    kept = shard.keep_largest(powers, lambda chosen: shard.sum(chosen), top_k, jnp.ones_like)
    powers = jnp.where(kept, powers, 0.0)
    wanted = params.top_p * shard.sum(powers)
    nucleus = shard.keep_largest(
        powers, lambda chosen: shard.sum(jnp.where(chosen, powers, 0.0)), wanted, None
    )
    kept &= nucleus | (params.top_p >= 1.0)[:, None]
    drawn = shard.argmax(jnp.where(kept, scaled + gumbel, -jnp.inf))
    return jnp.where(cold, shard.argmax(logits), drawn)


class _Shard:
    """Reductions over the vocabulary, of which this device holds the columns from `first` on."""

    def __init__(self, axes: tuple[str, ...], width: int):
        self.axes = axes
        self.first = jax.lax.axis_index(axes) * width if axes else 0
        self.ids = self.first + jnp.arange(width, dtype=jnp.int32)

    def max(self, values: jax.Array) -> jax.Array:
        """[b, v] → [b]."""
        best = jnp.max(values, axis=-1)
        return jax.lax.pmax(best, self.axes) if self.axes else best

    def sum(self, values: jax.Array) -> jax.Array:
        """[b, v] → [b]; counts where values are bool."""
        kind = jnp.int32 if values.dtype == jnp.bool_ else values.dtype
        total = jnp.sum(values, axis=-1, dtype=kind)
        return jax.lax.psum(total, self.axes) if self.axes else total

    def argmax(self, values: jax.Array) -> jax.Array:
        """The lowest id of the greatest value: [b, v] → int32 [b]."""
        best = self.max(values)
        lowest = jnp.min(jnp.where(values == best[:, None], self.ids, jnp.iinfo(jnp.int32).max), axis=-1)
        return jax.lax.pmin(lowest, self.axes) if self.axes else lowest

    def keep_largest(
        self,
        powers: jax.Array,
        measure: Callable[[jax.Array], jax.Array],
        wanted: jax.Array,
        unit: Callable[[jax.Array], jax.Array] | None,
    ) -> jax.Array:
        """bool [b, v]: the fewest largest `powers` whose measure reaches `wanted`; of equals the lowest ids.

        The value of the last one kept is found by bisection on the bits of the float, whose order for numbers
        that are not negative is that of the numbers: 31 rounds, each a sum of one number a row.

        Args:
            powers: float32 [b, v], not negative.
            measure: bool [b, v] → [b]: count or mass of what is chosen.
            wanted: [b] of the same kind.
            unit: gives what one of several equals adds to the measure; None stands for its own value.
        """
        bits = jax.lax.bitcast_convert_type(powers, jnp.int32)

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds  # reached at low, not at high
            middle = low + (high - low) // 2
            reached = measure(bits >= middle[:, None]) >= wanted
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

        rows = powers.shape[0]
        low = jnp.zeros((rows,), jnp.int32)
        high = jnp.full((rows,), jnp.int32(0x3F800001))  # just above the bits of 1.0, the greatest power
        least, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
        above, equal = bits > least[:, None], bits == least[:, None]
        value = jax.lax.bitcast_convert_type(least, jnp.float32)
        each = value if unit is None else unit(value)
        missing = (wanted - measure(above)).astype(jnp.float32)
        most = jnp.ceil(missing / jnp.maximum(each, jnp.finfo(jnp.float32).tiny))
        return above | (equal & (self._rank(equal) < jnp.maximum(most, 1.0)[:, None]))

    def _rank(self, chosen: jax.Array) -> jax.Array:
        """For each chosen column, how many are chosen at lower ids: [b, v] → float32 [b, v]."""
        counts = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
        before = counts - chosen
        if self.axes:
            totals = jax.lax.all_gather(counts[:, -1], self.axes)  # [shards, b]
            earlier = jnp.arange(totals.shape[0]) < jax.lax.axis_index(self.axes)
            before = before + jnp.sum(jnp.where(earlier[:, None], totals, 0), axis=0)[:, None]
        return before.astype(jnp.float32)


def _over_vocab(
    place: Placement,
    choose: Callable[..., jax.Array],
    *columns: jax.Array,
    rows: SamplingParams | None = None,
) -> jax.Array:
    """Run `choose(shard, columns…, rows…)` on each device's rows and columns."""
    batch, vocab = place.spread("batch"), place.spread("vocab")
    extra = () if rows is None else (rows,)

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(partition_spec((batch, vocab)),) * len(columns) + (partition_spec((batch,)),) * len(extra),
        out_specs=partition_spec((batch,)),
        check_vma=False,
    )
    def local(*args: Any) -> jax.Array:
        return choose(_Shard(vocab, args[0].shape[-1]), *args)

    return local(*columns, *extra)
