"""What the compiler makes of a step on one device of a mesh: collectives, products and buffers.

The program is read right after XLA's SPMD partitioner: later passes of the CPU compiler widen bfloat16, turn
reduce-scatters into all-reduces and merge collectives, so that its final program misleads. Not here: what the
step should cost by the plan.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardwiseError
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.collectives import Collective, Op, Phase
from shardwise.planner.hlo import Frame, Instruction, Module, Shape, parse_module
from shardwise.planner.origins import argument, gradient_of
from shardwise.planner.replica_groups import (
    Groups,
    expand_groups,
    expand_pairs,
    group_axes,
    pair_axes,
)
from shardwise.planner.scalars import Site
from shardwise.planner.slices import sliced_axes

if TYPE_CHECKING:
    import jax

    from shardwise.steps.build import Step

_PACKAGE = str(Path(__file__).parents[1]) + "/"
_COLLECTIVES: dict[str, Op] = {
    "all-gather": "all-gather", "all-reduce": "all-reduce", "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all", "collective-permute": "collective-permute",
    "ragged-all-to-all": "all-to-all", "collective-broadcast": "collective-permute",
}  # fmt: skip
"""XLA's collectives and what each counts as."""
_NO_BUFFER = frozenset({
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "opt-barrier",
    "optimization-barrier", "after-all", "partition-id", "replica-id",
})  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """An array that an instruction makes, on one device, before fusion: not each is ever in memory."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    instruction: Instruction
    in_loop: bool


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products of one device in one step."""

    in_loops: int
    outside: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.in_loops + self.outside


@dataclass(frozen=True)
class PartitionedModule:
    """One device's program, as the partitioner left it."""

    module: Module = field(repr=False)

    @classmethod
    def from_text(cls, text: str) -> PartitionedModule:
        """From XLA's text of a module."""
        return cls(parse_module(text))

    def collectives(self, mesh: MeshSpec | jax.sharding.Mesh) -> list[Collective]:
        """Every collective between devices, in the order of the program.

        Args:
            mesh: that of the step; groups of devices are told as its axes.

        An all-reduce of which each device keeps only a slice along the group is told as a reduce-scatter,
        with a note: the CPU compiler has no other form for it.
        """
        sizes = mesh.sizes if isinstance(mesh, MeshSpec) else {str(k): v for k, v in mesh.shape.items()}
        found: dict[tuple[int, Collective], int] = {}  # one that is reached in several ways counts once
        for site, instruction in self._visits:
            for c in self._read(site, instruction, sizes) if _kind(instruction) else ():
                key = id(instruction), replace(c, count=0)
                found[key] = found.get(key, 0) + c.count
        return [replace(c, count=count) for (_, c), count in found.items()]

    def flops(self) -> Flops:
        """2 · result · contracted size of every dot, times the trips of the loops around it."""
        sums = {True: 0, False: 0}
        for site, instruction in self._visits:
            if instruction.op == "dot":
                left = site.computation.instructions[instruction.operands[0]].shapes[0]
                contracted = math.prod(left.dims[d] for d in instruction.numbers("lhs_contracting_dims"))
                sums[site.in_loop] += 2 * instruction.shapes[0].elements * contracted * site.runs
        return Flops(sums[True], sums[False])

    def buffers(self) -> Iterator[Buffer]:
        """Every array that an instruction makes; not arguments, and nothing twice that only passes through.

        Each instruction counts once, however often it runs.
        """
        seen: dict[int, None] = {}
        for site, instruction in self._visits:
            if instruction.op not in _NO_BUFFER and id(instruction) not in seen:
                seen[id(instruction)] = None
                for shape in instruction.shapes:
                    yield Buffer(shape.bytes, shape.dims, shape.jax_dtype, instruction, site.in_loop)

    @cached_property
    def _visits(self) -> list[tuple[Site, Instruction]]:
        """Each instruction under each chain of callers from the entry, what a call runs behind the call."""
        return list(_walk(Site(self.module, self.module.computations[self.module.entry])))

    @cached_property
    def _differentiates(self) -> bool:
        return any("transpose(" in i.op_name for _, i in self._visits)

    def _read(self, site: Site, instruction: Instruction, sizes: dict[str, int]) -> list[Collective]:
        name = _kind(instruction)
        assert name is not None, "no collective"
        operands = [shape for operand in instruction.operands for shape in _shapes_of(site, operand)]
        payload, notes = sum(shape.bytes for shape in operands), list(site.notes)
        if name != _COLLECTIVES[name]:
            notes.append(f"compiled as {name}")
        if name == "collective-permute":
            pairs = expand_pairs(instruction.attributes.get("source_target_pairs", ""))
            axes: tuple[str, ...] | None = pair_axes(pairs, sizes)
            alone = not axes
        else:
            groups = _groups(instruction, math.prod(sizes.values()))
            axes, alone = group_axes(groups, sizes), all(len(group) == 1 for group in groups)
            if axes is None:
                notes.append(f"groups {groups}")
            if name == "all-gather":  # what a -start returns holds the operand too
                payload *= len(groups[0])
        if alone:
            return []
        dtype = operands[0].jax_dtype if operands else "opaque"
        one = Collective(
            _COLLECTIVES[name], axes or (), dtype, payload, site.runs, site.in_loop,
            self._phase(site, instruction), self._cause(site, instruction), "; ".join(notes),
        )  # fmt: skip
        along = sliced_axes(site, instruction, one.axes, sizes) if name == "all-reduce" else ()
        return _as_scattered(one, along, sizes)

    def _phase(self, site: Site, instruction: Instruction) -> Phase:
        """JAX names what it derives: `transpose(…)` holds the backward pass, with what it computes again;
        `jvp(…)` alone the forward pass. What a step with gradients does outside both is the update. A loss
        that forms its gradient at once does so in the forward pass."""
        name = _op_path(site, instruction)
        if "transpose(" in name:
            return "backward"
        return "forward" if "jvp(" in name or not self._differentiates else "update"

    def _cause(self, site: Site, instruction: Instruction) -> str:
        """The argument that is sent, or whose gradient is, where it is one; the primitive; and the lines of
        this package (or else the innermost line) that it comes from."""
        operation = _op_path(site, instruction).rpartition("/")[2] or instruction.name
        sent = argument(site, instruction.operands[0]) if instruction.operands else ""
        if not sent and self._differentiates and (updated := gradient_of(site, instruction)):
            sent = f"gradient of {updated}"
        chain, up = self.module.frames(instruction), site
        shown = [_show(frame) for frame in chain[:1]]
        while up.parent is not None and up.caller is not None:  # a shard_map's body has a stack of its own
            if up.caller.op == "call":
                chain += self.module.frames(up.caller)
            up = up.parent
        own = [f for f in chain if re.match(_OWN, f.file) and not re.search(_WRAPPERS, f.function)]
        shown = list(dict.fromkeys(_show(frame) for frame in own))[:_MOST_FRAMES] or shown
        where = f"{operation} at {' < '.join(shown)}" if shown else operation
        return f"{sent}: {where}" if sent else where


_MOST_FRAMES = 5
_OWN = re.escape(_PACKAGE) + "(?!planner/|cli/)"
"""Files of this package that steps are made of; who asked for the step says nothing."""
_WRAPPERS = r"<lambda>$|^Step\.lower$|^partitioned_module$|^(loss_sum|loss_and_gradients.*\.one)$"
"""Functions that are on the stack of everything, or only hand on."""


def _show(frame: Frame) -> str:
    function = frame.function.replace(".<locals>", "")
    where = frame.file.removeprefix(_PACKAGE)
    where = where if where != frame.file else where.rpartition("/")[2]
    return f"{where}:{frame.line}" + (f" {function}" if function else "")


def _walk(site: Site) -> Iterator[tuple[Site, Instruction]]:
    for instruction in site.computation.instructions.values():
        yield site, instruction
        for name, runs, loop, note in _callees(site, instruction):
            if name in site.module.computations and runs:
                notes = (*site.notes, note) if note and note not in site.notes else site.notes
                yield from _walk(
                    Site(
                        site.module, site.module.computations[name], site, instruction, site.runs * runs,
                        site.in_loop or loop, _op_path(site, instruction), notes,
                    )
                )  # fmt: skip


def _callees(site: Site, instruction: Instruction) -> Iterator[tuple[str, int, bool, str]]:
    """(computation, runs, whether in a loop, note). The scalar functions of reductions are left out."""
    op = instruction.op
    if op == "while":
        trips, how = site.trips(instruction)
        note = "" if trips is not None else f"in a loop of unknown length ({how}), counted once"
        for name in instruction.called("body"):
            yield name, 1 if trips is None else trips, True, note
        for name in instruction.called("condition"):
            yield name, 1 if trips is None else trips + 1, True, note
    elif op == "conditional":
        for name in instruction.called("branch_computations", "true_computation", "false_computation"):
            yield name, 1, False, "in one branch of a condition, counted as if taken"
    elif op == "call":
        for name in instruction.called("to_apply"):
            yield name, 1, False, ""
    elif not op.endswith(("-done", "-update")):
        for name in instruction.called("calls", "called_computations"):
            yield name, 1, False, ""


def _kind(instruction: Instruction) -> str | None:
    """The collective's name, without the -start of asynchronous forms; None for anything else."""
    op = instruction.op.removesuffix("-start")
    return op if op in _COLLECTIVES else None


def _shapes_of(site: Site, operand: str) -> tuple[Shape, ...]:
    made = site.computation.instructions.get(operand)
    return made.shapes if made else ()


def _groups(instruction: Instruction, num_devices: int) -> Groups:
    """Partition ids of every group.

    Without a channel the groups are of replicas, of which there is one; without global ids, an all-reduce
    over replicas takes all partitions together.
    """
    attributes = instruction.attributes
    text = attributes.get("replica_groups", "{}")
    if text.startswith("mesh[") and "device_ids" in attributes:  # its own comma looks like an attribute's
        text += f", device_ids={attributes['device_ids']}"
    if "channel_id" not in attributes and attributes.get("use_global_device_ids") != "true":
        return [[device] for device in range(num_devices)]
    over_replicas = _kind(instruction) in ("all-gather", "all-reduce", "reduce-scatter")
    if over_replicas and attributes.get("use_global_device_ids") != "true":
        return [list(range(num_devices))]
    return expand_groups(text, num_devices)


def _as_scattered(one: Collective, along: tuple[str, ...], sizes: Mapping[str, int]) -> list[Collective]:
    """An all-reduce of which only a slice along some of its axes is kept: a reduce-scatter over these, and an
    all-reduce of the slice over the rest."""
    if not along:
        return [one]
    rest = tuple(axis for axis in one.axes if axis not in along)
    over = f" over {', '.join(one.axes)}" if rest else ""
    note = "; ".join(filter(None, [one.note, f"compiled as all-reduce{over} + slice"]))
    parts = [replace(one, op="reduce-scatter", axes=along, note=note)]
    if rest:
        slice_bytes = one.payload // math.prod(sizes[axis] for axis in along)
        parts.append(replace(one, axes=rest, payload=slice_bytes, note=note))
    return parts


def _op_path(site: Site, instruction: Instruction) -> str:
    """op_name, with that of the call in front where the body of a shard_map leaves it out."""
    name = instruction.op_name
    return name if name.startswith("jit(") or not site.prefix else f"{site.prefix}/{name}".rstrip("/")


def partitioned_module(step: Step) -> PartitionedModule:
    """Lower and compile a step on its devices (fake ones will do) and read what the partitioner made of it.

    The step's arrays are never made and its machine code never runs, so that it is built the cheapest way.

    Raises:
        ShardwiseError: the compiler left no such module.
    """
    return partitioned_lowering(step.lower())


def partitioned_lowering(lowered: jax.stages.Lowered) -> PartitionedModule:
    """The same for anything that `jax.jit(…).lower(…)` gave."""
    with tempfile.TemporaryDirectory(prefix="shardwise-hlo-") as folder, no_compile_cache():
        lowered.compile(compiler_options=_options(folder))
        return partitioned_in(folder)


def partitioned_in(folder: str | Path) -> PartitionedModule:
    """The module behind the partitioner, from what XLA wrote into a folder with `dump_options`.

    Raises:
        ShardwiseError: the compiler left no such module.
    """
    files = sorted(Path(folder).glob("*.txt"))
    after = [f for f in files if re.search(r"\.after_[\w-]*spmd-partitioning", f.name)]
    # a program for one device is not partitioned
    after = after or [f for f in files if f.name.endswith(".before_optimizations.txt")]
    if not after:
        kept = ", ".join(f.name for f in files[:5]) or "nothing"
        raise ShardwiseError(
            f"XLA left no module behind its spmd-partitioning pass (it wrote {kept}); the audit needs a"
            " JAX whose compiler has that pass: 0.10 and 0.12 do. Please report the version of jaxlib"
        )
    return PartitionedModule.from_text(after[-1].read_text())


def dump_options(folder: str) -> dict[str, Any]:
    """Options with which any of XLA's compilers writes what `partitioned_in` reads."""
    return {
        "xla_dump_to": folder,
        "xla_dump_hlo_pass_re": "spmd-partitioning",
        "xla_dump_hlo_as_text": True,
        "xla_dump_large_constants": True,  # tables with one number per device tell who keeps which slice
    }


def _options(folder: str) -> dict[str, Any]:
    import jaxlib

    options = {
        **dump_options(folder),
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    if jaxlib.__version__.startswith("0.10."):  # later versions do not know it
        options["xla_cpu_use_fusion_emitters"] = False
    return options


@contextmanager
def no_compile_cache() -> Iterator[None]:
    """Nothing compiled is taken from JAX's cache on disk or put there: a program found there is not compiled,
    so that nothing would be written out. JAX reads the setting once, hence the resets."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
