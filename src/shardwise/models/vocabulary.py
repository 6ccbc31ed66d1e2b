"""A [V, D] matrix as it lies on the mesh, and the embedding look-up, which works on its parts.

Not here: the output head (head.py), and how such a matrix is cut, which its decision in the Plan says.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardwise.partition.constraints import Placement
from shardwise.partition.plan import Plan, partition_spec
from shardwise.partition.rules import Spec


def vocab_cut(plan: Plan, path: str) -> tuple[tuple[str, ...], tuple[str, ...], int | None]:
    """Mesh axes (of more than one device) that cut V and D of a matrix at use, and the dim gathered inside.

    Axes that split the batch cannot cut the matrix at use too and are gathered; so is D where V is cut as
    well. None as the dim: what is stored otherwise is laid out anew before the shard_map.
    """
    stored = tuple(tuple(a for a in axes if plan.mesh.sizes[a] > 1) for axes in plan[path].spec)
    vocab, contract = (tuple(a for a in axes if a not in (*plan.batch_axes(), "fsdp")) for axes in stored)
    contract = () if vocab else contract
    for dim, with_fsdp in enumerate((((*vocab, "fsdp"), contract), (vocab, (*contract, "fsdp")))):
        if stored == with_fsdp and "fsdp" in plan.batch_axes():
            return vocab, contract, dim
    return vocab, contract, None


@dataclass(frozen=True)
class VocabMatrix:
    """An embedding table or head [V, D] in the compute dtype, cut over V, over D or not at all.

    Both dims may be padded at the end with zeros, whether for `tp` or for `fsdp`.
    """

    value: jax.Array
    vocab_axes: tuple[str, ...]
    """Mesh axes of more than one device that cut V at use."""
    contract_axes: tuple[str, ...]
    """The same for D; never both."""
    gathered_dim: int | None = None
    """Dim that is also cut by `fsdp`, as it is stored: it is then gathered inside the shard_map, whose
    gradient is a true reduce-scatter."""

    @classmethod
    def of(cls, place: Placement, path: str, value: jax.Array) -> VocabMatrix:
        """The parameter at `path`, which rules or an override may have cut in any way; see vocab_cut."""
        vocab, contract, gathered = vocab_cut(place.plan, path)
        if gathered is not None:
            return cls(place.stored(path, value), vocab, contract, gathered)
        return cls(place.constrain(place.weight(path, value), (vocab, contract)), vocab, contract)

    @property
    def spec(self) -> Spec:
        """Mesh axes that cut `value`'s dims."""
        cut = (self.vocab_axes, self.contract_axes)
        return tuple((*axes, "fsdp") if dim == self.gathered_dim else axes for dim, axes in enumerate(cut))

    def gather(self, local: jax.Array) -> jax.Array:
        """Inside a shard_map: this device's part, whole over `fsdp`."""
        if self.gathered_dim is None:
            return local
        return jax.lax.all_gather(local, "fsdp", axis=self.gathered_dim, tiled=True)

    def scatter(self, gradient: jax.Array, batch: tuple[str, ...]) -> jax.Array:
        """Inside a shard_map: a gradient of what `gather` gave, summed over the axes `batch`, as stored."""
        if self.gathered_dim is not None:
            dim = self.gathered_dim
            gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=dim, tiled=True)
            batch = tuple(axis for axis in batch if axis != "fsdp")
        return jax.lax.psum(gradient, batch)


def look_up(place: Placement, table: VocabMatrix, tokens: jax.Array, width: int) -> jax.Array:
    """Rows of an embedding table, be it of tokens or of positions.

    Args:
        table: [V, D], possibly padded.
        tokens: int32 [B, T]; every id must be below the true number of rows.
        width: true D.

    Returns:
        [B, T, D], whole in D and without its padding. With V cut, every device looks up the ids that it
        holds; the sum over `tp` has one non-zero term, so it is exact. With D cut, every device takes its
        part of each row.
    """
    if place.mesh.size == 1:
        return table.value.at[tokens].get(mode="clip")[..., :width]
    batch, vocab = place.spread("batch"), table.vocab_axes

    def local(rows: jax.Array, ids: jax.Array) -> jax.Array:
        rows = table.gather(rows)
        if not vocab:
            return rows.at[ids].get(mode="clip")
        mine = ids - jax.lax.axis_index(vocab) * rows.shape[0]
        found = (mine >= 0) & (mine < rows.shape[0])
        picked = rows.at[jnp.where(found, mine, 0)].get(mode="clip")
        return jax.lax.psum(jnp.where(found[..., None], picked, 0), vocab)

    found = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(partition_spec(table.spec), partition_spec((batch, ()))),
        out_specs=partition_spec((batch, (), table.contract_axes)),
    )(table.value, tokens)
    # Gathered by a constraint, not inside: the gradient of that only takes a slice, and moves nothing.
    return place.constrain(found, (batch, (), ()))[..., :width]
