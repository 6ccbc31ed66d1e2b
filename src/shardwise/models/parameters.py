"""Between the model and plain arrays: what it declares, its parameters as a flat dict, a fresh draw of them.

A model's parameters travel as `{path: array}`, the pytree that steps, optimizers and checkpoints share. With
stacked layers a path is `layers/attn/q_proj/kernel`; with a list of layers, `layers/7/attn/q_proj/kernel`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise.models.config import ModelConfig
from shardwise.models.transformer import Transformer
from shardwise.partition.decide import make_plan
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import Padding
from shardwise.partition.plan import Decision, ParamSpec, Plan, named_sharding
from shardwise.partition.rules import HeadLayout, Override, Rules

Params = dict[str, jax.Array]


@lru_cache(maxsize=64)
def declared_params(config: ModelConfig) -> tuple[ParamSpec, ...]:
    """Every parameter of the model, from shapes alone."""
    _, flat = _template(config, Padding.none(config), True)
    return tuple(
        ParamSpec(
            "/".join(path),
            tuple(v.get_metadata("out_sharding")),
            v.get_metadata("init"),
            v.get_metadata("use"),
        )
        for path, v in flat
    )


def plan_model(
    config: ModelConfig,
    mesh: MeshSpec,
    rules: Rules | None = None,
    overrides: Iterable[Override] = (),
    head_layout: HeadLayout | None = None,
) -> Plan:
    """The Plan of a model on a resolved mesh; see make_plan."""
    return make_plan(config, declared_params(config), mesh, rules, overrides, head_layout)


def bind(plan: Plan, params: Mapping[str, jax.Array], stacked: bool) -> Transformer:
    """The model with these arrays (or tracers) as its parameters; cheap, for use inside a traced step."""
    graph, flat = _template(plan.config, plan.padding, stacked)
    state = [(path, variable.replace(params["/".join(map(str, path))])) for path, variable in flat]
    return nnx.merge(graph, nnx.from_flat_state(state))


def layer_paths(plan: Plan, path: str) -> tuple[str, ...]:
    """The unstacked paths of a decision: one for each layer below `layers/`, else the path itself."""
    if not plan[path].stacked:
        return (path,)
    rest = path.removeprefix("layers/")
    return tuple(f"layers/{layer}/{rest}" for layer in range(plan.config.num_layers))


def unstack(plan: Plan, mesh: jax.sharding.Mesh, params: Params) -> Params:
    """Stacked parameters as one array per layer, as decoding wants them; dtypes and cuts stay.

    Parameters that come one per layer already are handed back as they are.
    """
    if not any(path in plan and plan[path].stacked for path in params):
        return params
    out: Params = {}
    for path, value in params.items():
        decision = plan[path]
        if not decision.stacked:
            out[path] = value
            continue
        sharding = named_sharding(mesh, decision.spec[1:])
        split = jax.jit(lambda x: tuple(x), out_shardings=sharding)
        out.update(zip(layer_paths(plan, path), split(value), strict=True))
    return out


def init_params(
    plan: Plan, mesh: jax.sharding.Mesh, seed: int, dtype: jnp.dtype, only: Collection[str] | None = None
) -> Params:
    """Freshly drawn stacked parameters, the same on every mesh.

    Matrices and embeddings are normal with the config's `initializer_range`, norm scales one, biases zero.
    The true shape is drawn and then padded; each parameter's key comes from the seed and its path.

    Args:
        only: paths to draw; default all.
    """
    key = jax.random.key(seed)
    return {
        d.path: _init_one(plan, mesh, d, key, jnp.dtype(dtype))
        for d in plan.decisions
        if only is None or d.path in only
    }


def _init_one(
    plan: Plan, mesh: jax.sharding.Mesh, d: Decision, key: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    sharding = named_sharding(mesh, d.spec)
    if d.init == "normal":
        draw = _drawer(d.axes, d.shape, plan.padding, sharding, plan.config.initializer_range, dtype)
        return draw(jax.random.fold_in(key, zlib.crc32(d.path.encode())))
    value = {"ones": 1, "zeros": 0}[d.init]
    true = np.broadcast_to(np.asarray(value, dtype), d.true_shape)
    padded = plan.padding.pad(true, d.axes, d.shape)
    return jax.make_array_from_callback(d.shape, sharding, lambda index: padded[index])


@lru_cache(maxsize=64)
def _drawer(
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    padding: Padding,
    sharding: jax.sharding.NamedSharding,
    scale: float,
    dtype: jnp.dtype,
) -> jax.stages.Wrapped:
    """One compiled draw for all parameters of the same shape and cut."""

    def draw(key: jax.Array) -> jax.Array:
        value = jax.random.normal(key, padding.true_shape(axes), jnp.float32) * scale
        return padding.pad(value.astype(dtype), axes, shape)

    # LLVM spends seconds on each such draw at its default level 2, though it runs once; level 1 takes a third
    # of that and runs hardly slower.
    return jax.jit(draw, out_shardings=sharding, compiler_options={"xla_backend_optimization_level": 1})


@lru_cache(maxsize=64)
def _template(
    config: ModelConfig, padding: Padding, stacked: bool
) -> tuple[nnx.GraphDef[Transformer], nnx.FlatState]:
    model = nnx.eval_shape(lambda: Transformer(config, padding, stacked))
    graph, state = nnx.split(model)
    return graph, nnx.to_flat_state(state)
