"""Batches whose rows train unequal numbers of tokens, or none: the mean is over tokens, in any split.

Not here: random meshes and models (tests/steps) and how rows are packed (tests/data).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax
import pytest

from shardwise.data.loader import BatchLoader
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.rows import put_rows
from shardwise.steps.build import Step, build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import TrainState, abstract_state
from shardwise.steps.workload import Workload
from shardwise.training import jobs

from .conftest import Site

CONFIG = ModelConfig(
    vocab_size=37,
    embed_dim=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    max_position=32,
)
ROWS, LENGTH, Z_LOSS = 4, 16, 1e-2
# Adam divides gradients by their size: eps above their rounding (1e-8) keeps near-zero ones from becoming ±1.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=4, total_steps=10, max_grad_norm=0.5, adam_eps=1e-4
)

SPLITS = {
    "4×1": ((1, 1, 1), 1),
    "2×2": ((1, 1, 1), 2),
    "1×4": ((1, 1, 1), 4),
    "dp 2, 1×2": ((2, 1, 1), 2),
    "fsdp 2": ((1, 2, 1), 1),
}
"""Name → mesh and grad_accum_steps, for 4 rows; `4×1` is the reference."""
OTHERS = [name for name in SPLITS if name != "4×1"]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What one step gave, on the host."""

    loss: float
    tokens: float
    grad_norm: float
    before: TrainState
    after: TrainState


@lru_cache
def step_for(split: str, task: str = "train") -> Step:
    mesh, accumulation = SPLITS[split]
    plan = plan_model(CONFIG, MeshSpec(*mesh))
    workload = Workload(task, ROWS, LENGTH, grad_accum_steps=accumulation, z_loss=Z_LOSS, optimizer=OPTIMIZER)  # type: ignore[arg-type]
    return build_step(plan, workload, jax.devices()[: plan.mesh.num_devices])


def start(step: Step) -> TrainState:
    """Random parameters, the same for every mesh here, and moments of zero."""
    rng = np.random.default_rng(0)

    def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding)

    state = jax.tree.map(zeros, abstract_state(step.plan, step.mesh, step.workload))
    params = {
        path: jax.device_put(rng.normal(0, 0.3, x.shape).astype(np.float32), x.sharding)
        for path, x in sorted(state.params.items())
    }
    return TrainState(params, state.optimizer, state.step)


def train(split: str, *batches: Arrays) -> list[Outcome]:
    """Steps over the batches, one after the other."""
    step = step_for(split)
    state, outcomes = start(step), []
    for batch in batches:
        before = jax.tree.map(np.array, state)
        state, metrics = step(state, put_rows(step.plan, step.mesh, batch))
        numbers = {name: float(value) for name, value in metrics.items()}
        after = jax.tree.map(np.array, state)
        outcomes.append(Outcome(numbers["loss"], numbers["tokens"], numbers["grad_norm"], before, after))
    return outcomes


def batch_with(*trained: int, seed: int = 0) -> Arrays:
    """Full rows of random ids, of which the last `trained[row]` places are trained; a row of -1 is empty."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1), np.int32)
    here = np.array(trained)[:, None] >= 0
    place = np.arange(LENGTH)[None]
    batch = {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        "positions": np.repeat(place, ROWS, axis=0).astype(np.int32),
        "weights": (place >= LENGTH - np.array(trained)[:, None]).astype(np.float32),
    }  # fmt: skip
    return {name: array * here.astype(array.dtype) for name, array in batch.items()}


def assert_same(ours: Outcome, theirs: Outcome, tolerance: float = 1e-5) -> None:
    assert ours.tokens == theirs.tokens
    assert ours.loss == pytest.approx(theirs.loss, abs=tolerance)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=tolerance)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), ours.after, theirs.after
    )


@lru_cache
def reference(*trained: int) -> Outcome:
    return train("4×1", batch_with(*trained))[0]


def mean_by_hand(batch: Arrays) -> float:
    """Σ weight · (NLL + z · log²Z) / Σ weight in float64, from the logits."""
    step = step_for("4×1", "logits")
    logits = np.asarray(
        step(start(step_for("4×1")).params, put_rows(step.plan, step.mesh, batch)), np.float64
    )
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    weights = batch["weights"]
    return float((weights * (nll + Z_LOSS * log_z**2)).sum() / weights.sum())


# C301 with (1, 3, 5, 7). C217 with (5, 0, 1, 0): device 0 of two has 5 trained tokens, device 1 one.
@pytest.mark.parametrize("trained", [(1, 3, 5, 7), (5, 0, 1, 0)])
def test_the_loss_is_the_mean_over_trained_tokens_not_over_rows(trained: tuple[int, ...]) -> None:
    ours = reference(*trained)
    assert ours.tokens == sum(trained)
    assert ours.loss == pytest.approx(mean_by_hand(batch_with(*trained)), abs=1e-5)
    assert ours.grad_norm > 0.5, "the case is about clipped gradients"


@pytest.mark.parametrize("split", OTHERS)
@pytest.mark.parametrize("trained", [(1, 3, 5, 7), (5, 0, 1, 0)])
def test_loss_gradient_norm_and_update_do_not_depend_on_the_split(
    split: str, trained: tuple[int, ...]
) -> None:
    assert_same(train(split, batch_with(*trained))[0], reference(*trained))


@pytest.mark.parametrize("split", SPLITS)
def test_rows_without_a_trained_token_are_as_good_as_absent(split: str) -> None:
    # With two devices the second has nothing to train, with 1×4 two of four micro-batches.
    (silent,), (absent,) = train(split, batch_with(4, 9, 0, 0)), train(split, batch_with(4, 9, -1, -1))
    assert silent.tokens == absent.tokens == 13
    assert_same(silent, absent, tolerance=1e-6)  # the same sums with zeros in other places
    assert_same(silent, reference(4, 9, 0, 0))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("nothing", [(0, 0, 0, 0), (-1, -1, -1, -1)])
def test_a_batch_without_a_trained_token_changes_nothing_but_the_step(
    split: str, nothing: tuple[int, ...]
) -> None:
    _, empty, later = train(
        split, batch_with(1, 3, 5, 7), batch_with(*nothing), batch_with(1, 3, 5, 7, seed=1)
    )
    assert (empty.tokens, empty.loss, empty.grad_norm) == (0, 0, 0)
    assert (empty.before.step, empty.after.step) == (1, 2)
    for before, after in zip(
        jax.tree.leaves((empty.before.params, empty.before.optimizer[:-1])),
        jax.tree.leaves((empty.after.params, empty.after.optimizer[:-1])),
        strict=True,
    ):
        assert before.tobytes() == after.tobytes()
    assert empty.after.optimizer[-1].count == 2, "the schedule goes by steps"
    assert np.isfinite(later.loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(later.after))


def test_the_logged_learning_rate_is_the_applied_one_also_after_an_empty_batch() -> None:
    step = step_for("4×1")
    state = start(step)
    logged = 0.0
    for batch in (batch_with(1, 3, 5, 7), batch_with(0, 0, 0, 0), batch_with(1, 3, 5, 7, seed=1)):
        before = np.array(state.params["final_norm/scale"], np.float64)
        state, metrics = step(state, put_rows(step.plan, step.mesh, batch))
        logged = float(metrics["learning_rate"])
    adam = next(s for s in state.optimizer if isinstance(s, optax.ScaleByAdamState))
    mean, square = (np.array(m["final_norm/scale"], np.float64) for m in (adam.mu, adam.nu))
    count = int(adam.count)
    mean, square = mean / (1 - OPTIMIZER.beta1**count), square / (1 - OPTIMIZER.beta2**count)
    update = mean / (np.sqrt(square) + OPTIMIZER.adam_eps)
    moved = before - np.array(state.params["final_norm/scale"], np.float64)
    np.testing.assert_allclose(moved, logged * update, rtol=1e-3)


def test_documents_packed_in_one_row_do_not_see_each_other() -> None:
    """C310: documents of 5, 7 and 3 tokens in a row of 16, against each alone."""
    step = step_for("4×1", "logits")
    params = start(step_for("4×1")).params
    sizes = np.array([5, 7, 3])
    starts = np.cumsum(sizes) - sizes
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, CONFIG.vocab_size, size, np.int32) for size in sizes]

    def logits(documents: list[np.ndarray]) -> np.ndarray:
        batch = {name: np.zeros_like(array) for name, array in batch_with(0, 0, 0, 0).items()}
        rows = [(0, number, first) for number, first in enumerate(starts)] + [(n + 1, n, 0) for n in range(3)]
        for row, number, first in rows:
            place = slice(first, first + sizes[number])
            batch["tokens"][row, place] = documents[number]
            batch["segment_ids"][row, place] = number + 1
            batch["positions"][row, place] = np.arange(sizes[number])
        return np.asarray(step(params, put_rows(step.plan, step.mesh, batch)))

    out = logits(documents)
    for number, (first, size) in enumerate(zip(starts, sizes, strict=True)):
        np.testing.assert_allclose(out[0, first : first + size], out[number + 1, :size], rtol=0, atol=1e-4)
    changed = logits([(documents[0] + 1) % CONFIG.vocab_size, *documents[1:]])
    assert np.abs(changed[0, :5] - out[0, :5]).min() > 0
    assert changed[0, 5:15].tobytes() == out[0, 5:15].tobytes()


def test_an_empty_batch_is_reported_as_skipped_not_as_a_good_loss(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Loader(BatchLoader):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number, batch in enumerate(super().__iter__(), start=1):
                yield batch | {"weights": batch["weights"] * (number != 4)}

    monkeypatch.setattr(jobs, "BatchLoader", Loader)
    assert site.finetune("run") == 0
    records = site.steps("run")
    assert len(records) == 10
    assert (records[3]["loss"], records[3]["trained_tokens"]) == (None, 0)
    assert records[3]["skipped"] == "no trained token in this batch"
    assert all("skipped" not in record and record["loss"] > 1 for record in records[:3] + records[4:])
    said = capsys.readouterr().err
    assert "step 4  skipped (no trained token)" in said
    assert said.count("skipped") == 1
