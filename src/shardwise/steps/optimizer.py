"""AdamW with warm-up, cosine decay and clipping, built from optax; and where its state lies.

Not here: the update inside a step (train.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwise.errors import ConfigError
from shardwise.partition.plan import Plan, named_sharding

# Steps are counted in int32.
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101) and its schedule."""

    learning_rate: float = 2e-5
    """Peak."""
    warmup_steps: int = 0
    """Steps of linear warm-up; step number `warmup_steps` is the first at the peak."""
    total_steps: int = 1
    """Steps until the cosine reaches its end."""
    lr_end_ratio: float = 0.0
    """End of the cosine, as a part of the peak."""
    weight_decay: float = 0.0
    """On matrices and embeddings; never on norm scales and biases."""
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        if self.total_steps > _MOST_STEPS:
            raise ConfigError(f"{self.total_steps:,} steps are too many; at most {_MOST_STEPS:,} are counted")


def learning_rate(config: OptimizerConfig, step: jax.Array | int) -> jax.Array:
    """Learning rate of a step.

    Args:
        step: number of the step, from 1.

    Returns:
        float32: peak · step / warmup while step ≤ warmup, then peak · (end + (1 − end) · ½(1 + cos πx)), with
        x rising from 0 at the first step after warm-up towards 1 at the step after the last.
    """
    step = jnp.asarray(step, jnp.float32)
    rise = step / max(config.warmup_steps, 1)
    x = (step - 1 - config.warmup_steps) / max(config.total_steps - config.warmup_steps, 1)
    fall = config.lr_end_ratio + (1 - config.lr_end_ratio) * 0.5 * (
        1 + jnp.cos(math.pi * jnp.clip(x, 0.0, 1.0))
    )
    return config.learning_rate * jnp.where(step <= config.warmup_steps, rise, fall)


def make_optimizer(config: OptimizerConfig, plan: Plan) -> optax.GradientTransformationExtraArgs:
    """The update rule for the flat dict of this Plan's parameters.

    Its `update` takes one argument more, `grad_norm`: the gradients' global norm, which the caller logs too.
    Exact on padded parameters: padding has zero gradients, so it adds nothing to the norm and stays zero.
    """
    decays = {d.path: d.init == "normal" for d in plan.decisions}
    steps = [
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.adam_eps),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale_by_learning_rate(lambda count: learning_rate(config, count + 1)),
    ]
    if config.max_grad_norm:
        steps.insert(0, _clip(config.max_grad_norm))
    return optax.with_extra_args_support(optax.chain(*steps))


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm by a norm that is known already: on a mesh each is a sum over all devices."""

    def update(gradients: Any, state: Any, params: Any = None, *, grad_norm: jax.Array, **_: Any) -> Any:
        def clipped(g: jax.Array) -> jax.Array:
            return jnp.where(grad_norm < most, g, (g / grad_norm.astype(g.dtype)) * most)

        return jax.tree.map(clipped, gradients), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def state_shardings(plan: Plan, mesh: jax.sharding.Mesh, state: Any) -> Any:
    """For every array of an optimizer state, the sharding of the parameter that it belongs to.

    Args:
        state: pytree of arrays or shapes; leaves under a parameter's path follow that parameter, counters are
            on every device.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> jax.sharding.NamedSharding:
        owner = next((k.key for k in path if isinstance(k, jax.tree_util.DictKey) and k.key in plan), None)
        if owner is not None and leaf.shape == plan[owner].shape:
            return plan.sharding(mesh, owner)
        assert leaf.ndim == 0, f"optimizer state {jax.tree_util.keystr(path)} follows no parameter"
        return named_sharding(mesh, ())

    return jax.tree_util.tree_map_with_path(place, state)
