"""build_step: the one place where a computation over a Plan becomes a compiled step.

Training, evaluation, generation, benchmarks and (later) explain, audit and serving lower this same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device

from shardwise.models.cache import KVCache, cache_shape
from shardwise.models.head import head_logits
from shardwise.models.parameters import Params, bind, layer_paths
from shardwise.models.transformer import Transformer
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import build_mesh
from shardwise.partition.plan import Plan, named_sharding
from shardwise.steps import sampling, train
from shardwise.steps.labels import label_scores
from shardwise.steps.score import token_scores
from shardwise.steps.workload import Workload


@dataclass(frozen=True)
class Step:
    """A step bound to its mesh: call it with arrays, or lower it on shapes alone."""

    plan: Plan
    workload: Workload
    mesh: jax.sharding.Mesh
    fn: jax.stages.Wrapped
    """The jitted function; its first argument (train) or its cache (prefill, decode) is donated."""
    abstract_args: tuple[Any, ...]
    """Shapes, dtypes and shardings of the arguments."""

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def lower(self) -> jax.stages.Lowered:
        """Lower on the abstract arguments; no array is made, and the mesh's devices need not be there."""
        # tokamax, and Pallas outside a mesh, choose a kernel by the default device instead of the mesh's.
        device = self.mesh.devices.flat[0]
        absent = get_default_device().platform != device.platform
        with jax.default_device(device) if absent else nullcontext():
            return self.fn.lower(*self.abstract_args)


def build_step(plan: Plan, workload: Workload, devices: Sequence[Any] | None = None) -> Step:
    """The step of `workload` under `plan`.

    Arguments and results by task (see Step.abstract_args for shapes):
        train: (TrainState, batch) → (TrainState, metrics), batch as data.packing makes it.
        score: (params, batch) → {"nll": [B, T], "right": [B, T]}, and with top_n = n
            {"top_ids": [B, T, n], "top_logprobs": [B, T, n]} (score.token_scores); of a classifier [B, 1]
            (labels.label_scores).
        logits: (params, batch) → float32 [B, T, V]; of a classifier [B, labels].
        hidden: (params, batch) → [B, T, D] in the compute dtype, after the final norm.
        prefill: (params, cache, tokens [B, T], counts [B], sampling or None)
            → (ids [B] or logits [B, V], cache).
        decode: (params, cache, tokens [B, 1], counts [B], sampling or None) → the same.
    Parameters are stacked over layers for train, one array per layer for prefill and decode, either for the
    rest.

    Args:
        devices: those of the mesh; default all.

    Raises:
        ConfigError: batch or cache sizes that do not fit.
        MeshError: the devices do not fit the plan's mesh.
    """
    workload.check(plan)
    return _build(plan, workload, build_mesh(plan.mesh, devices))


@lru_cache(maxsize=64)
def _build(plan: Plan, workload: Workload, mesh: jax.sharding.Mesh) -> Step:
    place = Placement(workload.followed(plan), mesh, jnp.dtype(workload.compute_dtype))
    make = {
        "train": _train, "score": _score, "logits": _logits, "hidden": _states, "prefill": _cached,
        "decode": _cached,
    }[workload.task]  # fmt: skip
    fn, args = make(place, workload)
    return Step(plan, workload, mesh, fn, args)


def abstract_params(
    plan: Plan, mesh: jax.sharding.Mesh, dtype: Any, stacked: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of the flat parameter dict."""
    out = {}
    for d in plan.decisions:
        skip = d.stacked and not stacked
        sharding = named_sharding(mesh, d.spec[skip:])
        shape = jax.ShapeDtypeStruct(d.shape[skip:], dtype, sharding=sharding)
        out.update(dict.fromkeys(layer_paths(plan, d.path) if skip else (d.path,), shape))
    return out


def abstract_batch(
    plan: Plan, mesh: jax.sharding.Mesh, batch: int, length: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch of packed rows."""
    sharding = named_sharding(mesh, (plan.batch_axes(), ()))
    ints = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=sharding)
    weights = jax.ShapeDtypeStruct((batch, length), jnp.float32, sharding=sharding)
    return {"tokens": ints, "targets": ints, "segment_ids": ints, "positions": ints, "weights": weights}


_Built = tuple[jax.stages.Wrapped, tuple[Any, ...]]
"""A jitted function and its abstract arguments."""


def _is_stacked(params: dict[str, Any]) -> bool:
    return "layers/attn_norm/scale" in params


def _train(place: Placement, workload: Workload) -> _Built:
    plan, mesh = place.plan, place.mesh
    state = train.abstract_state(plan, mesh, workload)
    batch = abstract_batch(plan, mesh, workload.batch, workload.length)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    fn = jax.jit(train.train_step(place, workload), donate_argnums=0, out_shardings=(shardings, None))
    return fn, (state, batch)


def _hidden(
    place: Placement, workload: Workload, params: Params, batch: dict[str, jax.Array], transform: bool = True
) -> tuple[Transformer, jax.Array]:
    model = bind(place.plan, params, _is_stacked(params))
    hidden = model.hidden(
        place, batch["tokens"], batch["positions"], batch["segment_ids"], workload.remat, workload.kernel,
        transform,
    )  # fmt: skip
    return model, hidden


def _score(place: Placement, workload: Workload) -> _Built:
    def score(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        model, hidden = _hidden(place, workload, params, batch)
        if place.plan.config.head == "labels":
            return label_scores(model.label_logits(place, hidden), batch["targets"])
        return token_scores(place, hidden, model.head(place), batch["targets"], workload.top_n)

    everywhere = named_sharding(place.mesh, ())
    return jax.jit(score, out_shardings=everywhere), _sequence_args(place, workload)


def _logits(place: Placement, workload: Workload) -> _Built:
    def logits(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        model, hidden = _hidden(place, workload, params, batch)
        if place.plan.config.head == "labels":
            return place.constrain(model.label_logits(place, hidden), ((), (), ()))[:, 0]
        whole = place.constrain(model.logits(place, hidden), ((), (), ()))
        return whole[..., : place.plan.config.vocab_size]

    return jax.jit(logits, out_shardings=named_sharding(place.mesh, ())), _sequence_args(place, workload)


def _states(place: Placement, workload: Workload) -> _Built:
    def states(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return _hidden(place, workload, params, batch, transform=False)[1]

    return jax.jit(states, out_shardings=named_sharding(place.mesh, ())), _sequence_args(place, workload)


def _sequence_args(place: Placement, workload: Workload) -> tuple[Any, ...]:
    params = abstract_params(place.plan, place.mesh, jnp.dtype(workload.param_dtype), stacked=True)
    return params, abstract_batch(place.plan, place.mesh, workload.batch, workload.length)


def _cached(place: Placement, workload: Workload) -> _Built:
    plan, mesh = place.plan, place.mesh
    cache = cache_shape(place, workload.batch, workload.capacity)

    def step(
        params: Params,
        cache: KVCache,
        tokens: jax.Array,
        counts: jax.Array,
        chosen_by: sampling.SamplingParams | None,
    ) -> tuple[jax.Array, KVCache]:
        model = bind(plan, params, stacked=False)
        hidden, cache = model.hidden_cached(place, tokens, counts, cache, workload.kernel)
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        hidden = hidden if workload.length == 1 else jnp.take_along_axis(hidden, last, axis=1)
        head = model.head(place)
        logits = head_logits(place, head, hidden)[:, 0]
        if workload.choose == "logits":
            return place.constrain(logits, ((), ()))[:, : plan.config.vocab_size], cache
        if workload.choose == "greedy":
            return sampling.greedy(place, logits, head.vocab_axes), cache
        assert chosen_by is not None, "drawing needs SamplingParams"
        ids = sampling.sample(place, logits, head.vocab_axes, chosen_by, cache.lengths)
        return ids, cache

    rows = (plan.batch_axes(),)
    everywhere = named_sharding(mesh, ())
    out = (everywhere, jax.tree.map(lambda x: x.sharding, cache))

    def ints(shape: tuple[int, ...], spec: Any, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, spec))

    b = (workload.batch,)
    chosen_by = None
    if workload.choose == "sample":
        reals = ints(b, rows, jnp.float32)
        chosen_by = sampling.SamplingParams(
            temperature=reals, top_k=ints(b, rows), top_p=reals, min_p=reals, seed=ints(b, rows, jnp.uint32)
        )
    args = (
        abstract_params(plan, mesh, jnp.dtype(workload.param_dtype), stacked=False),
        cache,
        ints((*b, workload.length), (*rows, ())),
        ints(b, rows),
        chosen_by,
    )
    return jax.jit(step, donate_argnums=1, out_shardings=out), args
