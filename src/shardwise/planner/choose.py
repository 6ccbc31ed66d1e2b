"""From a command's options to its Plan: mesh, rules, head layout or a plan file.

Every command that takes a mesh comes through here, so that its options mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.api import plan, resolve_mesh
from shardwise.errors import ConfigError, MeshError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.plan_file import mesh_of, read_plan_file, restore_plan, save_plan
from shardwise.partition.rules import HeadLayout
from shardwise.planner.head_choice import HeadChoice, choose_head_layout
from shardwise.runtime.chips import Chip, chip_of_device, find_chip
from shardwise.runtime.distributed import is_main_process
from shardwise.steps.workload import Workload

if TYPE_CHECKING:
    from shardwise.cli.options import MeshOptions
    from shardwise.planner.search import Plans

Say = Callable[[str], None]


def plan_for(
    options: MeshOptions,
    config: ModelConfig,
    task: str,
    workload: Callable[[MeshSpec], Workload],
    say: Say,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """The plan that a command's options ask for, on the devices that there are.

    Args:
        task: for the default mesh: `train` is all fsdp, others all tp.
        workload: the step that the head layout is chosen for, on a resolved mesh.
        say: prints a line.
        devices: default all.

    Raises:
        ConfigError, MeshError: options that this model and these devices cannot follow.
    """
    # As text where there is text: a mistake in it is then told along with the devices that there are.
    if devices is None:
        import jax

        devices = jax.devices()
    if options.mesh == AUTO:
        mesh = auto_mesh(
            config, workload(MeshSpec()), len(devices), say,
            lambda hosting: plan_on(
                options, config, hosting.mesh, workload(hosting.mesh), hosting.system.chip
            )[0],
        )  # fmt: skip
    else:
        asked = asked_mesh(options) if options.mesh is None else options.mesh
        mesh = resolve_mesh(asked, task, devices)
    made, choice = plan_on(options, config, mesh, workload(mesh), _chip(devices[0]))
    if options.save_plan is not None and is_main_process():  # the processes' plans are the same
        save_plan(made, options.save_plan)
    lines = [choice.summary()] if choice is not None else []
    lines += [f"note: {note}" for note in made.notes]
    lines += [f"wrote {options.save_plan}"] if options.save_plan is not None else []
    for line in lines:
        say(line)
    return made


AUTO = "auto"
"""What --mesh says to ask the planner."""


def auto_mesh(
    config: ModelConfig, workload: Workload, num_devices: int, say: Say, plans: Plans | None = None
) -> MeshSpec:
    """The planner's choice for a step on this machine's devices.

    Args:
        workload: the step, with the batch as asked for.
        plans: the plan on each mesh under the command's rules, overrides and head layout; default the usual.

    Raises:
        MeshError: the machine is not in the table of chips, or no mesh of it does.
    """
    from shardwise.planner.hardware import local_system
    from shardwise.planner.search import Request, search

    system = local_system()
    if system is None or system.num_devices != num_devices:
        raise MeshError(
            "--mesh auto: this machine's devices are not in the table of chips; give the sizes, such as"
            " dp:1,fsdp:-1,tp:1"
        )
    trains = workload.task == "train"
    request = Request(
        config, "train" if trains else "decode" if workload.capacity else "score", workload.batch,
        workload.capacity or workload.length, workload.compute_dtype, workload.param_dtype,
        remat=workload.remat if trains else None,
        grad_accum_steps=workload.grad_accum_steps if trains else None,
    )  # fmt: skip
    ranking = search(request, system, plans)
    if not ranking.fitting:
        reasons = [f"{c.mesh}: {c.refused}" for c in ranking.refused[:2]]
        reasons += [f"{mesh}: {why}" for mesh, why in ranking.impossible[:2]]
        raise MeshError(
            f"--mesh auto: no mesh of {system} does ({'; '.join(reasons)}); see `shardwise plan`, or give a"
            " mesh"
        )
    best = ranking.fitting[0]
    say(
        f"mesh auto: {best.mesh}, predicted the fastest of {len(ranking.fitting)} that fit {system}"
        f" ({best.cost.total:.3g} s a step)"
    )
    return best.mesh


def _chip(device: Any) -> Chip:
    """The chip whose rates the head layouts are compared with: the device's, or one of its kind."""
    usual = {"tpu": "v5p", "gpu": "h100", "cuda": "h100"}.get(device.platform, "cpu")
    return chip_of_device(device.device_kind, device.platform) or find_chip(usual)


def asked_mesh(options: MeshOptions) -> MeshSpec | None:
    """The mesh of `--mesh`, which may hold a -1, or of the plan file; None where neither is given."""
    if options.mesh == AUTO:
        raise ConfigError(
            "--mesh auto is for commands that run on this machine's devices; for a plan on any machine use"
            " `shardwise plan`"
        )
    if options.mesh is not None:
        return MeshSpec.parse(options.mesh)
    return None if options.plan is None else mesh_of(read_plan_file(options.plan), options.plan)


def plan_on(
    options: MeshOptions, config: ModelConfig, mesh: MeshSpec, workload: Workload, chip: Chip
) -> tuple[Plan, HeadChoice | None]:
    """The same on a given mesh, whether or not it is there, and the comparison behind its head layout, if
    there was one; saves nothing."""
    choice = None
    if options.plan is not None:
        made = restore_plan(
            read_plan_file(options.plan), options.plan, config, mesh,
            lambda *given: plan_model(config, mesh, *given),
        )  # fmt: skip
    else:
        choice = head_choice(options, config, mesh, workload, chip)
        layout = _layout(options) if choice is None else choice.layout
        made = _make(options, config, mesh, layout)
    return made, choice


def head_choice(
    options: MeshOptions, config: ModelConfig, mesh: MeshSpec, workload: Workload, chip: Chip
) -> HeadChoice | None:
    """The comparison behind `--head-layout auto`; None where there is nothing to choose.

    There is not without a head over the vocabulary, with a layout asked for, a tp of one, rules that leave tp
    out, or an override on the head, be it the user's or one of the rules.
    """
    if options.head_layout != "auto" or mesh.tp == 1 or config.head_path is None:
        return None
    base = _make(options, config, mesh, None)
    overridden = any(o.matches(config.head_path) for o in (*base.overrides, *base.rules.overrides))
    if overridden or "tp" not in base.rules.mesh_axes("vocab"):
        return None
    return choose_head_layout(lambda layout: _make(options, config, mesh, layout), workload, chip)


def _layout(options: MeshOptions) -> HeadLayout | None:
    return None if options.head_layout == "auto" else options.head_layout


def _make(options: MeshOptions, config: ModelConfig, mesh: MeshSpec, layout: HeadLayout | None) -> Plan:
    return plan(config, mesh, rules=options.rules, overrides=options.override, head_layout=layout)
