"""Parameters as plain arrays: draws are the same on every mesh, per-layer arrays are the stack's slices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import bind, declared_params, init_params, layer_paths, plan_model, unstack
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import Plan, named_sharding

CONFIG = ModelConfig(
    vocab_size=101, embed_dim=24, num_layers=3, num_heads=9, num_kv_heads=3, head_dim=4, mlp_dim=50,
    max_position=64, initializer_range=0.5, qkv_bias=True,
)  # fmt: skip


def draw(*sizes: int, seed: int = 0) -> tuple[Plan, jax.sharding.Mesh, dict[str, jax.Array]]:
    plan = plan_model(CONFIG, MeshSpec(*sizes))
    mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    return plan, mesh, init_params(plan, mesh, seed, jnp.float32)


def trimmed(plan: Plan, params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """In true shapes, after a look that padding is zero."""
    out = {}
    for path, value in params.items():
        host, axes = np.asarray(value), plan[path].axes
        out[path] = plan.padding.trim(host, axes)
        np.testing.assert_array_equal(host, plan.padding.pad(out[path], axes, plan[path].shape), err_msg=path)
    return out


@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 5, 1), (2, 2, 2)])
def test_a_fresh_draw_is_bitwise_the_same_on_every_mesh_and_lies_as_planned(
    sizes: tuple[int, int, int],
) -> None:
    plan_one, _, one = draw(1, 1, 1)
    plan, mesh, other = draw(*sizes)
    want, got = trimmed(plan_one, one), trimmed(plan, other)
    for path in plan.paths:
        np.testing.assert_array_equal(got[path], want[path], err_msg=path)
        assert other[path].shape == plan[path].shape
        assert other[path].sharding.is_equivalent_to(plan.sharding(mesh, path), other[path].ndim), path


def test_matrices_are_normal_of_the_configured_spread_scales_one_and_biases_zero() -> None:
    plan, _, params = draw(1, 1, 1)
    for param in declared_params(CONFIG):
        value = np.asarray(params[param.path])
        if param.init == "normal":
            # The spread of n draws is known to about 1 in √(2n); five times that, for the least of all.
            error = 5 / np.sqrt(2 * value.size)
            assert abs(value.std() / 0.5 - 1) < error and abs(value.mean()) < 0.5 * 2 * error, param.path
        else:
            assert (value == (1 if param.path.endswith("scale") else 0)).all(), param.path
    assert {path for path in plan.paths if path.endswith("scale")} == {
        p for p in plan.paths if plan[p].init == "ones"
    }


def test_another_seed_and_another_path_draw_other_numbers() -> None:
    _, _, params = draw(1, 1, 1)
    _, _, others = draw(1, 1, 1, seed=1)
    assert not np.array_equal(params["embed/table"], others["embed/table"])
    assert not np.array_equal(params["embed/table"], params["lm_head/kernel"])
    assert not np.array_equal(params["layers/mlp/up_proj/kernel"], params["layers/mlp/gate_proj/kernel"])


def test_unstacking_gives_each_layer_its_own_slice_and_keeps_the_cut() -> None:
    plan, mesh, params = draw(1, 2, 2)
    apart = unstack(plan, mesh, params)
    assert set(apart) == {one for path in plan.paths for one in layer_paths(plan, path)}
    for path in plan.paths:
        d = plan[path]
        for layer, one in enumerate(layer_paths(plan, path)):
            want = np.asarray(params[path])[layer] if d.stacked else np.asarray(params[path])
            np.testing.assert_array_equal(apart[one], want, err_msg=one)
            sharding = named_sharding(mesh, d.spec[1:] if d.stacked else d.spec)
            assert apart[one].sharding.is_equivalent_to(sharding, apart[one].ndim)
    assert unstack(plan, mesh, apart) is apart


@pytest.mark.parametrize("stacked", [True, False])
def test_binding_puts_every_array_under_its_own_name(stacked: bool) -> None:
    plan = plan_model(CONFIG, MeshSpec())
    paths = [one for path in plan.paths for one in ([path] if stacked else layer_paths(plan, path))]
    marks = {path: np.full((), number) for number, path in enumerate(paths)}
    model = bind(plan, marks, stacked)
    block = model.layers if stacked else model.layers[2]
    prefix = "layers" if stacked else "layers/2"
    assert model.embed["table"][...] == marks["embed/table"]
    assert model.lm_head["kernel"][...] == marks["lm_head/kernel"]
    assert block.attn.q_proj.bias[...] == marks[f"{prefix}/attn/q_proj/bias"]
    assert block.mlp.down_proj.kernel[...] == marks[f"{prefix}/mlp/down_proj/kernel"]
    assert block.mlp_norm.scale[...] == marks[f"{prefix}/mlp_norm/scale"]
