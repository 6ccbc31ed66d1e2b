"""The output head [V, D], cut over V, over D or not at all, so that callers need not know which.

Cut over V, a device has the logits of its own ids, and choices and sums are made of a few numbers a token.
Cut over D, it has a part of every logit, and the parts are summed. Whole, it has all. `HeadShard` and
`Columns` live inside a shard_map. Not here: the loss, sampling and scores (steps/).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardwise.models.dense import dense
from shardwise.models.vocabulary import VocabMatrix
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import partition_spec

HeadValues = tuple[jax.Array, ...]
"""The arrays of a head: weight, and bias where there is one."""


@dataclass(frozen=True)
class Head:
    """Weight and bias of the output head, in the compute dtype."""

    weight: VocabMatrix
    bias: jax.Array | None = None
    """[V], as long as the weight and cut like it."""

    @classmethod
    def of(
        cls,
        place: Placement,
        path: str,
        value: jax.Array,
        bias_path: str | None = None,
        bias: jax.Array | None = None,
    ) -> Head:
        """The parameters at these paths, which rules or overrides may have cut in any way."""
        weight = VocabMatrix.of(place, path, value)
        if bias_path is None or bias is None:
            return cls(weight)
        bias = place.weight(bias_path, bias)
        rows = weight.value.shape[0]
        if bias.shape != (rows,):  # an override may cut one of the two so that only that one is padded
            bias = bias[: place.plan.config.vocab_size]
            bias = jnp.pad(bias, (0, rows - bias.shape[0]))
        return cls(weight, place.constrain(bias, (weight.vocab_axes,)))

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes that cut the logits' last dim."""
        return self.weight.vocab_axes

    @property
    def values(self) -> HeadValues:
        """What a shard_map takes of the head."""
        return (self.weight.value,) if self.bias is None else (self.weight.value, self.bias)

    @property
    def specs(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """How `values` are cut."""
        specs = (partition_spec(self.weight.spec), partition_spec((self.vocab_axes,)))
        return specs[: len(self.values)]

    def hidden_spec(self, place: Placement) -> jax.sharding.PartitionSpec:
        """How a shard_map takes hidden states [B, T, D]: cut over D just as the weight is."""
        return partition_spec((place.spread("batch"), (), self.weight.contract_axes))

    def pad_hidden(self, place: Placement, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, D] with zeros where the weight's D is padded.

        They are held whole in D before: the layers below must not take over the head's cut, nor the final
        norm the gradient's.
        """
        hidden = place.constrain(hidden, (place.plan.batch_axes(), (), ()))
        missing = self.weight.value.shape[1] - hidden.shape[-1]
        return jnp.pad(hidden, [(0, 0), (0, 0), (0, missing)]) if missing else hidden


class HeadShard:
    """Inside a shard_map: one device's part of a head."""

    def __init__(self, place: Placement, head: Head, values: HeadValues):
        self.weight = head.weight.gather(values[0])
        """[v, d]: this device's ids and features."""
        self.bias = values[1] if len(values) > 1 else None
        self.columns = Columns(head.vocab_axes, self.weight.shape[0])
        self._head, self._on_cpu = head, place.on_cpu
        self._vocab_size, self._softcap = place.plan.config.vocab_size, place.plan.config.logit_softcap

    def slope(self, logits: jax.Array) -> jax.Array | None:
        """Derivative of each logit in what the soft cap was applied to; None where there is no cap.

        Source: d/dz c·tanh(z/c) = 1 − tanh²(z/c).
        """
        if self._softcap is None:
            return None
        return jnp.where(jnp.isfinite(logits), 1 - jnp.square(logits / self._softcap), 0)

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits of this device's ids, complete, those of padded ids −inf.

        Args:
            x: [b, t, d].

        Returns:
            float32 (or wider) [b, t, v].
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        out = dense(x, self.weight, 1, self._on_cpu, wide)
        if self._head.weight.contract_axes:
            out = jax.lax.psum(out, self._head.weight.contract_axes)
        if self.bias is not None:
            out = out + self.bias
        if self._softcap is not None:
            out = self._softcap * jnp.tanh(out / self._softcap)
        if self._head.weight.value.shape[0] > self._vocab_size:
            out = jnp.where(self.columns.ids < self._vocab_size, out, -jnp.inf)
        return out


class Columns:
    """Reductions over the vocabulary, of which this device holds `width` ids from `first` on."""

    def __init__(self, axes: tuple[str, ...], width: int):
        self.axes, self.width = axes, width
        self.first = jax.lax.axis_index(axes) * width if axes else 0

    @property
    def ids(self) -> jax.Array:
        """int32 [v]. Made where it is used: kept, it would be carried through loops."""
        return self.first + jnp.arange(self.width, dtype=jnp.int32)

    def max(self, values: jax.Array) -> jax.Array:
        """[…, v] → […]."""
        best = jnp.max(values, axis=-1)
        return jax.lax.pmax(best, self.axes) if self.axes else best

    def sum(self, values: jax.Array) -> jax.Array:
        """[…, v] → […]; counts where values are bool."""
        kind = jnp.int32 if values.dtype == jnp.bool_ else values.dtype
        return self._total(jnp.sum(values, axis=-1, dtype=kind))

    def argmax(self, values: jax.Array) -> jax.Array:
        """The lowest id of the greatest value: […, v] → int32 […]."""
        best = self.max(values)
        lowest = jnp.min(jnp.where(values == best[..., None], self.ids, jnp.iinfo(jnp.int32).max), axis=-1)
        return jax.lax.pmin(lowest, self.axes) if self.axes else lowest

    def pick(self, values: jax.Array, ids: jax.Array) -> jax.Array:
        """The values at `ids` […], from whichever device holds them: […, v] → […]."""
        mine = ids - self.first
        found = (mine >= 0) & (mine < values.shape[-1])
        picked = jnp.take_along_axis(values, jnp.where(found, mine, 0)[..., None], axis=-1)[..., 0]
        return self._total(jnp.where(found, picked, 0))

    def log_sum_exp(self, values: jax.Array, best: jax.Array) -> tuple[jax.Array, jax.Array]:
        """log Σ exp over all ids […], and this device's probabilities […, v]; `best` is max(values)."""
        powers = jnp.exp(values - best[..., None])
        total = self.sum(powers)
        return best + jnp.log(total), powers / total[..., None]

    def top(self, values: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """The n greatest values, falling, ties by rising id: […, v] → […, n] and int32 ids […, n].

        Every device hands in its own n at most; no more is exchanged.
        """
        found, at = jax.lax.top_k(values, min(n, values.shape[-1]))
        ids = self.ids[at]
        if not self.axes:
            return found, ids
        last = values.ndim - 1
        found, ids = (jax.lax.all_gather(x, self.axes, axis=last, tiled=True) for x in (found, ids))
        # Candidates lie in the devices' order, so among equals the lower id stands first, and top_k keeps it.
        found, at = jax.lax.top_k(found, n)
        return found, jnp.take_along_axis(ids, at, axis=-1)

    def _total(self, value: jax.Array) -> jax.Array:
        return jax.lax.psum(value, self.axes) if self.axes else value


def head_logits(place: Placement, head: Head, hidden: jax.Array) -> jax.Array:
    """Logits of every id of the (padded) vocabulary.

    Args:
        hidden: [B, T, D].

    Returns:
        float32 (or wider) [B, T, V padded], cut over `head.vocab_axes`; padded ids are −inf.
    """

    def local(x: jax.Array, *values: jax.Array) -> jax.Array:
        return HeadShard(place, head, values).logits(x)

    hidden = head.pad_hidden(place, hidden)
    if place.mesh.size == 1:
        return local(hidden, *head.values)
    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(head.hidden_spec(place), *head.specs),
        out_specs=partition_spec((place.spread("batch"), (), head.vocab_axes)),
        check_vma=False,
    )(hidden, *head.values)
