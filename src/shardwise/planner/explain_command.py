"""`shardwise explain`: from its options to what it prints.

Not here: the numbers (explain.py, audit.py) and their tables (explain_view.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import jax

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Decision, Plan
from shardwise.partition.plan_file import differences, read_plan_file, save_plan
from shardwise.partition.rules import Override, Spec
from shardwise.planner import explain_view as view
from shardwise.planner.audit import ALLOWED_SHARE, Audit, audit
from shardwise.planner.choose import asked_mesh, plan_on
from shardwise.planner.explain import explain
from shardwise.runtime.chips import find_chip
from shardwise.runtime.files import write_new
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

if TYPE_CHECKING:
    from shardwise.cli.explain import ExplainOptions

DEFAULT_SEQ = 2048
"""Tokens a sequence where none are given."""


def run(options: ExplainOptions) -> int:
    """Print the explanation; returns the exit code: 1 if an audit leaves more unexplained than is allowed."""
    from shardwise.api import open_model, resolve_mesh
    from shardwise.families import config_from_hf

    name = options.model[0]
    config = config_from_hf(open_model(name).hf_config)
    mesh = asked_mesh(options)
    assert mesh is not None, "explain needs a mesh or a plan file"
    if options.needs_devices:
        mesh = resolve_mesh(mesh, options.task)
    workload = workload_of(options, config, mesh)
    console = view.console()
    quiet = options.json == "-"
    plan, choice = plan_on(options, config, mesh, workload, find_chip("v5p"))
    explanation = explain(plan, workload)
    # Both refuse what they do not find, which is to be known before anything is written.
    shown = None if options.tensor is None else matching(plan, options.tensor)
    other = None if options.swap is None else swapped(plan, options.swap)
    if options.save_plan is not None:
        save_plan(plan, options.save_plan)
    if options.json is not None:
        text = json.dumps(explanation.to_json(name), indent=1)
        if quiet:
            print(text)
            return 0
        write_new("--json", options.json, text + "\n")
    audits: dict[str, Audit] = {}
    if shown is not None:
        view.tensors(console, explanation, shown)
    elif other is not None and options.swap is not None:
        view.swap(console, explanation, explain(other, workload), options.swap)
        if options.audit:
            audits["with the swap, compiled"] = audit(other, workload, simulated(mesh))
    else:
        view.overview(console, name, explanation, choice)
    if options.audit:
        audits["compiled"] = audit(plan, workload, simulated(mesh))
    for title, found in audits.items():
        view.audited(console, found, title)
    for written in (options.json, options.save_plan):
        if written is not None:
            console.print(f"wrote {written}", markup=False)
    return int(any(found.unexplained_share > ALLOWED_SHARE for found in audits.values()))


def simulated(mesh: MeshSpec) -> list[jax.Device]:
    """The devices that a mesh takes, of those there are."""
    return jax.devices()[: mesh.num_devices]


def diff(first: str, second: str) -> int:
    """Print what sets two plan files apart; returns 0 if nothing, else 1, as `diff` does."""
    found = differences(read_plan_file(first), read_plan_file(second))
    for line in found or ["no difference"]:
        print(line)
    return int(bool(found))


def workload_of(options: ExplainOptions, config: ModelConfig, mesh: MeshSpec) -> Workload:
    """The step that the options describe."""
    seq = options.seq or min(DEFAULT_SEQ, config.max_position)
    if seq > config.max_position:
        raise ConfigError(f"--seq is {seq}, more than the model's context of {config.max_position}")
    batch = options.batch or mesh.dp * mesh.fsdp * options.grad_accum_steps
    cached = options.task in ("prefill", "decode")
    return Workload(
        options.task, batch, 1 if options.task == "decode" else seq, capacity=seq if cached else 0,
        compute_dtype=options.compute_dtype, param_dtype=options.param_dtype, remat=options.remat,
        grad_accum_steps=options.grad_accum_steps, choose=options.choose,
        optimizer=OptimizerConfig() if options.task == "train" else None,
    )  # fmt: skip


def matching(plan: Plan, pattern: str) -> tuple[str, ...]:
    """Paths that a regular expression finds.

    Raises:
        ConfigError: none.
    """
    found = tuple(path for path in plan.paths if re.search(pattern, path))
    if not found:
        raise ConfigError(f"--tensor {pattern!r} matches no tensor; {_nearest(pattern, plan.paths)}")
    return found


def _nearest(name: str, paths: Sequence[str]) -> str:
    near = get_close_matches(name, paths, n=1, cutoff=0.3)
    return f"nearest: {near[0]}" if near else f"there are {', '.join(paths)}"


@dataclass(frozen=True)
class _Move:
    path: str
    axis: str
    spec: Spec


def swapped(plan: Plan, text: str) -> Plan:
    """The same plan with one mesh axis of one tensor on another dim.

    Args:
        text: `PATH` or `PATH:axis`, PATH being part of one tensor's path; the axis is `tp` if the tensor is
            cut over it, else the only one.

    Raises:
        ConfigError: PATH finds none or several, the axis does not cut it, or no other dim can take it.
    """
    from shardwise.models.parameters import plan_model

    move = _move(plan, text)
    new = [_override(move.path, move.spec)]
    layout = plan.head_asked
    if move.path == plan.head_path:
        layout = None
        if plan.config.head_bias:  # which follows the layout otherwise
            new.append(_override("lm_head/bias", plan["lm_head/bias"].spec))
    rest = [path for path in plan.paths if not any(override.matches(path) for override in new)]
    deciding = [next((o for o in plan.overrides if o.matches(path)), None) for path in rest]
    old = [override for override in plan.overrides if override in deciding]
    try:
        return plan_model(plan.config, plan.mesh, plan.rules, (*new, *old), layout)
    except ConfigError as error:
        raise ConfigError(f"--swap {text!r}: {error}") from None


def _override(path: str, spec: Spec) -> Override:
    entries = ",".join(f"({','.join(axes)})" if axes else "None" for axes in spec)
    return Override.parse(f"^{re.escape(path)}$={entries}")


def _move(plan: Plan, text: str) -> _Move:
    name, _, axis = text.partition(":")
    axis = "tp" if axis == "mp" else axis
    d = plan[_matrix(plan, name, text)]
    cutting = [a for axes in d.spec for a in axes if plan.mesh.sizes[a] > 1]
    if not cutting:
        raise ConfigError(
            f"--swap {text!r}: nothing to swap, since no axis of mesh {plan.mesh} cuts {d.path} ({_sizes(d)})"
            f" by {d.decided_by}; take a larger fsdp or tp, or rules that cut it"
        )
    if not axis:
        axis = "tp" if "tp" in cutting else cutting[0] if len(cutting) == 1 else ""
    if axis not in cutting:
        cut = " and ".join(cutting)
        raise ConfigError(
            f"--swap {text!r}: {d.path} ({_sizes(d)}) is cut over {cut}; name one, as in"
            f" {d.path}:{cutting[0]}"
        )
    source = next(i for i, axes in enumerate(d.spec) if axis in axes)
    shape, reasons = plan.padding.use_shape(d.axes), []
    for dim in _other_dims(d, source):
        axes = (*d.spec[dim], axis)
        if shape[dim] % plan.mesh.size(axes) == 0:
            spec = [tuple(a for a in axes if a != axis) for axes in d.spec]
            # tp outside fsdp, as the rules place them: the parts of tp then stay together.
            spec[dim] = (axis, *spec[dim]) if axis == "tp" else (*spec[dim], axis)
            return _Move(d.path, axis, tuple(spec))
        parts = "×".join(a for a in axes if plan.mesh.sizes[a] > 1)
        reasons.append(f"{d.axes[dim]} {shape[dim]} by {parts} = {plan.mesh.size(axes)}")
    raise ConfigError(
        f"--swap {text!r}: no other dim of {d.path} can take {axis}; not divided are {', '.join(reasons)}"
        f"{_other_sizes(plan, d, axis)}"
    )


def _other_sizes(plan: Plan, d: Decision, axis: str) -> str:
    """The end of a message: sizes of a mesh axis with which it can be swapped, if there are any."""
    free = {
        logical: size // plan.mesh.size([a for a in axes if a != axis])
        for logical, size, axes in zip(d.axes, d.use_shape, d.spec, strict=True)
        # The dim that tp cuts is padded for it; of others, these are as large whatever tp is.
        if logical != "layers" and (axis != "tp" or (logical in ("embed", "head_dim") and axis not in axes))
    }
    dims = 1 if axis == "tp" else 2  # another than the one that it cuts
    most = max(free.values(), default=1)
    fits = (n for n in range(2, most + 1) if sum(size % n == 0 for size in free.values()) >= dims)
    near = sorted(fits, key=lambda n: abs(n - plan.mesh.sizes[axis]))[:3]
    return f"; take a mesh with another {axis}, such as {', '.join(map(str, near))}" if near else ""


def _sizes(d: Decision) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in zip(d.axes, d.use_shape, strict=True))


def _matrix(plan: Plan, name: str, text: str) -> str:
    """The path of the one matrix that `name` is a part of."""
    found = [path for path in plan.paths if name == path] or [path for path in plan.paths if name in path]
    matrices = {d.path: d.use.kind in ("kernel", "embedding", "head") for d in plan.decisions}
    kernels = [path for path in found if matrices[path]]
    if len(kernels) == 1:
        return kernels[0]
    if kernels:
        raise ConfigError(f"--swap {text!r} finds {', '.join(kernels)}; name one")
    if plan.config.tie_embeddings and name and name in "lm_head/kernel":
        raise ConfigError(f"--swap {text!r}: this model's head is its embedding table; name embed/table")
    if found:
        raise ConfigError(
            f"--swap {text!r} finds only {', '.join(found)}; name a matrix, which has another dim"
        )
    near = _nearest(name, [path for path in plan.paths if matrices[path]])
    raise ConfigError(f"--swap {text!r} finds no matrix; {near}")


def _other_dims(d: Decision, source: int) -> list[int]:
    """Dims that could take the axis: those on the other side of the product first."""
    split = len(d.axes) - d.use.num_inputs if d.use.kind == "kernel" else len(d.axes) - 1
    first = int(d.stacked)
    outputs, inputs = list(range(first, split)), list(range(split, len(d.axes)))
    sides = (inputs, outputs) if source < split else (outputs, inputs)
    return [dim for side in sides for dim in side if dim != source]
