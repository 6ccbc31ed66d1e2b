"""Numbers do not depend on the mesh: logits, loss, gradients and training, against one device.

float64 runs show that the computation is the same one (1e-9 relative); float32 runs that rounding stays
within what the order of sums explains. Not here: parity with other implementations (tests/parity).
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import bind, init_params, plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.rows import put_rows
from shardwise.steps.build import build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import fresh_state, loss_and_gradients
from shardwise.steps.workload import Workload

ROWS, LENGTH = 8, 12
HEADS = {"9/3": (9, 3), "6/2": (6, 2), "5/1": (5, 1), "12/4": (12, 4)}
ONE = (1, 1, 1)
MESHES = [
    (2, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 1, 5), (1, 1, 6),
    (1, 1, 7), (1, 1, 8), (1, 2, 2), (1, 2, 4), (2, 2, 2),
]  # fmt: skip
# float32: sums of at most ~100 terms, some hundred of them in a row; 2⁻²⁴ each, growing with the root of the
# count.
FLOAT32 = 2**-24 * 100


def model(heads: str, vocab: int = 101, tied: bool = False, biases: bool = False) -> ModelConfig:
    """Two layers; little divides mlp 50, vocab 101 and most head counts; large weights show errors."""
    num_heads, kv_heads = HEADS[heads]
    return ModelConfig(
        vocab_size=vocab, embed_dim=24, num_layers=2, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=4,
        mlp_dim=50, max_position=64, initializer_range=0.3, tie_embeddings=tied, qkv_bias=biases,
        attention_out_bias=biases, mlp_bias=biases,
    )  # fmt: skip


def batch(vocab: int) -> dict[str, np.ndarray]:
    """Packed rows: two documents each and padding at the end; ids from the lower half of the vocabulary."""
    rng = np.random.default_rng(7)
    segments = np.repeat(np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32), ROWS, axis=0)
    positions = np.repeat(np.array([[*range(5), *range(4), 0, 0, 0]], np.int32), ROWS, axis=0)
    tokens = rng.integers(0, vocab // 2, (ROWS, LENGTH), np.int32)
    targets = rng.integers(0, vocab, (ROWS, LENGTH), np.int32)
    weights = (segments > 0) & (rng.random((ROWS, LENGTH)) < 0.8)
    return {
        "tokens": tokens * (segments > 0), "targets": targets, "segment_ids": segments,
        "positions": positions, "weights": weights.astype(np.float32),
    }  # fmt: skip


def batch_for(config: ModelConfig) -> dict[str, np.ndarray]:
    """The same for this model; for a classifier a label in the first place of all rows but one."""
    given = batch(config.vocab_size)
    if config.labels:
        given["targets"] = given["targets"] % len(config.labels)
        given["weights"] = np.zeros_like(given["weights"])
        given["weights"][1:, 0] = 1
    return given


def devices(mesh: tuple[int, int, int]) -> list[jax.Device]:
    return jax.devices()[: MeshSpec(*mesh).num_devices]


@lru_cache(maxsize=1)
def _reference(config: ModelConfig, dtype: str, remat: str) -> dict[str, np.ndarray]:
    return outputs(config, ONE, dtype, remat)


def outputs(
    config: ModelConfig, mesh: tuple[int, int, int], dtype: str, remat: str = "none"
) -> dict[str, np.ndarray]:
    """Logits, loss and gradients in their true shapes, and the largest absolute value found in padding."""
    plan = plan_model(config, MeshSpec(*mesh))
    device_mesh = build_mesh(plan.mesh, devices(mesh))
    place = Placement(plan, device_mesh, jnp.dtype(dtype))
    workload = Workload(
        "train", ROWS, LENGTH, compute_dtype=dtype, param_dtype=dtype, z_loss=1e-2, remat=remat,
        optimizer=OptimizerConfig(),
    )  # fmt: skip
    params = _bias_noise(plan, init_params(plan, device_mesh, 0, jnp.dtype(dtype)))
    given = put_rows(plan, device_mesh, batch_for(config))

    @jax.jit
    def everything(params, given):
        module = bind(plan, params, stacked=True)
        hidden = module.hidden(place, given["tokens"], given["positions"], given["segment_ids"])
        logits = (module.label_logits if config.labels else module.logits)(place, hidden)
        return logits, loss_and_gradients(place, workload, params, given)

    logits, (loss, gradients, count) = everything(params, given)
    real = batch(config.vocab_size)["segment_ids"] > 0
    kept = np.asarray(logits) if config.labels else np.asarray(logits)[real][:, : config.vocab_size]
    out = {"loss": np.asarray(loss), "logits": kept}
    padding = 0.0
    for path, gradient in gradients.items():
        host, axes = np.asarray(gradient), plan[path].axes
        out[path] = plan.padding.trim(host, axes)
        padding = max(padding, np.abs(host - plan.padding.pad(out[path], axes, plan[path].shape)).max())
    assert padding == 0.0, "a gradient reached padding"
    assert count == batch_for(config)["weights"].sum()
    return out


def _bias_noise(plan, params):
    """Biases and scales that are not zeros and ones, which would hide swapped or dropped ones."""
    out = {}
    for path, value in params.items():
        d = plan[path]
        if d.init != "normal":
            rng = np.random.default_rng(abs(len(path)))
            noise = plan.padding.pad(rng.normal(0, 0.3, d.true_shape), d.axes, d.shape)
            value = jax.device_put(jnp.asarray(np.asarray(value) + noise, value.dtype), value.sharding)
        out[path] = value
    return out


def compare(
    config: ModelConfig, mesh: tuple[int, int, int], dtype: str, tolerance: float, remat: str = "none"
) -> None:
    want, got = _reference(config, dtype, remat), outputs(config, mesh, dtype, remat)
    assert want.keys() == got.keys()
    for name, value in want.items():
        scale = np.abs(value).max()
        assert scale > 0 or name == "layers/attn/k_proj/bias", f"{name} is all zero, so nothing is compared"
        worst = np.abs(value - got[name]).max() / max(scale, 1e-3)
        assert worst <= tolerance, f"{name} differs by {worst:.2e} of its largest value on mesh {mesh}"


# Every mesh and every head count at least once, the odd ones together; the full product is below, as slow.
PAIRS = [(mesh, list(HEADS)[i % len(HEADS)]) for i, mesh in enumerate(MESHES)]


@pytest.mark.parametrize(("mesh", "heads"), PAIRS)
def test_float64_logits_loss_and_gradients_equal_one_device(mesh: tuple[int, int, int], heads: str) -> None:
    with jax.enable_x64(True):
        compare(
            model(heads, tied=heads in ("6/2", "5/1"), biases=heads in ("9/3", "5/1")), mesh, "float64", 1e-9
        )


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("tied", "biases"), [(True, True), (False, False)])
def test_float64_full_matrix_equals_one_device(mesh, heads, tied, biases) -> None:
    with jax.enable_x64(True):
        compare(model(heads, tied=tied, biases=biases), mesh, "float64", 1e-9)


@pytest.mark.parametrize("mesh", [(1, 1, 4), (2, 2, 2)])
def test_float32_stays_within_rounding_of_one_device(mesh: tuple[int, int, int]) -> None:
    compare(model("9/3", biases=True), mesh, "float32", FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputation_in_the_backward_pass_changes_nothing(remat: str) -> None:
    with jax.enable_x64(True):
        want, got = (
            outputs(model("9/3"), (1, 2, 2), "float64"),
            outputs(model("9/3"), (1, 2, 2), "float64", remat),
        )
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 4), (1, 2, 2)])
def test_a_large_odd_vocabulary_equals_one_device(mesh: tuple[int, int, int]) -> None:
    with jax.enable_x64(True):
        compare(model("6/2", vocab=50257), mesh, "float64", 1e-9)


def test_embedding_gradients_touch_only_rows_that_occur() -> None:
    config = model("9/3")
    gradient = outputs(config, (1, 2, 2), "float32")["embed/table"]
    given = batch(config.vocab_size)
    occurring = np.unique(given["tokens"][given["segment_ids"] > 0])
    others = np.setdiff1d(np.arange(config.vocab_size), [*occurring, 0])  # id 0 stands in padding
    assert np.abs(gradient[others]).max() == 0
    starts = np.unique(given["tokens"][:, [0, 5]])  # first of each document: something behind it is trained
    assert (np.abs(gradient[starts]).max(axis=1) > 0).all()


@pytest.mark.parametrize(
    "mesh",
    [
        (1, 2, 2),
        pytest.param((2, 2, 2), marks=pytest.mark.slow),
        pytest.param((1, 1, 7), marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_follow_one_device_and_padding_never_moves(mesh: tuple[int, int, int]) -> None:
    config = model("9/3", biases=True)

    def curve(mesh: tuple[int, int, int]) -> list[float]:
        plan = plan_model(config, MeshSpec(*mesh))
        workload = Workload(
            "train", ROWS, LENGTH, compute_dtype="float64", param_dtype="float64",
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=20, weight_decay=0.1),
        )  # fmt: skip
        step = build_step(plan, workload, devices(mesh))
        state = fresh_state(plan, step.mesh, workload, 0)
        losses = []
        for _ in range(20):
            state, metrics = step(state, put_rows(plan, step.mesh, batch(config.vocab_size)))
            losses.append(float(metrics["loss"]))
        for path, value in state.params.items():
            host, axes = np.asarray(value), plan[path].axes
            true = plan.padding.trim(host, axes)
            np.testing.assert_array_equal(host, plan.padding.pad(true, axes, plan[path].shape), err_msg=path)
        return losses

    with jax.enable_x64(True):
        want, got = curve(ONE), curve(mesh)
    assert want[-1] < want[0] - 0.5, "training does not learn, so nothing is shown"
    # Adam divides by the root of second moments, which near zero magnifies rounding; 1e-9 holds with room in
    # float64
    np.testing.assert_allclose(got, want, rtol=1e-8)
