"""A plan's prediction put to the proof: compiled for the machine, or run on the devices that are there.

Not here: the compiling itself (verify.py), and the ranking (search.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from shardwise.models.cache import cache_shape
from shardwise.models.parameters import init_params, unstack
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import build_mesh
from shardwise.partition.rows import put_rows
from shardwise.planner.audit import Audit, compared
from shardwise.planner.memory import Memory
from shardwise.planner.search import Candidate
from shardwise.planner.verify import (
    CompiledStep,
    NoTpuCompilerError,
    compile_for_tpu,
    compile_on_fake_devices,
    default_cache,
)
from shardwise.steps.build import build_step
from shardwise.steps.train import start_state

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verified:
    """A candidate and what a compiler made of its step."""

    candidate: Candidate
    compiled: CompiledStep
    audit: Audit | None
    """Collectives and FLOPs predicted beside compiled; None where the compiler tells no collectives."""
    note: str = ""
    """Why it was not compiled for the machine itself."""

    @property
    def predicted(self) -> Memory:
        """By class."""
        return self.candidate.memory


def verify(candidate: Candidate, progress: Progress) -> Verified:
    """Compile a candidate's step: for TPUs with their own compiler, else on simulated devices, which tells
    nothing of memory."""
    plan, workload, system = candidate.plan, candidate.workload, candidate.hosting.system
    absent = "there is no compiler for absent GPUs: collectives alone are verified"
    note = absent if system.chip.kind == "gpu" else ""
    if system.topology is not None:
        try:
            done = compile_for_tpu(
                plan, workload, system.topology, num_slices=system.slices, machine_code=False,
                cache=default_cache(), progress=progress,
            )  # fmt: skip
            return Verified(candidate, done, _audit(candidate, done))
        except NoTpuCompilerError as missing:
            note = f"{missing}; collectives alone are verified, on simulated devices"
    done = compile_on_fake_devices(plan, workload, cache=default_cache(), progress=progress)
    return Verified(candidate, done, _audit(candidate, done), note)


def _audit(candidate: Candidate, done: CompiledStep) -> Audit | None:
    if done.collectives is None:
        return None
    return compared(candidate.plan, candidate.workload, done.collectives, done.product_flops or 0)


@dataclass(frozen=True)
class Measured:
    """A candidate and what its step took."""

    candidate: Candidate
    seconds: float
    """The median of the steps after the first."""
    compile_seconds: float
    """The first step, which compiles."""
    steps: int


def measure(candidate: Candidate, devices: Sequence[Any], steps: int = 3) -> Measured:
    """Run a candidate's step on real arrays: freshly drawn parameters, and one batch of drawn ids.

    Args:
        devices: as many as the mesh has.
        steps: timed ones, after one that compiles.
    """
    plan, workload = candidate.plan, candidate.workload
    step = build_step(plan, workload, devices)
    mesh = build_mesh(plan.mesh, devices)
    dtype = jax.numpy.dtype(workload.param_dtype)
    params = init_params(plan, mesh, 0, dtype)
    run: Callable[[], Any]
    if workload.task == "train":
        state = start_state(plan, mesh, workload, params)
        batch = put_rows(plan, mesh, _batch(candidate))

        def run() -> Any:
            nonlocal state
            state, metrics = step(state, batch)
            return metrics
    else:
        layers = unstack(plan, mesh, params)
        shapes = cache_shape(
            Placement(plan, mesh, jax.numpy.dtype(workload.compute_dtype)), workload.batch, workload.capacity
        )
        cache = jax.tree.map(
            lambda x: jax.jit(lambda: jax.numpy.zeros(x.shape, x.dtype), out_shardings=x.sharding)(), shapes
        )
        given = put_rows(plan, mesh, _prompt(candidate))

        # Decoding finds a full cache, but for the token that it adds; a prefill an empty one.
        held = workload.capacity - 1 if workload.task == "decode" else 0
        start_lengths = {"lengths": np.full(workload.batch, held, np.int32)}

        def run() -> Any:
            nonlocal cache
            cache = replace(cache, **put_rows(plan, mesh, start_lengths))
            ids, cache = step(layers, cache, given["tokens"], given["counts"], None)
            return ids

    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return Measured(candidate, statistics.median(times[1:]), times[0], steps)


def _batch(candidate: Candidate) -> dict[str, np.ndarray]:
    """Rows of one document each."""
    workload, vocab = candidate.workload, candidate.plan.config.vocab_size
    shape = (workload.batch, workload.length)
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(vocab, size=shape, dtype=np.int32),
        "targets": rng.integers(vocab, size=shape, dtype=np.int32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(workload.length, dtype=np.int32), shape).copy(),
        "weights": np.ones(shape, np.float32),
    }


def _prompt(candidate: Candidate) -> dict[str, np.ndarray]:
    workload = candidate.workload
    shape = (workload.batch, workload.length)
    tokens = np.random.default_rng(0).integers(candidate.plan.config.vocab_size, size=shape, dtype=np.int32)
    return {"tokens": tokens, "counts": np.full(workload.batch, workload.length, np.int32)}
