"""What a tiny model computes under a plan, for comparing plans with one device.

Not here: the comparison over meshes and head counts under the default rules (tests/steps).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import bind, layer_paths, plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import Plan, named_sharding
from shardwise.partition.rows import put_rows
from shardwise.steps.build import build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import loss_and_gradients
from shardwise.steps.workload import Workload

ROWS, LENGTH = 8, 8
CONFIG = ModelConfig(
    vocab_size=13, embed_dim=12, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=4, mlp_dim=14,
    max_position=16, initializer_range=0.3, qkv_bias=True, attention_out_bias=True, mlp_bias=True,
    head_bias=True,
)  # fmt: skip
"""6 heads in 3 kv groups, mlp 14 and vocab 13: tp 2 and 4 divide few of them."""
TOLERANCE = 1e-9
"""Of the largest value: float64 leaves 1e-13 or so to the order of sums; a wrong term is of order 1."""


def assert_as_one_device(plan: Plan, length: int = LENGTH) -> None:
    """float64 logits, loss and gradients are those of one device under the default rules."""
    with jax.enable_x64(True):
        want, got = _one_device(plan.config, length), computed(plan, length)
    assert want.keys() == got.keys()
    for name, value in want.items():
        scale = np.abs(value).max()
        if name != "layers/attn/k_proj/bias":  # softmax does not see it
            assert scale > 1e-3, f"{name} is zero, so nothing is compared"
        worst = np.abs(value - got[name]).max() / max(scale, 1e-3)
        assert worst <= TOLERANCE, f"{name} differs by {worst:.1e} of its largest value"


@lru_cache
def _one_device(config: ModelConfig, length: int) -> dict[str, np.ndarray]:
    return computed(plan_model(config, MeshSpec()), length)


def computed(plan: Plan, length: int) -> dict[str, np.ndarray]:
    """Logits, loss and gradients of one packed batch, in true shapes."""
    mesh, params = _placed(plan, "float64")
    place, batch = Placement(plan, mesh, jnp.dtype("float64")), _batch(plan.config.vocab_size, length)
    workload = Workload(
        "train", ROWS, length, compute_dtype="float64", param_dtype="float64", z_loss=1e-2,
        optimizer=OptimizerConfig(),
    )  # fmt: skip
    workload.check(plan)

    @jax.jit
    def everything(params: Any, given: Any) -> Any:
        module = bind(plan, params, stacked=True)
        hidden = module.hidden(place, given["tokens"], given["positions"], given["segment_ids"])
        return module.logits(place, hidden), loss_and_gradients(place, workload, params, given)

    logits, (loss, gradients, _) = everything(params, put_rows(plan, mesh, batch))
    out = {"logits": np.asarray(logits)[batch["segment_ids"] > 0][:, : plan.config.vocab_size]}
    for path, gradient in gradients.items():
        d, host = plan[path], np.asarray(gradient)
        out[path] = plan.padding.trim(host, d.axes)
        np.testing.assert_array_equal(host, plan.padding.pad(out[path], d.axes, d.shape), err_msg=path)
    return out | {"loss": np.asarray(loss)}


def assert_decodes_as_one_device(plan: Plan) -> None:
    """The same for float32 logits through the cache."""
    want, got = _decoded_by_one(plan.config), decoded(plan)
    # Sums of at most ~50 terms, some hundred of them in a row; 2⁻²⁴ each, growing with the root of the count.
    assert np.abs(got - want).max() <= 2**-24 * 100 * np.abs(want).max()


@lru_cache
def _decoded_by_one(config: ModelConfig) -> np.ndarray:
    return decoded(plan_model(config, MeshSpec()))


def decoded(plan: Plan) -> np.ndarray:
    """Logits [B, 2, V] through the cache: of a prefill of 4 tokens, and of one more."""
    mesh, params = _placed(plan, "float32")
    layers: dict[str, jax.Array] = {}
    for d in plan.decisions:
        parts = list(np.asarray(params[d.path])) if d.stacked else [params[d.path]]
        sharding = named_sharding(mesh, d.spec[d.stacked :])
        layers |= {
            path: jax.device_put(part, sharding)
            for path, part in zip(layer_paths(plan, d.path), parts, strict=True)
        }
    tokens = np.random.default_rng(5).integers(0, plan.config.vocab_size, (ROWS, 5), np.int32)
    found, cache = [], None
    for task, start, stop in (("prefill", 0, 4), ("decode", 4, 5)):
        workload = Workload(task, ROWS, stop - start, capacity=LENGTH, choose="logits")
        step = build_step(plan, workload, tuple(mesh.devices.flat))
        if cache is None:
            shapes = step.abstract_args[1]
            cache = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), shapes)
        given = put_rows(
            plan, mesh, {"tokens": tokens[:, start:stop], "counts": np.full(ROWS, stop - start, np.int32)}
        )
        logits, cache = step(layers, cache, given["tokens"], given["counts"], None)
        found.append(np.asarray(logits)[:, : plan.config.vocab_size])
    return np.stack(found, 1)


def _placed(plan: Plan, dtype: str) -> tuple[jax.sharding.Mesh, dict[str, jax.Array]]:
    """The mesh, and parameters of which none is zero or one, the same for every plan of a model."""
    mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    params = {}
    for number, d in enumerate(plan.decisions):
        rng = np.random.default_rng(number)
        true = rng.normal(1.0 if d.init == "ones" else 0.0, 0.3, d.true_shape).astype(dtype)
        params[d.path] = jax.device_put(plan.padding.pad(true, d.axes, d.shape), plan.sharding(mesh, d.path))
    return mesh, params


def _batch(vocab: int, length: int) -> dict[str, np.ndarray]:
    """Packed rows: documents of 4 and 3 tokens, and one place of padding."""
    rng = np.random.default_rng(7)
    segments = np.repeat(np.array([[1] * 4 + [2] * 3 + [0]], np.int32), ROWS, axis=0)
    positions = np.repeat(np.array([[*range(4), *range(3), 0]], np.int32), ROWS, axis=0)
    tokens, targets = rng.integers(0, vocab, (2, ROWS, LENGTH), np.int32)
    weights = (segments > 0) & (rng.random((ROWS, LENGTH)) < 0.8)
    full = {
        "tokens": tokens * (segments > 0), "targets": targets, "segment_ids": segments,
        "positions": positions, "weights": weights.astype(np.float32),
    }  # fmt: skip
    return {name: array[:, :length] for name, array in full.items()}


def tied(config: ModelConfig) -> ModelConfig:
    """The same with a tied head."""
    return replace(config, tie_embeddings=True)
