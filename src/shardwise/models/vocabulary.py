"""Both ends of the vocabulary: embedding look-up and output head, with the vocabulary cut over `tp`.

Each runs on its own rows of the table (shard_map), so that neither gathers it. Not here: the loss
(steps/loss.py) and sampling (steps/sampling.py), which work on logits left cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from shardwise.models.dense import dense
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec
from shardwise.partition.rules import Spec


@dataclass(frozen=True)
class VocabTable:
    """An embedding table or head [V, D] in the compute dtype, as the vocabulary's shard_maps take it."""

    value: jax.Array
    spec: Spec
    """Cut of its dims; `fsdp` on D where that is how it is stored: it is then gathered inside the shard_map,
    whose gradient is a true reduce-scatter."""

    @classmethod
    def of(cls, place: Placement, path: str, value: jax.Array) -> VocabTable:
        """The parameter at `path`, which rules or an override may have cut in any way."""
        vocab, decision = place.plan.rules.mesh_axes("vocab"), place.plan[path]
        if decision.spec == (vocab, ("fsdp",)) and decision.shape == decision.use_shape:
            return cls(place.stored(path, value), place.spread_spec(decision.spec))
        whole = (place.spread("vocab"), ())
        return cls(place.constrain(place.weight(path, value), whole), whole)

    def gather(self, local: jax.Array) -> jax.Array:
        """Inside a shard_map: this device's rows, whole in D."""
        return jax.lax.all_gather(local, "fsdp", axis=1, tiled=True) if self.spec[1] else local


def look_up(place: Placement, table: VocabTable, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding table.

    Args:
        table: V (padded) cut over the axes of `vocab`.
        tokens: int32 [B, T]; every id must be below the true vocabulary size.

    Returns:
        [B, T, D], whole in D. Every device looks up the ids that it holds; the sum over `tp` has one non-zero
        term, so it is exact.
    """
    if place.mesh.size == 1:
        return table.value.at[tokens].get(mode="clip")
    batch, vocab = place.spread("batch"), place.spread("vocab")

    @partial(
        jax.shard_map,
        mesh=place.mesh,
        in_specs=(partition_spec(table.spec), partition_spec((batch, ()))),
        out_specs=partition_spec((batch, (), ())),
    )
    def local(rows: jax.Array, ids: jax.Array) -> jax.Array:
        rows = table.gather(rows)
        if not vocab:
            return rows.at[ids].get(mode="clip")
        mine = ids - jax.lax.axis_index(vocab) * rows.shape[0]
        found = (mine >= 0) & (mine < rows.shape[0])
        picked = rows.at[jnp.where(found, mine, 0)].get(mode="clip")
        return jax.lax.psum(jnp.where(found[..., None], picked, 0), vocab)

    return local(table.value, tokens)


def logits(place: Placement, hidden: jax.Array, head: jax.Array) -> jax.Array:
    """Logits of every vocabulary id, left cut over the axes of `vocab`.

    Args:
        hidden: [B, T, D].
        head: [V, D] ready for use (the embedding table where it is tied).

    Returns:
        float32 (or wider) [B, T, V padded]; ids past the true vocabulary are −inf.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    out = dense(hidden, head, 1, place.on_cpu, wide)
    out = place.constrain(out, (place.plan.batch_axes(), (), place.plan.rules.mesh_axes("vocab")))
    return mask_padding(out, place.plan.config.vocab_size)


def mask_padding(values: jax.Array, vocab_size: int, first: jax.Array | int = 0) -> jax.Array:
    """−inf for ids at or past `vocab_size`.

    Args:
        values: [..., V local].
        first: id of the first column.
    """
    if isinstance(first, int) and first + values.shape[-1] <= vocab_size:
        return values
    ids = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.where(ids < vocab_size, values, -jnp.inf)
