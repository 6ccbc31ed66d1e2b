"""Training checkpoints come back bit for bit on any mesh, however each mesh cuts and pads.

Not here: what happens when saving is cut short or files go missing (test_native_broken.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwise.checkpoints import native
from shardwise.errors import CheckpointError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rows import put_rows
from shardwise.steps.build import Step, build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import TrainState, abstract_state
from shardwise.steps.workload import Workload

# Nothing here divides well: 3 kv heads of 3 query heads, mlp 90, vocab 101, embed 20, so that every mesh
# below pads differently (tp 2 and 3) or stores a dim larger than it is used (fsdp 8).
CONFIG = ModelConfig(
    vocab_size=101, embed_dim=20, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=4, mlp_dim=90,
    max_position=32, initializer_range=0.2,
)  # fmt: skip
BATCH, LENGTH = 8, 8
TRAIN = Workload("train", BATCH, LENGTH, optimizer=OptimizerConfig(learning_rate=1e-2, total_steps=5))
SAVED_ON = (1, 4, 2)


@dataclass(frozen=True)
class Trained:
    """A run of four steps that saved after the third."""

    folder: Path
    """Holds the checkpoint of step 3."""
    state: dict[str, np.ndarray]
    """Its state after step 3, in true shapes."""
    next_loss: np.ndarray
    """The loss of step 4, without interruption."""


def step_on(mesh: tuple[int, int, int], workload: Workload = TRAIN) -> Step:
    plan = plan_model(CONFIG, MeshSpec(*mesh))
    return build_step(plan, workload, jax.devices()[: plan.mesh.num_devices])


def batch_of(step: Step, number: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(number)
    ids = rng.integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1), np.int32)
    arrays = {
        "tokens": ids[:, :-1], "targets": ids[:, 1:], "segment_ids": np.ones_like(ids[:, 1:]),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1)),
        "weights": np.ones((BATCH, LENGTH), np.float32),
    }  # fmt: skip
    return put_rows(step.plan, step.mesh, arrays)


def drawn_state(step: Step) -> TrainState:
    """A state with random parameters, drawn by NumPy so that nothing but the step is compiled."""
    rng = np.random.default_rng(0)
    state = filled_state(step, 0)

    def draw(path: str) -> jax.Array:
        decision = step.plan[path]
        true = rng.normal(0, 0.2, decision.true_shape).astype(np.float32)
        padded = step.plan.padding.pad(true, decision.axes, decision.shape)
        return jax.device_put(padded, step.plan.sharding(step.mesh, path))

    return replace(state, params={path: draw(path) for path in step.plan.paths})


def filled_state(step: Step, number: int) -> TrainState:
    """A state in which every number, the step's too, is `number`."""

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.full(shape.shape, number, shape.dtype), shape.sharding)

    return jax.tree.map(fill, abstract_state(step.plan, step.mesh, TRAIN))


def true_arrays(plan: Plan, state: TrainState) -> dict[str, np.ndarray]:
    """Every leaf of a state in its true shape; checks on the way that all padding is zero."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        owner = next((k.key for k in path if isinstance(k, jax.tree_util.DictKey) and k.key in plan), None)
        array = np.asarray(leaf)
        if owner is not None:
            decision = plan[owner]
            trimmed = plan.padding.trim(array, decision.axes)
            padded = plan.padding.pad(trimmed, decision.axes, decision.shape)
            np.testing.assert_array_equal(padded, array, err_msg=f"padding of {jax.tree_util.keystr(path)}")
            array = trimmed
        out[jax.tree_util.keystr(path)] = array.copy()
    return out


def restore_on(step: Step, folder: Path) -> TrainState:
    wanted = abstract_state(step.plan, step.mesh, TRAIN)
    state = native.restore(native.find_newest(folder, print), step.plan, step.mesh, wanted)
    for have, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert (have.shape, have.dtype, have.sharding) == (want.shape, want.dtype, want.sharding)
    return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("checkpoints")
    step = step_on(SAVED_ON)
    state = drawn_state(step)
    for number in (1, 2, 3):
        state, _ = step(state, batch_of(step, number))
    native.save(folder, state, step.plan, {"note": "three steps"}, keep_last=1)
    arrays = true_arrays(step.plan, state)
    _, metrics = step(state, batch_of(step, 4))
    return Trained(folder, arrays, np.asarray(metrics["loss"]))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 3)], ids=str)
def test_a_checkpoint_is_bit_equal_on_another_mesh_and_gives_the_same_next_loss(
    trained: Trained, mesh: tuple[int, int, int]
) -> None:
    step = step_on(mesh, replace(TRAIN, task="score"))
    state = restore_on(step, trained.folder)
    assert int(state.step) == 3
    arrays = true_arrays(step.plan, state)
    assert arrays.keys() == trained.state.keys()
    for name, array in arrays.items():
        assert array.tobytes() == trained.state[name].tobytes(), name
    # The loss of a step is that of the parameters before its update, so scoring gives it without a gradient.
    nll = step(state.params, batch_of(step, 4))["nll"]
    # float32: sums of at most 101 terms some tens deep; C214 asks for 1e-5.
    np.testing.assert_allclose(np.asarray(nll).mean(dtype=np.float64), trained.next_loss, rtol=0, atol=1e-5)


def test_on_the_same_mesh_the_next_step_is_bitwise_that_of_the_uninterrupted_run(trained: Trained) -> None:
    step = step_on(SAVED_ON)
    _, metrics = step(restore_on(step, trained.folder), batch_of(step, 4))
    assert np.asarray(metrics["loss"]).tobytes() == trained.next_loss.tobytes()


def test_the_meshes_differ_in_padding_so_that_restoring_has_to_repad() -> None:
    plans = {mesh: plan_model(CONFIG, MeshSpec(*mesh)) for mesh in [SAVED_ON, (1, 8, 1), (1, 1, 3)]}
    q, gate = "layers/attn/q_proj/kernel", "layers/mlp/gate_proj/kernel"
    assert len({plan[q].shape for plan in plans.values()}) == 3
    assert plans[1, 8, 1][gate].shape != plans[1, 8, 1][gate].use_shape


def test_what_the_caller_noted_comes_back_with_step_and_mesh(trained: Trained) -> None:
    found = native.find_newest(trained.folder, print)
    meta = {key: value for key, value in found.meta.items() if key != "true_shapes"}
    assert meta == {"note": "three steps", "step": 3, "mesh": "dp:1,fsdp:4,tp:2"}
    assert native.open_exactly(found.path) == found


def test_another_optimizers_checkpoint_is_refused_by_the_names_of_its_arrays(trained: Trained) -> None:
    step = step_on((1, 1, 1))
    other = replace(TRAIN, optimizer=replace(TRAIN.optimizer, max_grad_norm=0.0))
    wanted = abstract_state(step.plan, step.mesh, other)
    with pytest.raises(CheckpointError, match="another training state: optimizer"):
        native.restore(native.find_newest(trained.folder, print), step.plan, step.mesh, wanted)


def test_a_model_of_another_size_is_not_restored_leniently(trained: Trained) -> None:
    plan = plan_model(replace(CONFIG, mlp_dim=92), MeshSpec())
    step = build_step(plan, replace(TRAIN, task="score"), jax.devices()[:1])
    with pytest.raises(CheckpointError, match=r"layers/mlp/gate_proj/kernel is .*90.*, should be .*92.*"):
        restore_on(step, trained.folder)


def test_the_newest_are_kept_and_older_ones_go_only_after_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_on((1, 1, 1))
    there: list[list[str]] = []
    rename = Path.rename

    def watch(path: Path, target: Path) -> Path:
        if path.name.startswith("step_"):  # an old one, on its way out
            there.append(sorted(p.name for p in tmp_path.glob("step_*")))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watch)
    for number in (2, 4, 6, 8):
        state = filled_state(step, number)
        path = native.save(tmp_path, state, step.plan, {}, keep_last=2)
        assert path == tmp_path / f"step_{number:08d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000006", "step_00000008"]
    assert there == [[f"step_{n:08d}" for n in (2, 4, 6)], [f"step_{n:08d}" for n in (4, 6, 8)]]
    assert native.find_newest(tmp_path, pytest.fail).step == 8


def test_saving_never_removes_the_checkpoint_it_has_just_written(tmp_path: Path) -> None:
    step = step_on((1, 1, 1))
    for number in (10, 20, 5):  # 5: a run that went back
        native.save(tmp_path, filled_state(step, number), step.plan, {}, keep_last=1)
        assert native.open_exactly(tmp_path / f"step_{number:08d}").step == number
