"""The next token, chosen without gathering the logits: greedy, temperature, top-k, then top-p, then min-p.

Where the vocabulary is cut, every device works on its own columns; what is exchanged are maxima, counts and
sums of one number a row. The choice depends on the request's seed and the token's position alone: not on the
mesh, the head's layout, the padding or what else is in the batch. Ties take the lowest id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.models.head import Columns
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

BISECTIONS = 31
"""Rounds that find a float32 which is not negative by its bits."""
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
    min_p: jax.Array
    """float32 [B]; keep ids at least this times as likely as the likeliest (Nguyen et al. 2024,
    arXiv:2407.01082), after top_p; 0 keeps all."""
    seed: jax.Array
    """uint32 [B]."""


def greedy(place: Placement, logits: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
    """The likeliest id of every row.

    Args:
        logits: [B, V] cut over `vocab_axes`; padded ids −inf.

    Returns:
        int32 [B].
    """
    return _over_vocab(place, vocab_axes, lambda columns, logits: columns.argmax(logits), logits)


def sample(
    place: Placement,
    logits: jax.Array,
    vocab_axes: tuple[str, ...],
    params: SamplingParams,
    positions: jax.Array,
) -> jax.Array:
    """Draw the next id of every row by the Gumbel-max trick.

    Args:
        logits: float32 [B, V] cut over `vocab_axes`; padded ids −inf.
        positions: int32 [B]: position that the new token will take; with the seed it gives the random
            numbers.

    Returns:
        int32 [B].
    """

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    gumbel = jax.vmap(noise)(params.seed, positions)
    gumbel = place.constrain(gumbel, (place.plan.batch_axes(), vocab_axes))
    return _over_vocab(place, vocab_axes, _draw, logits.astype(jnp.float32), gumbel, rows=params)


def _draw(columns: Columns, logits: jax.Array, gumbel: jax.Array, params: SamplingParams) -> jax.Array:
    cold = params.temperature < GREEDY_BELOW
    # Subtracting first makes the greatest exactly 0, hence its power exactly 1. The other way round XLA may
    # fuse logits · (1 / temperature) − greatest into one rounding, and the greatest then misses itself by an
    # ulp.
    scaled = (logits - columns.max(logits)[:, None]) / jnp.where(cold, 1.0, params.temperature)[:, None]
    shares = jnp.exp(scaled)  # of the greatest probability
    everything = jnp.iinfo(jnp.int32).max
    top_k = jnp.where(params.top_k > 0, params.top_k, everything)
    kept = _keep_largest(columns, shares, lambda chosen: columns.sum(chosen), top_k, jnp.ones_like)
    powers = jnp.where(kept, shares, 0.0)
    wanted = params.top_p * columns.sum(powers)
    nucleus = _keep_largest(
        columns, powers, lambda chosen: columns.sum(jnp.where(chosen, powers, 0.0)), wanted, None
    )
    kept &= nucleus | (params.top_p >= 1.0)[:, None]
    kept &= shares >= params.min_p[:, None]
    drawn = columns.argmax(jnp.where(kept, scaled + gumbel, -jnp.inf))
    return jnp.where(cold, columns.argmax(logits), drawn)


def _keep_largest(
    columns: Columns,
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
    least, _ = jax.lax.fori_loop(0, BISECTIONS, halve, (low, high))
    above, equal = bits > least[:, None], bits == least[:, None]
    value = jax.lax.bitcast_convert_type(least, jnp.float32)
    each = value if unit is None else unit(value)
    missing = (wanted - measure(above)).astype(jnp.float32)
    most = jnp.ceil(missing / jnp.maximum(each, jnp.finfo(jnp.float32).tiny))
    return above | (equal & (_rank(columns, equal) < jnp.maximum(most, 1.0)[:, None]))


def _rank(columns: Columns, chosen: jax.Array) -> jax.Array:
    """For each chosen column, how many are chosen at lower ids: [b, v] → float32 [b, v]."""
    counts = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    before = counts - chosen
    if columns.axes:
        totals = jax.lax.all_gather(counts[:, -1], columns.axes)  # [shards, b]
        earlier = jnp.arange(totals.shape[0]) < jax.lax.axis_index(columns.axes)
        before = before + jnp.sum(jnp.where(earlier[:, None], totals, 0), axis=0)[:, None]
    return before.astype(jnp.float32)


def _over_vocab(
    place: Placement,
    vocab_axes: tuple[str, ...],
    choose: Callable[..., jax.Array],
    *columns: jax.Array,
    rows: SamplingParams | None = None,
) -> jax.Array:
    """Run `choose(Columns, columns…, rows…)` on each device's rows and columns."""
    batch = place.spread("batch")
    extra = () if rows is None else (rows,)

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(
            *(partition_spec((batch, vocab_axes)),) * len(columns),
            *(partition_spec((batch,)),) * len(extra),
        ),
        out_specs=partition_spec((batch,)),
        check_vma=False,
    )
    def local(*args: Any) -> jax.Array:
        return choose(Columns(vocab_axes, args[0].shape[-1]), *args)

    return local(*columns, *extra)
