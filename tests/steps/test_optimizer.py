"""AdamW, its schedule, clipping and decay mask against NumPy in float64; its state lies by the parameters."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import Plan
from shardwise.steps.optimizer import OptimizerConfig, learning_rate, make_optimizer, state_shardings

FLOAT32 = 2.0**-24


@lru_cache(maxsize=8)
def plan(*sizes: int) -> Plan:
    config = ModelConfig(
        vocab_size=11, embed_dim=6, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=2, mlp_dim=5,
        max_position=8, qkv_bias=True,
    )  # fmt: skip
    return plan_model(config, MeshSpec(*sizes))


def rates(config: OptimizerConfig) -> np.ndarray:
    return np.asarray(learning_rate(config, np.arange(1, 65)))[
        : config.total_steps
    ]  # one shape for all examples


def test_c319_rates_of_ten_steps_with_three_of_warm_up() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=3, total_steps=10)
    # Steps 1 to 3 rise to the peak; step 4 starts the cosine, whose end would be step 11.
    want = [1 / 3, 2 / 3, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 7)) for k in range(7)]
    # float32 cosines of angles up to π: an ulp of the angle (2⁻²²) at most.
    np.testing.assert_allclose(rates(config), want, rtol=4 * FLOAT32, atol=8 * FLOAT32)
    assert rates(config)[2] == 1.0 and rates(config)[3] == 1.0
    # The step's number may be Python's or an array's.
    of_ints, of_arrays = (
        [float(learning_rate(config, kind(s))) for s in range(1, 11)] for kind in (int, jnp.int32)
    )
    assert of_ints == of_arrays
    np.testing.assert_allclose(of_ints, want, rtol=4 * FLOAT32, atol=8 * FLOAT32)


@given(
    st.integers(0, 12), st.integers(1, 40), st.floats(1e-6, 10.0), st.floats(0.0, 1.0)
)  # warm-up may be longer than the whole run
def test_rates_rise_to_the_peak_and_then_fall_to_the_configured_end(
    warmup: int, total: int, peak: float, end: float
) -> None:
    config = OptimizerConfig(learning_rate=peak, warmup_steps=warmup, total_steps=total, lr_end_ratio=end)
    got = rates(config)
    assert (got > 0).all() or end == 0
    assert got.max() <= peak * (1 + 4 * FLOAT32)
    assert (np.diff(got[:warmup]) > 0).all()
    assert (np.diff(got[warmup:]) <= 0).all()
    if total > warmup:
        assert got[warmup] == pytest.approx(peak, rel=1e-6)  # the first after warm-up
        assert got[-1] >= peak * end * (1 - 1e-6)
    # One step later, and ever after, the end is reached.
    after = float(learning_rate(config, max(total, warmup + 1) + 1))
    assert after == pytest.approx(peak * end, rel=1e-5, abs=peak * 1e-6)
    assert after == float(learning_rate(config, 10 * (total + warmup)))


def gradients(step: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        d.path: (rng.normal(size=d.true_shape) * scale).astype(np.float32) for d in plan(1, 1, 1).decisions
    }


def reference(
    config: OptimizerConfig, params: dict[str, np.ndarray], scales: list[float]
) -> dict[str, np.ndarray]:
    """AdamW by Loshchilov and Hutter, algorithm 2, with clipping before and decay on matrices alone."""
    params = {path: p.astype(np.float64) for path, p in params.items()}
    first = {path: np.zeros_like(p) for path, p in params.items()}
    second = {path: np.zeros_like(p) for path, p in params.items()}
    for step, scale in enumerate(scales, 1):
        grads = {path: g.astype(np.float64) for path, g in gradients(step, scale).items()}
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        shrink = min(1.0, config.max_grad_norm / norm) if config.max_grad_norm else 1.0
        x = (step - 1 - config.warmup_steps) / (config.total_steps - config.warmup_steps)
        cosine = config.lr_end_ratio + (1 - config.lr_end_ratio) * 0.5 * (1 + math.cos(math.pi * x))
        rate = config.learning_rate * (step / config.warmup_steps if step <= config.warmup_steps else cosine)
        for path, p in params.items():
            g = grads[path] * shrink
            first[path] = config.beta1 * first[path] + (1 - config.beta1) * g
            second[path] = config.beta2 * second[path] + (1 - config.beta2) * g**2
            m = first[path] / (1 - config.beta1**step)
            v = second[path] / (1 - config.beta2**step)
            decay = config.weight_decay * p if path.endswith(("kernel", "table")) else 0.0
            params[path] = p - rate * (m / (np.sqrt(v) + config.adam_eps) + decay)
    return params


def run(
    config: OptimizerConfig, sizes: tuple[int, int, int], start: dict[str, np.ndarray], scales: list[float]
) -> Any:
    """The same by our optimizer on padded arrays; the result in true shapes."""
    made = plan(*sizes)
    optimizer = make_optimizer(config, made)

    def padded(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {path: made.padding.pad(a, made[path].axes, made[path].shape) for path, a in arrays.items()}

    @jax.jit
    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params, grad_norm=optax.global_norm(grads))
        return optax.apply_updates(params, updates), state

    params = padded(start)
    state = optimizer.init(jax.tree.map(jnp.asarray, params))
    for step, scale in enumerate(scales, 1):
        params, state = update(padded(gradients(step, scale)), state, params)
    out = {}
    for path, value in params.items():
        axes, host = made[path].axes, np.asarray(value)
        out[path] = made.padding.trim(host, axes)
        np.testing.assert_array_equal(host, made.padding.pad(out[path], axes, made[path].shape), err_msg=path)
    return out


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 5)])
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_five_steps_equal_float64_with_clipping_decay_and_padding(
    sizes: tuple[int, int, int], max_grad_norm: float
) -> None:
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=2, total_steps=7, lr_end_ratio=0.1, weight_decay=0.3, beta1=0.8,
        beta2=0.9, adam_eps=1e-3, max_grad_norm=max_grad_norm,
    )  # fmt: skip
    rng = np.random.default_rng(99)
    start = {d.path: rng.normal(size=d.true_shape).astype(np.float32) for d in plan(1, 1, 1).decisions}
    scales = [1.0, 0.01, 1.0, 10.0, 0.001]  # norms of about 20, 0.2, 20, 200, 0.02: clipped and not
    want, got = reference(config, start, scales), run(config, sizes, start, scales)
    for path, value in want.items():
        # Five updates of at most 0.2 each, with some ten roundings a step.
        np.testing.assert_allclose(got[path], value, rtol=50 * FLOAT32, atol=50 * FLOAT32, err_msg=path)
        assert np.abs(value - start[path]).max() > 1e-2


def test_decay_moves_matrices_and_embeddings_but_no_scale_and_no_bias() -> None:
    made = plan(1, 1, 1)
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.1, max_grad_norm=0.0, total_steps=10)
    optimizer = make_optimizer(config, made)
    params = {d.path: np.ones(d.shape, np.float32) for d in made.decisions}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params, grad_norm=0.0)
    for path, update in updates.items():
        want = -0.5 * 0.1 if path.endswith(("kernel", "table")) else 0.0
        np.testing.assert_allclose(update, want, rtol=4 * FLOAT32, err_msg=path)


def test_moments_lie_as_their_parameters_and_counters_everywhere() -> None:
    made = plan(1, 2, 2)
    mesh = build_mesh(made.mesh, jax.devices()[:4])
    shapes = {d.path: jax.ShapeDtypeStruct(d.shape, jnp.float32) for d in made.decisions}
    state = jax.eval_shape(make_optimizer(OptimizerConfig(weight_decay=0.1), made).init, shapes)
    shardings = state_shardings(made, mesh, state)
    found: dict[str, int] = {}
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        owner = next((key.key for key in path if getattr(key, "key", None) in made), None)
        if owner is None:
            assert sharding.is_fully_replicated
        else:
            assert sharding == made.sharding(mesh, owner)
            found[owner] = found.get(owner, 0) + 1
    assert found == dict.fromkeys(made.paths, 2)


def test_a_state_that_follows_no_parameter_is_refused() -> None:
    made = plan(1, 1, 1)
    mesh = build_mesh(made.mesh, jax.devices()[:1])
    with pytest.raises(AssertionError, match="follows no parameter"):
        state_shardings(made, mesh, {"factored": jax.ShapeDtypeStruct((3,), jnp.float32)})
