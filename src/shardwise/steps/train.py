"""One optimizer step: loss and gradients over micro-batches, clipping, AdamW.

The loss is Σ over trained tokens divided once by their number in the whole global batch, so that neither the
mesh nor the micro-batch split changes it. Not here: the loop around it (training/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwise.models.parameters import Params, bind, init_params
from shardwise.partition.constraints import Placement
from shardwise.partition.plan import DATA_AXES, Plan, named_sharding
from shardwise.steps.labels import label_cross_entropy
from shardwise.steps.loss import cross_entropy
from shardwise.steps.optimizer import learning_rate, make_optimizer, state_shardings
from shardwise.steps.workload import Workload


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training carries from step to step."""

    params: Params
    """Master weights, stacked over layers."""
    optimizer: Any
    """optax's state."""
    step: jax.Array
    """int32: optimizer steps done."""


def abstract_state(plan: Plan, mesh: jax.sharding.Mesh, workload: Workload) -> TrainState:
    """Shapes, dtypes and shardings of the training state."""
    dtype = jnp.dtype(workload.param_dtype)
    params = {
        d.path: jax.ShapeDtypeStruct(d.shape, dtype, sharding=plan.sharding(mesh, d.path))
        for d in plan.decisions
    }
    state = jax.eval_shape(make_optimizer(workload.trained_by, plan).init, params)
    shardings = state_shardings(plan, mesh, state)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
    return TrainState(params, state, jax.ShapeDtypeStruct((), jnp.int32, sharding=named_sharding(mesh, ())))


def start_state(plan: Plan, mesh: jax.sharding.Mesh, workload: Workload, params: Params) -> TrainState:
    """The state before the first step; `params` are taken over, not copied."""
    shapes = abstract_state(plan, mesh, workload)
    shardings = jax.tree.map(lambda x: x.sharding, (shapes.optimizer, shapes.step))

    def init(params: Params) -> tuple[Any, jax.Array]:
        return make_optimizer(workload.trained_by, plan).init(params), jnp.zeros((), jnp.int32)

    return TrainState(params, *jax.jit(init, out_shardings=shardings)(params))


def fresh_state(plan: Plan, mesh: jax.sharding.Mesh, workload: Workload, seed: int) -> TrainState:
    """The state of a newly drawn model."""
    return start_state(plan, mesh, workload, init_params(plan, mesh, seed, jnp.dtype(workload.param_dtype)))


def loss_sum(place: Placement, workload: Workload, params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Σ weight · (NLL + z-loss) of one micro-batch, over tokens or, of a classifier, sequences; a scalar."""
    model = bind(place.plan, params, stacked=True)
    hidden = model.hidden(
        place, batch["tokens"], batch["positions"], batch["segment_ids"], workload.remat, workload.kernel
    )
    if place.plan.config.head == "labels":
        logits = model.label_logits(place, hidden)
        return label_cross_entropy(logits, batch["targets"], batch["weights"], workload.z_loss)
    return cross_entropy(
        place, hidden, model.head(place), batch["targets"], batch["weights"], workload.z_loss
    )


def loss_and_gradients(
    place: Placement, workload: Workload, params: Params, batch: dict[str, jax.Array]
) -> tuple[jax.Array, Params, jax.Array]:
    """Mean loss over the trained tokens of the global batch, its gradients, and the number of these tokens.

    Micro-batches are strided (row i goes to micro-batch i mod steps), so that splitting moves no data between
    devices.
    """
    tokens = jnp.sum(batch["weights"])
    scaled = batch | {"weights": batch["weights"] / jnp.maximum(tokens, 1.0)}

    def one(batch: dict[str, jax.Array]) -> tuple[jax.Array, Params]:
        value, gradients = jax.value_and_grad(lambda p: loss_sum(place, workload, p, batch))(params)
        return value, {path: place.constrain(g, place.plan[path].spec) for path, g in gradients.items()}

    steps = workload.grad_accum_steps
    if steps == 1:
        return *one(scaled), tokens

    def add(total: Any, micro: dict[str, jax.Array]) -> tuple[Any, None]:
        micro = {name: place.activation("tokens", x) for name, x in micro.items()}
        value, gradients = one(micro)
        gradients = {path: _apart(place, path, g) for path, g in gradients.items()}
        return jax.tree.map(jnp.add, total, (value, gradients)), None

    micro = {
        name: jnp.moveaxis(x.reshape(x.shape[0] // steps, steps, *x.shape[1:]), 1, 0)
        for name, x in scaled.items()
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    first = (jnp.zeros((), jnp.promote_types(place.compute_dtype, jnp.float32)), zeros)
    (value, gradients), _ = jax.lax.scan(add, first, micro)
    return value, gradients, tokens


def _apart(place: Placement, path: str, gradient: jax.Array) -> jax.Array:
    """A micro-batch's gradient, kept from becoming one with the sum that it is added to.

    The TPU compiler moves a reduction behind the loop where only its sum is used. For all-reduces that is
    right; a reduce-scatter would then have the whole gradient summed up on every device, and for some heads
    the compiler fails at it (libtpu 0.0.42).
    """
    spread = {axis for axes in place.spread_spec(place.plan[path].spec) for axis in axes}
    scattered = bool(spread & set(DATA_AXES))
    return jax.lax.optimization_barrier(gradient) if scattered and not place.on_cpu else gradient


def train_step(
    place: Placement, workload: Workload
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """The function (TrainState, batch) → (TrainState, metrics) to be jitted.

    A batch without a trained token changes nothing but the step number; its `tokens` metric is 0.
    """
    optimizer = make_optimizer(workload.trained_by, place.plan)

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        value, gradients, tokens = loss_and_gradients(place, workload, state.params, batch)
        norm = optax.global_norm(gradients)
        updates, inner = optimizer.update(gradients, state.optimizer, state.params, grad_norm=norm)
        params = optax.apply_updates(state.params, updates)
        some = tokens > 0
        schedule = inner[-1]  # counts every step: the rate applied is the one logged
        params, inner = jax.tree.map(
            lambda new, old: jnp.where(some, new, old), (params, inner), (state.params, state.optimizer)
        )
        inner = (*inner[:-1], schedule)
        number = state.step + 1
        metrics = {
            "loss": value,
            "tokens": tokens,
            "grad_norm": norm,
            "learning_rate": learning_rate(workload.trained_by, number),
        }
        return TrainState(params, inner, number), metrics

    return step
