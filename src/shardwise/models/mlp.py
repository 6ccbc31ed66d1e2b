"""Feed-forward layers: gated, and plain.

Not here: experts (moe.py).
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx

from shardwise.models.config import ModelConfig
from shardwise.models.linear import Declare, Linear, project
from shardwise.partition.constraints import Placement

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}
"""By the names of ModelConfig.activation."""

_WIDE, _NARROW = ("residual", "mlp_hidden"), ("mlp_hidden", "residual")


class GatedMLP(nnx.Module):
    """Gated feed-forward layer (Shazeer 2020, arXiv:2002.05202): down(act(gate(x)) · up(x))."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.activation, bias = config.activation, config.mlp_bias
        self.gate_proj = Linear(declare.below("gate_proj"), ("embed",), ("mlp",), bias, *_WIDE)
        self.up_proj = Linear(declare.below("up_proj"), ("embed",), ("mlp",), bias, *_WIDE)
        self.down_proj = Linear(declare.below("down_proj"), ("mlp",), ("embed",), bias, *_NARROW)

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        gate, up = project(place, x, (self.gate_proj, None), (self.up_proj, None))
        return self.down_proj(place, _gated(self.activation, gate, up))


class PlainMLP(nnx.Module):
    """Feed-forward layer of two projections (Vaswani et al. 2017, §3.3): down(act(up(x)))."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.activation, bias = config.activation, config.mlp_bias
        self.up_proj = Linear(declare.below("up_proj"), ("embed",), ("mlp",), bias, *_WIDE)
        self.down_proj = Linear(declare.below("down_proj"), ("mlp",), ("embed",), bias, *_NARROW)

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        return self.down_proj(place, activated(self.activation, self.up_proj(place, x)))


@partial(jax.checkpoint, static_argnums=0)
def _gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) · up; the backward pass keeps only the two, not what lies between."""
    return ACTIVATIONS[activation](gate) * up


@partial(jax.checkpoint, static_argnums=0)
def activated(activation: str, x: jax.Array) -> jax.Array:
    """act(x); the backward pass keeps x alone."""
    return ACTIVATIONS[activation](x)
