"""Normalisations of the residual stream and of heads, computed in float32 at least.

Not here: where in a layer they stand (blocks.py).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.models.config import ModelConfig
from shardwise.models.linear import Declare
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import Use


class Norm(nnx.Module):
    """Over the last dim: x / √(mean(x²) + ε) · scale (`rms`), or (x − mean) / √(var + ε) · scale + bias
    (`layer`); see ModelConfig.norm."""

    def __init__(
        self, declare: Declare, config: ModelConfig, axis: str = "vector", gives: str = "residual",
        kind: Literal["rms", "layer"] | None = None,
    ):  # fmt: skip
        """Over the logical axis `axis` of the activation `gives`; `kind` is the config's by default."""
        self.path, self.eps = declare.prefix, config.norm_eps
        self.kind = kind or config.norm
        self.plus_one = config.norm_plus_one and self.kind == "rms"
        init = "zeros" if self.plus_one else "ones"
        self.scale = declare.param(axis, init=init, use=Use("scale", gives=gives))
        biased = self.kind == "layer"
        self.bias = declare.param(axis, init="zeros", use=Use("bias", gives=gives)) if biased else None

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        """`x` [..., N] normalised, in its dtype."""
        scale = place.weight(self.path + "scale", self.scale[...])
        if self.plus_one:
            # In float32: near one the compute dtype has too few bits for what is added to it.
            wide = _wide(x.dtype)
            return (_normed(x, self.eps, self.kind, wide) * (1 + scale.astype(wide))).astype(x.dtype)
        y = _normed(x, self.eps, self.kind, x.dtype) * scale
        return y if self.bias is None else y + place.weight(self.path + "bias", self.bias[...])


@partial(jax.checkpoint, static_argnums=(1, 2, 3))
def _normed(x: jax.Array, eps: float, kind: str, dtype: jnp.dtype) -> jax.Array:
    """The norm without its parameters; the backward pass keeps x alone."""
    wide = x.astype(_wide(x.dtype))
    if kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(dtype)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
