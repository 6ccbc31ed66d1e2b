"""Whole models whose heads are laid out differently train, score and generate alike.

Not here: the head alone (test_head_layouts.py), and the rest of the model (test_mesh_invariance.py).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.head_layouts import LAYOUTS, with_layout

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.head import Head, head_logits
from shardwise.models.parameters import init_params, plan_model, unstack
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import Plan
from shardwise.partition.rows import put_rows
from shardwise.steps import sampling
from shardwise.steps.build import Step, build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.sampling import SamplingParams
from shardwise.steps.train import loss_and_gradients
from shardwise.steps.workload import Workload

VOCAB, LENGTH, CAPACITY = 103, 8, 16
ONE = (1, 1, 1)


def config(embed: int = 20, tied: bool = False, bias: bool = True, **changes: Any) -> ModelConfig:
    """Vocabulary and width that hardly any tp divides; large weights, so that errors show."""
    return ModelConfig(**{
        "vocab_size": VOCAB, "embed_dim": embed, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 4, "mlp_dim": 24, "max_position": 64, "initializer_range": 0.4, "tie_embeddings": tied,
        "head_bias": bias,
    } | changes)  # fmt: skip


def make_plan(model: ModelConfig, sizes: tuple[int, int, int], layout: str) -> Plan:
    plan = with_layout(plan_model(model, MeshSpec(*sizes)), layout)
    return plan if model.tie_embeddings else with_layout(plan, layout, path="embed/table")


@lru_cache(maxsize=8)
def parameters(plan: Plan, dtype: str = "float32") -> tuple[jax.sharding.Mesh, dict[str, jax.Array]]:
    """Freshly drawn ones, but for the head's bias, which is not zero."""
    mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    params = init_params(plan, mesh, 0, jnp.dtype(dtype))
    if plan.config.head_bias:
        d = plan["lm_head/bias"]
        bias = np.random.default_rng(1).normal(0, 1, VOCAB).astype(dtype)
        padded = plan.padding.pad(bias, d.axes, d.shape)
        params["lm_head/bias"] = jax.device_put(padded, plan.sharding(mesh, d.path))
    return mesh, params


def step_for(plan: Plan, task: str, batch: int, length: int = LENGTH, **options: Any) -> Step:
    devices = jax.devices()[: plan.mesh.num_devices]
    return build_step(plan, Workload(task, batch, length, **options), devices)


def rows(batch: int, vocab: int = VOCAB, length: int = LENGTH) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, vocab, (batch, length + 1), np.int32)
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones((batch, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (batch, 1)),
        "weights": np.ones((batch, length), np.float32),
    }  # fmt: skip


def settings(batch: int, seed: int = 0, **changes: float) -> SamplingParams:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    kinds = {"top_k": np.int32}
    columns = {name: np.full((batch,), v, kinds.get(name, np.float32)) for name, v in values.items()}
    return SamplingParams(seed=np.arange(seed, seed + batch, dtype=np.uint32), **columns)


def generated(plan: Plan, choose: str, new: int = 4, batch: int = 4, **changes: float) -> np.ndarray:
    """What prefill and decode choose: ids [new, B], or logits [new, B, V] of greedy steps."""
    mesh, params = parameters(plan)
    params = unstack(plan, mesh, params)
    options: dict[str, Any] = {"capacity": CAPACITY, "choose": choose}
    prefill = step_for(plan, "prefill", batch, **options)
    decode = step_for(plan, "decode", batch, 1, **options)
    counts = np.array([LENGTH, 3, 5, 1] * (batch // 4), np.int32)
    tokens = rows(batch)["tokens"]
    chosen_by = settings(batch, **changes) if choose == "sample" else None
    cache = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), prefill.abstract_args[1]
    )
    out = []
    for step in [prefill] + [decode] * (new - 1):
        given = put_rows(plan, mesh, {"tokens": tokens, "counts": counts})
        chosen, cache = step(params, cache, given["tokens"], given["counts"], chosen_by)
        out.append(np.asarray(chosen))
        ids = out[-1].argmax(-1).astype(np.int32) if choose == "logits" else out[-1]
        tokens, counts = ids[:, None], np.ones((batch,), np.int32)
    return np.stack(out)


# Each mesh and each layout at least once, tied and not; all of them with each other as slow ones.
MESHES = [((1, 1, 2), True), ((1, 1, 3), False), ((1, 1, 4), False), ((1, 1, 7), True), ((2, 2, 2), False)]
FAST = [
    (0, "vocab"),
    (1, "hidden"),
    (2, "vocab"),
    (2, "hidden"),
    (2, "replicated"),
    (3, "hidden"),
    (4, "vocab"),
]


@pytest.mark.parametrize(
    ("sizes", "tied", "layout"),
    [
        pytest.param(*mesh, layout, marks=() if (i, layout) in FAST else pytest.mark.slow)
        for i, mesh in enumerate(MESHES)
        for layout in LAYOUTS
    ],
)
def test_decoding_with_a_cache_gives_one_devices_tokens(
    sizes: tuple[int, int, int], tied: bool, layout: str
) -> None:
    model = config(tied=tied)
    one, plan = make_plan(model, ONE, "vocab"), make_plan(model, sizes, layout)
    want = generated(one, "logits")
    got = generated(plan, "logits")
    assert got.shape == (4, 4, VOCAB)
    # float32 in some 20 sums of some 20 terms one after the other, of logits up to about 10
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max(), rtol=0)
    ties = np.sort(want, -1)
    assert (ties[..., -1] - ties[..., -2]).min() > 1e-3, "a near tie: the tokens may differ by rounding"
    np.testing.assert_array_equal(generated(plan, "greedy"), want.argmax(-1))
    limits = {"temperature": 2.0, "top_k": 60, "top_p": 0.95, "min_p": 0.02}
    np.testing.assert_array_equal(generated(plan, "sample", **limits), generated(one, "sample", **limits))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c203_ids_past_103_are_never_drawn_listed_or_returned(layout: str) -> None:
    plan = make_plan(config(bias=False), (1, 1, 4), layout)
    mesh, params = parameters(plan)
    drawn = generated(plan, "sample", new=2, batch=2500, temperature=100.0)
    assert drawn.size == 5000
    # About 48 draws of each id: that one is left out has a probability below 103 · e⁻⁴⁰.
    assert set(drawn.ravel().tolist()) == set(range(VOCAB))
    given = put_rows(plan, mesh, rows(4))
    logits = np.asarray(step_for(plan, "logits", 4)(params, given))
    assert logits.shape == (4, LENGTH, 103)
    scores = step_for(plan, "score", 4, top_n=20)(params, given)
    assert scores["top_ids"].shape == scores["top_logprobs"].shape == (4, LENGTH, 20)
    assert scores["top_ids"].dtype == np.int32 and scores["top_logprobs"].dtype == np.float32
    np.testing.assert_array_equal(scores["top_ids"], np.argsort(-logits, -1, kind="stable")[..., :20])


def test_top_n_is_refused_where_it_cannot_be_had() -> None:
    plan = make_plan(config(), ONE, "vocab")
    everything = step_for(plan, "score", 2, top_n=VOCAB)
    mesh, params = parameters(plan)
    scores = everything(params, put_rows(plan, mesh, rows(2)))
    assert (np.sort(np.asarray(scores["top_ids"]), -1) == np.arange(VOCAB)).all()
    # all probabilities of a position sum to one: 103 roundings of float32
    np.testing.assert_allclose(np.exp(scores["top_logprobs"]).sum(-1), 1, rtol=103 * 2**-24 * 4)
    for wrong in (VOCAB + 1, -1):
        with pytest.raises(ConfigError, match=f"top_n is {wrong}; it must lie between 0 and .*103"):
            step_for(plan, "score", 2, top_n=wrong)
    with pytest.raises(ConfigError, match="top_n has no effect on task 'logits'"):
        step_for(plan, "logits", 2, top_n=1)


def descent(plan: Plan, steps: int = 20) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of plain gradient descent, and the first step's gradients in their true shapes."""
    mesh, params = parameters(plan)
    workload = Workload("train", 4, LENGTH, optimizer=OptimizerConfig())
    place = Placement(plan, mesh, jnp.dtype("float32"))

    @jax.jit
    def step(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[Any, ...]:
        value, gradients, _ = loss_and_gradients(place, workload, params, batch)
        moved = {path: value - 0.1 * gradients[path] for path, value in params.items()}
        moved = {path: place.constrain(value, plan[path].spec) for path, value in moved.items()}
        return value, gradients, moved

    losses, first = [], {}
    for _ in range(steps):
        value, gradients, params = step(params, put_rows(plan, mesh, rows(4)))
        losses.append(float(value))
        first = first or {p: plan.padding.trim(np.asarray(g), plan[p].axes) for p, g in gradients.items()}
    return losses, first


@lru_cache(maxsize=2)
def one_device_descent(model: ModelConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    return descent(make_plan(model, ONE, "vocab"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_c201_twenty_steps_of_gradient_descent_follow_one_device(tp: int, layout: str) -> None:
    model = config(64, bias=False, initializer_range=0.05, head_dim=16, mlp_dim=96)
    want, want_gradients = one_device_descent(model)
    got, gradients = descent(make_plan(model, (1, 1, tp), layout))
    assert want[-1] < want[0] - 0.1, "nothing is learnt, so nothing is shown"
    assert abs(got[0] - want[0]) <= 1e-5
    assert abs(got[-1] - want[-1]) <= 1e-3
    assert gradients["lm_head/kernel"].shape == (103, 64)
    for path, value in want_gradients.items():
        np.testing.assert_allclose(
            gradients[path], value, rtol=0, atol=1e-4 * np.abs(value).max(), err_msg=path
        )


def test_models_of_different_layouts_in_one_process_do_not_disturb_each_other() -> None:
    plans = [make_plan(config(), (1, 1, 4), layout) for layout in LAYOUTS]
    assert len({hash(plan) for plan in plans}) == len(set(plans)) == 3
    first = [generated(plan, "greedy") for plan in plans]
    for tokens in [*first, *(generated(plan, "greedy") for plan in plans[::-1])]:
        np.testing.assert_array_equal(tokens, first[0])


def moved(plan: Plan, choose: str, batch: int) -> list[int]:
    """Elements of each float array that a compiled decode step gathers or reduces over devices."""
    step = step_for(plan, "decode", batch, 1, capacity=CAPACITY, choose=choose)
    program = step.lower().compile().as_text()
    found = re.findall(
        r"= \(?(.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", program
    )
    shapes = [shape for line in found for shape in re.findall(r"\bf\d+\[([\d,]*)\]", line)]
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]


@pytest.mark.parametrize("choose", ["greedy", "sample"])
@pytest.mark.parametrize(("sizes", "batch"), [((1, 1, 4), 4), ((2, 2, 2), 8)])
def test_decoding_with_the_vocabulary_cut_moves_nothing_as_large_as_the_logits(
    sizes: tuple[int, int, int], batch: int, choose: str
) -> None:
    model = config(8, vocab_size=4096, num_heads=2, num_kv_heads=2, mlp_dim=16)
    local = batch // (sizes[0] * sizes[1])
    plan = plan_model(model, MeshSpec(*sizes))
    # FSDP gathers what it cuts: for the head and the embedding V/tp rows of D.
    weights = 4096 // sizes[2] * 8
    large = [n for n in moved(plan, choose, batch) if n >= local * 4096 / sizes[2] and n != weights]
    assert not large
    if sizes[1] == 1:
        hidden = with_layout(plan, "hidden")
        assert batch * 4096 in moved(hidden, choose, batch), "the search must see the sum of whole logits"
        assert not [n for n in moved(with_layout(plan, "replicated"), choose, batch) if n >= batch * 4096 / 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frequencies_are_those_of_the_softmax(layout: str) -> None:
    count, temperature = 20_000, 2.0
    model = config(6, vocab_size=19, initializer_range=0.5)
    plan = make_plan(model, (1, 1, 4), layout)
    place = Placement(plan, build_mesh(plan.mesh, jax.devices()[:4]), jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    weight, bias, hidden = rng.normal(0, 0.7, (19, 6)), rng.normal(0, 0.5, 19), rng.normal(0, 1, 6)
    values = {"lm_head/kernel": weight, "lm_head/bias": bias}

    @jax.jit
    def draw(params: dict[str, jax.Array], chosen_by: SamplingParams) -> jax.Array:
        head = Head.of(
            place, "lm_head/kernel", params["lm_head/kernel"], "lm_head/bias", params["lm_head/bias"]
        )
        many = jnp.broadcast_to(jnp.float32(hidden), (count, 1, 6))
        logits = head_logits(place, head, many)[:, 0]
        return sampling.sample(place, logits, head.vocab_axes, chosen_by, jnp.zeros((count,), jnp.int32))

    params = {
        path: jax.device_put(
            plan.padding.pad(value.astype(np.float32), plan[path].axes, plan[path].shape),
            plan.sharding(place.mesh, path),
        )
        for path, value in values.items()
    }
    drawn = np.asarray(draw(params, settings(count, temperature=temperature)))
    powers = np.exp((weight @ hidden + bias) / temperature)
    expected = count * powers / powers.sum()
    assert expected.min() > 100
    chi_square = ((np.bincount(drawn, minlength=19) - expected) ** 2 / expected).sum()
    assert chi_square < 61.6  # 18 degrees of freedom: exceeded by chance once in a million
