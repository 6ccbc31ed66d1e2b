"""Training checkpoints when a save is cut short, the disk is full or files go: the last whole counts.

Not here: what a whole checkpoint restores to (test_native.py).
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwise.checkpoints import native
from shardwise.errors import CheckpointError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import TrainState, abstract_state
from shardwise.steps.workload import Workload

CONFIG = ModelConfig(
    vocab_size=4000,
    embed_dim=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_position=8,
)
PLAN = plan_model(CONFIG, MeshSpec())
WORKLOAD = Workload("train", 1, 8, optimizer=OptimizerConfig())

WRITER = """
import sys
from dataclasses import replace
import jax
sys.path.insert(0, sys.argv[2])
import test_native_broken as this
from shardwise.checkpoints import native
for step in range(1, 10_000):
    native.save(sys.argv[1], this.state_of(step), this.PLAN, {}, keep_last=2)
    print(step, flush=True)
"""


def mesh() -> jax.sharding.Mesh:
    return build_mesh(MeshSpec(), jax.devices()[:1])


def state_of(step: int) -> TrainState:
    """A state of 6 MB in which every number is `step`, so that a mixture of two steps shows."""

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.full(shape.shape, step, shape.dtype), shape.sharding)

    return jax.tree.map(fill, abstract_state(PLAN, mesh(), WORKLOAD))


def check_whole(found: native.Found) -> None:
    """A checkpoint restores, and everything in it is of its step."""
    state = native.restore(found, PLAN, mesh(), abstract_state(PLAN, mesh(), WORKLOAD))
    assert found.step == found.meta["step"]
    for leaf in jax.tree.leaves(state):
        np.testing.assert_array_equal(np.asarray(leaf), found.step)


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        native.save(folder, state_of(step), PLAN, {}, keep_last=5)
    return folder


@pytest.fixture
def two(two_saved: Path, tmp_path: Path) -> Path:
    """A folder with complete checkpoints of steps 1 and 2."""
    return Path(shutil.copytree(two_saved, tmp_path / "two"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [delete, truncate, empty])
@pytest.mark.parametrize(
    "name", ["largest", "arrays/manifest.ocdbt", "arrays/_METADATA", "meta.json", "manifest.json"]
)
def test_a_damaged_newest_is_passed_over_with_the_reason_and_refused_when_named(
    two: Path, damage: Callable[[Path], None], name: str
) -> None:
    newest = two / "step_00000002"
    victim = largest(newest) if name == "largest" else newest / name
    damage(victim)
    told: list[str] = []
    found = native.find_newest(two, told.append)
    assert found.step == 1
    (line,) = told
    assert line.startswith("skipped checkpoint step_00000002: ")
    assert victim.name in line
    check_whole(found)
    with pytest.raises(CheckpointError, match=f"step_00000002 is broken: .*{victim.name}"):
        native.open_exactly(newest)


def test_without_a_whole_checkpoint_the_error_says_what_there_was(two: Path, tmp_path: Path) -> None:
    for newest in two.iterdir():
        delete(newest / "meta.json")
    told: list[str] = []
    with pytest.raises(CheckpointError, match="no complete checkpoint in .*leave --resume out"):
        native.find_newest(two, told.append)
    assert len(told) == 2
    with pytest.raises(CheckpointError, match="no checkpoint in "):
        native.find_newest(tmp_path / "nothing", told.append)
    with pytest.raises(CheckpointError, match="no such folder"):
        native.open_exactly(two / "step_00000007")


def test_other_folders_are_not_taken_for_checkpoints(two: Path) -> None:
    for name in ("step_3", "step_00000009.bak", "old_step_00000009", "step_abcdefgh"):
        shutil.copytree(two / "step_00000002", two / name)
    assert native.find_newest(two, pytest.fail).step == 2


def test_leftovers_of_a_killed_save_are_named_on_resume_and_removed_by_the_next_save(two: Path) -> None:
    leftover = two / ".step_00000009.partial"
    shutil.copytree(two / "step_00000002", leftover)
    told: list[str] = []
    assert native.find_newest(two, told.append).step == 2
    assert told == ["skipped checkpoint .step_00000009.partial: it was never completed"]
    native.save(two, state_of(3), PLAN, {}, keep_last=5)
    assert sorted(p.name for p in two.iterdir()) == [f"step_{n:08d}" for n in (1, 2, 3)]


def test_a_broken_checkpoint_of_the_same_step_is_replaced(two: Path) -> None:
    delete(largest(two / "step_00000002"))
    native.save(two, state_of(2), PLAN, {}, keep_last=5)
    assert sorted(p.name for p in two.iterdir()) == ["step_00000001", "step_00000002"]
    check_whole(native.find_newest(two, pytest.fail))


def test_a_kill_amid_the_removal_of_an_old_one_leaves_no_half_checkpoint_for_good(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **_: object) -> None:
        delete(path / "manifest.json")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        native.save(two, state_of(3), PLAN, {}, keep_last=1)
    monkeypatch.undo()
    assert native.find_newest(two, pytest.fail).step == 3
    native.save(two, state_of(4), PLAN, {}, keep_last=1)
    assert [p.name for p in two.iterdir()] == ["step_00000004"]


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["arrays", "meta.json", "manifest.json", "rename"])
def test_a_full_disk_leaves_the_older_ones_untouched_and_nothing_half_written(
    two: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = contents(two)
    write_text, rename = Path.write_text, Path.rename
    if where == "arrays":
        import orbax.checkpoint as ocp

        monkeypatch.setattr(ocp.Checkpointer, "save", no_space)
    elif where == "rename":
        monkeypatch.setattr(Path, "rename", lambda p, to: no_space() if "step_" in p.name else rename(p, to))
    else:
        monkeypatch.setattr(
            Path,
            "write_text",
            lambda p, *args, **kw: no_space() if p.name == where else write_text(p, *args, **kw),
        )
    with pytest.raises(CheckpointError, match="step 3 could not be written to .*No space left.*untouched"):
        native.save(two, state_of(3), PLAN, {}, keep_last=1)
    monkeypatch.undo()
    assert contents(two) == before
    native.save(two, state_of(3), PLAN, {}, keep_last=1)
    assert [p.name for p in two.iterdir()] == ["step_00000003"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on the size of files")
def test_a_disk_that_refuses_inside_the_array_writer_is_one_readable_error(two: Path) -> None:
    import resource

    before = contents(two)
    state = state_of(3)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # the state compresses to more
    try:
        with pytest.raises(CheckpointError, match="step 3 could not be written"):
            native.save(two, random_state(), PLAN, {}, keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert contents(two) == before
    native.save(two, state, PLAN, {}, keep_last=5)
    check_whole(native.find_newest(two, pytest.fail))


def random_state() -> TrainState:
    """Like state_of(3), but with numbers that no compression makes small."""
    rng = np.random.default_rng(0)

    def fill(array: jax.Array) -> jax.Array:
        return (
            array
            if array.ndim == 0
            else jax.device_put(rng.standard_normal(array.shape, np.float32), array.sharding)
        )

    return jax.tree.map(fill, state_of(3))


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[list[tuple[Path, subprocess.Popen[str]]]]:
    """Four processes that save steps 1, 2, 3, … without end, each into a folder of its own."""
    source = str(Path(native.__file__).parents[2])
    running = []
    for number in range(4):
        folder = tmp_path / f"run{number}"
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)],
            env=os.environ | {"PYTHONPATH": source, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append((folder, process))
    yield running
    for _, process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_killed_at_any_moment_of_saving_the_newest_whole_one_is_found(
    writers: list[tuple[Path, subprocess.Popen[str]]], tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for folder, process in writers:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 3:
                break
        time.sleep(rng.random() * 0.5)  # a save takes about 0.1 s
        process.kill()
        reported = [int(line) for line in process.stdout.read().split()] or [3]
        told: list[str] = []
        found = native.find_newest(folder, told.append)
        # What it had reported was complete; the one it was at may have become so before the report.
        assert found.step in (reported[-1], reported[-1] + 1)
        assert all("never completed" in line for line in told)
        check_whole(found)
        native.save(folder, state_of(found.step + 1), PLAN, {}, keep_last=2)
        assert sorted(p.name for p in folder.iterdir()) == [f"step_{found.step + n:08d}" for n in (0, 1)]
