"""Experts: feed-forward layers of which each token takes some, none dropped.

A device computes the tokens that it has: it sorts them by expert and multiplies each expert's rows with that
expert's matrices (`ragged_dot`). Experts may be cut over mesh axes (each device has whole ones), or their
hidden dim (each device has a part of all); either way parts are summed once. Everything runs under a
shard_map with a backward pass of its own, so that it is known what moves. Not here: layers without experts
(mlp.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardwise.models.config import ModelConfig
from shardwise.models.linear import PRODUCT, Declare, Linear
from shardwise.models.mlp import ACTIVATIONS
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import DATA_AXES, Plan, Use, partition_spec
from shardwise.partition.rules import Spec

NAMES = ("gate_proj", "up_proj", "down_proj")
"""Matrices of an expert."""


class MoE(nnx.Module):
    """Σ over a token's best experts of weight · expert(x), each a gated feed-forward layer (Jiang et al.
    2024, arXiv:2401.04088). The weights are the softmax over all experts, scaled to sum to one over those
    taken."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.config = config
        self.router = Linear(
            declare.below("router"), ("embed",), ("experts",), False, "residual", "router_logits"
        )
        self.path = declare.below("experts").prefix
        into, out = Use("expert", "residual", "mlp_hidden", 1), Use("expert", "mlp_hidden", "residual", 1)
        self.experts = nnx.Dict(
            {
                name: nnx.Dict(
                    kernel=declare.below("experts").param(
                        "experts", *(("embed", "mlp") if name == "down_proj" else ("mlp", "embed")),
                        use=out if name == "down_proj" else into,
                    )
                )
                for name in NAMES
            }
        )  # fmt: skip

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        """[B, T, D] → [B, T, D]."""
        logits = self.router(place, x)
        wide = jnp.promote_types(logits.dtype, jnp.float32)
        shares, chosen = _best(jax.nn.softmax(logits.astype(wide), axis=-1), self.config.experts_per_token)
        shares = (shares / jnp.sum(shares, axis=-1, keepdims=True)).astype(x.dtype)
        layout = ExpertLayout.of(place.plan, self.path)
        kernels = tuple(
            place.stored(f"{self.path}{name}/kernel", self.experts[name]["kernel"][...]) for name in NAMES
        )
        x = place.constrain(place.activation("residual", x), layout.rows)
        call = _Call(place, layout, self.config.activation)
        return place.activation("residual", _experts(call, x, shares, chosen, kernels))


def _best(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The greatest values [..., count] and their places, of equals the first; `top_k`, which the partitioner
    cannot cut: it would gather the batch."""
    left, places, found = values, [], []
    for _ in range(count):
        place = jnp.argmax(left, axis=-1)
        here = place[..., None] == jnp.arange(values.shape[-1])
        places.append(place)
        found.append(jnp.sum(jnp.where(here, values, 0), axis=-1))
        left = jnp.where(here, -jnp.inf, left)
    return jnp.stack(found, axis=-1), jnp.stack(places, axis=-1)


@dataclass(frozen=True)
class ExpertLayout:
    """How the experts of a layer lie on the mesh."""

    stored: tuple[Spec, Spec, Spec]
    """Of the three kernels of one layer, each [X, outputs, inputs]."""
    experts: tuple[str, ...]
    """Axes of more than one device over which whole experts are dealt out."""
    hidden: tuple[str, ...]
    """Axes of more than one device that cut every expert's hidden dim."""
    rows: Spec
    """Of tokens [B, T, D]."""

    @classmethod
    def of(cls, plan: Plan, path: str) -> ExpertLayout:
        """That of the experts below `path`."""
        decisions = [plan[f"{path}{name}/kernel"] for name in NAMES]
        stored = tuple(d.spec[d.stacked :] for d in decisions)
        used = [d.at_use()[d.stacked :] for d in decisions]

        def spread(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if plan.mesh.sizes[axis] > 1)

        rows = tuple(
            tuple(a for a in axes if a not in {a for spec in used for cut in spec for a in cut})
            for axes in plan.activation("residual")[:2]
        )
        return cls(
            (stored[0], stored[1], stored[2]), spread(used[0][0]), spread(used[0][1]), (*rows, ()),
        )  # fmt: skip

    @property
    def parts(self) -> tuple[str, ...]:
        """Axes over which each device makes a part of every token's sum."""
        return (*self.experts, *self.hidden)


@dataclass(frozen=True)
class _Call:
    """What stays the same over one layer's call."""

    place: Placement
    layout: ExpertLayout
    activation: str

    def gather(self, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Inside a shard_map: this device's kernels, whole over the axes that split the batch."""
        out = []
        for kernel, spec in zip(kernels, self.layout.stored, strict=True):
            for dim, axes in enumerate(spec):
                data = self._data(axes)
                kernel = jax.lax.all_gather(kernel, data, axis=dim, tiled=True) if data else kernel
            out.append(kernel)
        return tuple(out)

    def scatter(self, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Inside a shard_map: gradients summed over all rows, as the kernels are stored."""
        batch = self._data(self.place.plan.batch_axes())
        out = []
        for gradient, spec in zip(gradients, self.layout.stored, strict=True):
            scattered: tuple[str, ...] = ()
            for dim, axes in enumerate(spec):
                data = self._data(axes)
                if data:
                    gradient = jax.lax.psum_scatter(gradient, data, scatter_dimension=dim, tiled=True)
                    scattered += data
            rest = tuple(axis for axis in batch if axis not in scattered)
            out.append(jax.lax.psum(gradient, rest) if rest else gradient)
        return tuple(out)

    def total(self, part: jax.Array) -> jax.Array:
        """Inside a shard_map: parts of a sum added."""
        return jax.lax.psum(part, self.layout.parts) if self.layout.parts else part

    def _data(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(a for a in axes if a in DATA_AXES and self.place.mesh.shape[a] > 1)

    def mapped(self, body: Any, ins: tuple[Any, ...], outs: Any) -> Any:
        """`body` on each device's part."""
        return jax.shard_map(body, mesh=self.place.mesh, in_specs=ins, out_specs=outs, check_vma=False)

    @property
    def tokens(self) -> jax.sharding.PartitionSpec:
        """Of arrays [B, T, …] whose other dims are whole."""
        return partition_spec(self.layout.rows)

    @property
    def weights(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """Of the three kernels."""
        return tuple(partition_spec(spec) for spec in self.layout.stored)

    @property
    def products(self) -> jax.sharding.PartitionSpec:
        """Of the rows of all devices [rows, F]."""
        rows = tuple(axis for axes in self.layout.rows[:2] for axis in axes)
        return partition_spec(((*rows, *self.layout.experts), self.layout.hidden))


@dataclass(frozen=True)
class _Sorted:
    """A device's tokens in the order of the experts that they take: one row for each pair."""

    order: jax.Array
    """int32 [n·k]: the pair that each row is."""
    sizes: jax.Array
    """int32 [x]: rows of each of this device's experts; those of others come behind them."""
    own: jax.Array
    """bool [n·k, 1]: whether the row's expert is this device's."""
    taken: int
    """k."""

    @classmethod
    def of(cls, chosen: jax.Array, experts: tuple[str, ...], held: int) -> _Sorted:
        """From the experts [b, t, k] that tokens take; this device has `held` of them."""
        first = jax.lax.axis_index(experts) * held if experts else 0
        mine = chosen.reshape(-1) - first
        mine = jnp.where((mine >= 0) & (mine < held), mine, held)
        order = jnp.argsort(mine, stable=True)
        sizes = jnp.bincount(mine, length=held + 1)[:held].astype(jnp.int32)
        own = jnp.arange(order.size) < jnp.sum(sizes)
        return cls(order, sizes, own[:, None], chosen.shape[-1])

    def rows(self, tokens: jax.Array) -> jax.Array:
        """[b, t, d] → [n·k, d]."""
        return tokens.reshape(-1, tokens.shape[-1])[self.order // self.taken]

    def pairs(self, values: jax.Array) -> jax.Array:
        """[b, t, k] → [n·k, 1]."""
        return values.reshape(-1, 1)[self.order]

    def back(self, rows: jax.Array) -> jax.Array:
        """[n·k, d] → [n, k, d], zero where the expert is another device's."""
        rows = jnp.where(self.own, rows, 0)
        return rows[jnp.argsort(self.order)].reshape(-1, self.taken, rows.shape[-1])

    def product(self, rows: jax.Array, kernel: jax.Array) -> jax.Array:
        """Each row with its expert's kernel: [n·k, inputs], [x, outputs, inputs] → [n·k, outputs]."""
        wide = jnp.promote_types(rows.dtype, jnp.float32)
        kernel = jnp.swapaxes(kernel, 1, 2)
        return jax.lax.ragged_dot(rows, kernel, self.sizes, preferred_element_type=wide).astype(rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    call: _Call, x: jax.Array, shares: jax.Array, chosen: jax.Array, kernels: tuple[jax.Array, ...]
) -> jax.Array:
    return _forward(call, x, shares, chosen, kernels)[0]


def _forward(
    call: _Call, x: jax.Array, shares: jax.Array, chosen: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    def local(
        x: jax.Array, shares: jax.Array, chosen: jax.Array, *stored: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        into_gate, into_up, out = call.gather(stored)
        by = _Sorted.of(chosen, call.layout.experts, into_gate.shape[0])
        rows = by.rows(x)
        gate, up = by.product(rows, into_gate), by.product(rows, into_up)
        hidden = _weighted(call.activation, gate, up, by.pairs(shares))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        y = jnp.sum(by.back(by.product(hidden, out).astype(wide)), axis=1)
        return call.total(y).astype(x.dtype).reshape(x.shape), gate, up

    y, gate, up = call.mapped(
        local,
        (call.tokens, call.tokens, call.tokens, *call.weights),
        (call.tokens, call.products, call.products),
    )(x, shares, chosen, *kernels)
    gate, up = checkpoint_name(gate, PRODUCT), checkpoint_name(up, PRODUCT)
    return y, (x, shares, chosen, kernels, gate, up)


def _backward(call: _Call, saved: tuple[Any, ...], dy: jax.Array) -> tuple[Any, ...]:
    x, shares, chosen, kernels, gate, up = saved

    def local(
        x: jax.Array, shares: jax.Array, chosen: jax.Array, gate: jax.Array, up: jax.Array, dy: jax.Array,
        *stored: jax.Array,
    ) -> tuple[Any, ...]:  # fmt: skip
        into_gate, into_up, out = call.gather(stored)
        by = _Sorted.of(chosen, call.layout.experts, into_gate.shape[0])
        wide = jnp.promote_types(x.dtype, jnp.float32)
        hidden, weighted = jax.vjp(partial(_weighted, call.activation), gate, up, by.pairs(shares))
        # the forward products in these are not used, and so not computed
        d_hidden, d_out = jax.vjp(by.product, hidden, out)[1](jnp.where(by.own, by.rows(dy), 0))
        d_gate, d_up, d_shares = weighted(d_hidden)
        from_gate, d_into_gate = jax.vjp(by.product, by.rows(x), into_gate)[1](d_gate)
        from_up, d_into_up = jax.vjp(by.product, by.rows(x), into_up)[1](d_up)
        dx = jnp.sum(by.back(from_gate.astype(wide) + from_up.astype(wide)), axis=1)
        dx = call.total(dx).astype(x.dtype).reshape(x.shape)
        d_shares = call.total(by.back(d_shares.astype(wide))[..., 0]).astype(shares.dtype)
        return dx, d_shares.reshape(shares.shape), *call.scatter((d_into_gate, d_into_up, d_out))

    tokens = (call.tokens,) * 3
    dx, d_shares, *d_kernels = call.mapped(
        local,
        (*tokens, call.products, call.products, call.tokens, *call.weights),
        (call.tokens, call.tokens, *call.weights),
    )(x, shares, chosen, gate, up, dy, *kernels)
    return dx, d_shares, None, tuple(d_kernels)


_experts.defvjp(_forward, _backward)


@partial(jax.checkpoint, static_argnums=0)
def _weighted(activation: str, gate: jax.Array, up: jax.Array, shares: jax.Array) -> jax.Array:
    """act(gate) · up · the token's share of this expert; the last product is linear in it."""
    return ACTIVATIONS[activation](gate) * up * shares
