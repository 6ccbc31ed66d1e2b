"""Training checkpoints: parameters, optimizer state and place in the data, written whole or not at all.

A checkpoint is a folder `step_00000012` that holds Orbax's arrays, `meta.json`, and `manifest.json`, which
lists every file with its size. It is written under another name and renamed when complete, and older ones
are removed only then. Not here: Hugging Face folders (export.py).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwise.checkpoints.hf_writer import fsync
from shardwise.errors import CheckpointError
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import Padding
from shardwise.partition.plan import Plan, named_sharding
from shardwise.partition.rules import Spec
from shardwise.runtime.distributed import is_main_process
from shardwise.steps.train import TrainState

_NAME = re.compile(r"step_(\d{8,})")
_MANIFEST, _META, _ARRAYS = "manifest.json", "meta.json", "arrays"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: Path
    step: int
    meta: dict[str, Any]
    """What `save` was given, and the mesh it ran on."""


def save(folder: str | Path, state: TrainState, plan: Plan, meta: dict[str, Any], keep_last: int) -> Path:
    """Write a checkpoint, then remove older ones so that `keep_last` are left with it.

    Args:
        meta: whatever the caller wants back, as JSON; `step`, `mesh` and `true_shapes` are added.

    Raises:
        CheckpointError: the disk refuses; the older checkpoints are untouched and nothing half-written is
            left.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).expanduser().absolute()
    step = int(state.step)
    final = folder / f"step_{step:08d}"
    partial = folder / f".{final.name}{_PARTIAL}"

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in _partials(folder):  # of runs that were killed while they saved
            shutil.rmtree(leftover)
        partial.mkdir()

    def complete() -> None:
        described = {**meta, "step": step, "mesh": str(plan.mesh), "true_shapes": _true_shapes(plan)}
        (partial / _META).write_text(json.dumps(described, indent=1))
        files = {str(f.relative_to(partial)): f.stat().st_size for f in partial.rglob("*") if f.is_file()}
        (partial / _MANIFEST).write_text(json.dumps(files))
        for entry in [*partial.rglob("*"), partial]:
            fsync(entry)
        replaced = None
        if final.exists():  # a broken one, from before the run was resumed from an earlier step
            replaced = _set_aside(final)
        partial.rename(final)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)
        older = [found for found in _complete(folder) if found.step < step]
        for old in older[keep_last - 1 :]:
            with contextlib.suppress(OSError):  # it stays whole then, and the new one is complete
                shutil.rmtree(_set_aside(old.path))

    def write() -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(partial / _ARRAYS, args=ocp.args.PyTreeSave(_named(state)))

    try:
        _on_first(prepare)
        write()
        _on_first(complete)
    except (OSError, ValueError) as error:
        if is_main_process():
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder}: {error}; older checkpoints are"
            " untouched"
        ) from error
    return final


def find_newest(folder: str | Path, report: Callable[[str], None]) -> Found:
    """The newest complete checkpoint below `folder`.

    Args:
        report: told of every broken one that is passed over, and why.

    Raises:
        CheckpointError: there is no complete one.
    """
    folder = Path(folder).expanduser().absolute()
    candidates = sorted([*_numbered(folder), *_partials(folder)], key=_step, reverse=True)
    for path in candidates:
        problem = _problem(path)
        if problem is None:
            return _found(path)
        report(f"skipped checkpoint {path.name}: {problem}")
    what = "no complete checkpoint" if candidates else "no checkpoint"
    raise CheckpointError(f"{what} in {folder}; leave --resume out to start anew")


def open_exactly(path: str | Path) -> Found:
    """One named checkpoint; CheckpointError if it is missing or broken."""
    path = Path(path).expanduser().absolute()
    problem = _problem(path)
    if problem:
        raise CheckpointError(f"checkpoint {path} is broken: {problem}")
    return _found(path)


def restore(found: Found, plan: Plan, mesh: jax.sharding.Mesh, wanted: TrainState) -> TrainState:
    """Read a checkpoint onto any mesh.

    Args:
        found: a complete checkpoint of the same model.
        wanted: shapes, dtypes and shardings of the state (abstract_state).

    Returns:
        The state, with the cut and padding of `plan`, whatever those of the run that saved it were.

    Raises:
        CheckpointError: it is of a model of other sizes, or of another optimizer.
    """
    import orbax.checkpoint as ocp

    _check_sizes(found, plan)
    handler = ocp.PyTreeCheckpointHandler()
    names = _named(wanted)
    with ocp.Checkpointer(handler) as reader:
        stored = reader.metadata(found.path / _ARRAYS).item_metadata.tree
        if set(stored) != set(names):
            odd = sorted(set(stored) ^ set(names))
            raise CheckpointError(
                f"checkpoint {found.path} holds another training state: {', '.join(odd[:5])}"
                f"{' …' if len(odd) > 5 else ''} differ; the optimizer and the model must be those of the"
                " saved run"
            )
        shapes = {
            name: jax.ShapeDtypeStruct(
                stored[name].shape, want.dtype, sharding=_reading(mesh, want, tuple(stored[name].shape))
            )
            for name, want in names.items()
        }
        arguments = ocp.args.PyTreeRestore(
            shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes)
        )
        arrays = reader.restore(found.path / _ARRAYS, args=arguments)
    old_padding = Padding.choose(plan.config, MeshSpec.parse(found.meta["mesh"]).tp)
    owners = _owners(wanted, plan)
    for name, want in names.items():
        if arrays[name].shape != want.shape or (owners[name] and old_padding != plan.padding):
            owner = owners[name]
            assert owner is not None, "only arrays that follow a parameter have padding"
            arrays[name] = _repadder(plan, old_padding, owner, want.sharding)(arrays.pop(name))
    return jax.tree.unflatten(jax.tree.structure(wanted), [arrays[name] for name in names])


def _check_sizes(found: Found, plan: Plan) -> None:
    """Padding could hide that a tensor had another size: compare true shapes."""
    saved, now = found.meta["true_shapes"], _true_shapes(plan)
    odd = [path for path in sorted(saved.keys() | now.keys()) if saved.get(path) != now.get(path)]
    if odd:
        none = "not there"
        details = [f"{path} is {saved.get(path, none)}, should be {now.get(path, none)}" for path in odd[:5]]
        more = " …" if len(odd) > 5 else ""
        raise CheckpointError(
            f"checkpoint {found.path} is of a model of other sizes: {', '.join(details)}{more}"
        )


def _true_shapes(plan: Plan) -> dict[str, list[int]]:
    return {decision.path: list(decision.true_shape) for decision in plan.decisions}


@lru_cache(maxsize=64)
def _repadder(
    plan: Plan, old: Padding, owner: str, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
    """One compiled change of padding for a parameter and all moments that follow it."""
    decision = plan[owner]

    def convert(array: jax.Array) -> jax.Array:
        return plan.padding.pad(old.trim(array, decision.axes), decision.axes, decision.shape)

    return jax.jit(convert, out_shardings=sharding)


def _reading(
    mesh: jax.sharding.Mesh, want: jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> jax.sharding.NamedSharding:
    """A sharding for an array as stored: the wanted one, or, for another padding, whatever divides it."""
    if shape == want.shape:
        return want.sharding
    axes = tuple(name for name, size in mesh.shape.items() if size > 1)
    total = int(np.prod([mesh.shape[name] for name in axes]))
    spec: Spec = ((),) * len(shape)
    for dim in sorted(range(len(shape)), key=lambda dim: -shape[dim]):
        if shape[dim] % total == 0:
            spec = tuple(axes if d == dim else () for d in range(len(shape)))
            break
    return named_sharding(mesh, spec)


def _named(state: TrainState) -> dict[str, Any]:
    """Leaves of the state under flat names that no path separator splits."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").replace("/", ".")


def _owners(state: TrainState, plan: Plan) -> dict[str, str | None]:
    """Name of each leaf → path of the parameter that it follows."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        _name(path): next(
            (k.key for k in path if isinstance(k, jax.tree_util.DictKey) and k.key in plan), None
        )
        for path, _ in leaves
    }


def _numbered(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first, complete or not."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=_step, reverse=True)


def _partials(folder: Path) -> list[Path]:
    """What was being written when a process ended."""
    return sorted(folder.glob(f".step_*{_PARTIAL}"))


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint that is to be removed, so that a kill amid the removal leaves no half one behind.

    What lies under the new name is no checkpoint to anyone, and the next save removes it.
    """
    return path.rename(path.with_name(f".{path.name}.removed{_PARTIAL}"))


def _complete(folder: Path) -> list[Found]:
    return [_found(path) for path in _numbered(folder) if _problem(path) is None]


def _step(path: Path) -> int:
    match = _NAME.search(path.name)
    return int(match.group(1)) if match else -1


def _problem(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    if not path.is_dir():
        return "no such folder"
    if path.name.endswith(_PARTIAL):
        return "it was never completed"
    try:
        files = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError):
        files = None
    if not isinstance(files, dict) or _META not in files:
        return f"{_MANIFEST} is missing or broken, so it was never completed"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _found(path: Path) -> Found:
    meta = json.loads((path / _META).read_text())
    return Found(path, int(meta["step"]), meta)


def _on_first(work: Callable[[], None]) -> None:
    """Run `work` on process 0 while the others wait; if it fails, all raise, so that none waits for ever."""
    problem: OSError | None = None
    if is_main_process():
        try:
            work()
        except OSError as error:
            problem = error
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = multihost_utils.broadcast_one_to_all(np.asarray(problem is not None))
        if failed and problem is None:
            problem = OSError("process 0 could not write it and says why")
    if problem is not None:
        raise problem
