"""The Plan: one immutable value that says, for every parameter, how it is cut and padded, and by which rule.

Loading, training, evaluation, generation, checkpoints and export all read the same Plan. It needs no arrays
and no devices. Not here: arrays themselves (checkpoints/, steps/) and what a cut costs (planner/).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import Padding, round_up
from shardwise.partition.rules import Override, Rules, Spec

if TYPE_CHECKING:
    import jax

    from shardwise.models.config import ModelConfig


@dataclass(frozen=True)
class ParamSpec:
    """What a model declares of one parameter."""

    path: str
    """Name, like `layers/attn/q_proj/kernel`; below `layers/` one array holds all layers."""
    axes: tuple[str, ...]
    """Logical axis of each dim."""
    init: str
    """How a fresh one is drawn: `normal`, `zeros` or `ones`."""


@dataclass(frozen=True)
class Decision:
    """How one parameter lies on the mesh, and why."""

    path: str
    axes: tuple[str, ...]
    init: str
    true_shape: tuple[int, ...]
    """Shape in the checkpoint."""
    use_shape: tuple[int, ...]
    """Shape that the computation sees: padded so that `tp` divides it."""
    shape: tuple[int, ...]
    """Shape stored; larger than `use_shape` only where `fsdp` had no dim that it divides."""
    spec: Spec
    """Mesh axes that cut each dim."""
    decided_by: str
    """The rules or the override that gave `spec`."""
    notes: tuple[str, ...] = ()
    """Padding and fallbacks, one sentence each."""

    @property
    def stacked(self) -> bool:
        """Whether the first dim runs over layers."""
        return self.axes[0] == "layers"

    def without_fsdp(self) -> Spec:
        """The spec at use: cut by `tp` only, after FSDP's all-gather."""
        return tuple(tuple(axis for axis in axes if axis != "fsdp") for axes in self.spec)


@dataclass(frozen=True)
class Plan:
    """A resolved mesh and one decision per parameter; hashable, so that it can key compiled steps."""

    config: ModelConfig
    mesh: MeshSpec
    rules: Rules
    padding: Padding
    decisions: tuple[Decision, ...]

    @cached_property
    def _by_path(self) -> dict[str, Decision]:
        return {decision.path: decision for decision in self.decisions}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.config, self.mesh, self.rules, self.decisions))

    def __getitem__(self, path: str) -> Decision:
        return self._by_path[path]

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    @property
    def paths(self) -> tuple[str, ...]:
        """Parameter paths in the model's order."""
        return tuple(self._by_path)

    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.rules.mesh_axes("batch")

    def batch_multiple(self) -> int:
        """The batch must be a multiple of this: the product of the sizes of the axes that split it."""
        return self.mesh.size(self.batch_axes())

    def sharding(self, mesh: jax.sharding.Mesh, path: str) -> jax.sharding.NamedSharding:
        """Sharding of the stored parameter on `mesh`."""
        return named_sharding(mesh, self[path].spec)

    def shardings(self, mesh: jax.sharding.Mesh) -> dict[str, jax.sharding.NamedSharding]:
        """Path → sharding, for all parameters."""
        return {path: self.sharding(mesh, path) for path in self.paths}


def partition_spec(spec: Spec) -> jax.sharding.PartitionSpec:
    """Our spec as JAX's."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*(axes[0] if len(axes) == 1 else (axes or None) for axes in spec))


def named_sharding(mesh: jax.sharding.Mesh, spec: Spec) -> jax.sharding.NamedSharding:
    """Our spec on a device mesh."""
    from jax.sharding import NamedSharding

    return NamedSharding(mesh, partition_spec(spec))


def make_plan(
    config: ModelConfig,
    params: Sequence[ParamSpec],
    mesh: MeshSpec,
    rules: Rules | None = None,
    overrides: Iterable[Override] = (),
) -> Plan:
    """Decide how every parameter is cut on a resolved mesh.

    Args:
        params: what the model declares.
        rules: logical axis → mesh axes; default `Rules()`.
        overrides: tried in order before the rules; the first that matches a path decides it.

    Raises:
        ConfigError: a logical axis without a rule, an axis on two dims, an override that decides nothing, has
            the wrong rank or an axis that does not divide its dim.
    """
    rules = rules or Rules()
    overrides = tuple(overrides)
    padding = Padding.choose(config, mesh.tp)
    used: set[int] = set()
    decisions = []
    for param in params:
        first = next((i for i, override in enumerate(overrides) if override.matches(param.path)), None)
        if first is not None:
            used.add(first)
            decisions.append(_decide_by_override(param, overrides[first], mesh, padding))
        else:
            decisions.append(_decide_by_rules(param, rules, mesh, padding))
    for i, override in enumerate(overrides):
        if i not in used:
            raise ConfigError(_matched_nothing(override, [param.path for param in params]))
    return Plan(config, mesh, rules, padding, tuple(decisions))


def _decide_by_rules(param: ParamSpec, rules: Rules, mesh: MeshSpec, padding: Padding) -> Decision:
    axes = param.axes
    wanted = [rules.mesh_axes(axis) for axis in axes]
    use_shape = padding.use_shape(axes)
    flat = [axis for mesh_axes in wanted for axis in mesh_axes]
    twice = next((axis for axis in flat if flat.count(axis) > 1), None)
    if twice:
        names = [axis for axis, mesh_axes in zip(axes, wanted, strict=True) if twice in mesh_axes]
        raise ConfigError(
            f"rules put mesh axis {twice!r} on two dims of {param.path} ({', '.join(names)}); change one"
        )
    if axes[0] == "layers" and wanted[0]:
        raise ConfigError(
            f"rule 'layers' → {'+'.join(wanted[0])}: layers run one after the other; cut another dim"
        )
    notes = _padding_notes(axes, mesh, padding)
    spec: list[tuple[str, ...]] = []
    shape = list(use_shape)
    for dim, mesh_axes in enumerate(wanted):
        kept = tuple(axis for axis in mesh_axes if axis != "fsdp")
        size = mesh.size(kept)
        if shape[dim] % size:
            if axes[dim] != "kv_heads":
                raise ConfigError(
                    f"{param.path}: dim {axes[dim]} of {shape[dim]} is not divided by {'×'.join(kept)} ="
                    f" {size}, and only heads, kv_heads, mlp and vocab are padded (for tp); change the"
                    f" rule for {axes[dim]!r}"
                )
            kept = ()  # kv heads held once on every device and repeated at use; _padding_notes says so
        spec.append(kept)
    if "fsdp" in flat:
        notes += _place_fsdp(axes, spec, shape, wanted, mesh)
    by = (
        ", ".join(f"{a}→{'+'.join(m)}" for a, m in zip(axes, wanted, strict=True) if m)
        or "whole (no axis cuts it)"
    )
    return Decision(
        param.path, axes, param.init, padding.true_shape(axes), use_shape, tuple(shape), tuple(spec),
        f"rules {by}", tuple(notes),
    )  # fmt: skip


def _place_fsdp(
    axes: Sequence[str],
    spec: list[tuple[str, ...]],
    shape: list[int],
    wanted: Sequence[tuple[str, ...]],
    mesh: MeshSpec,
) -> list[str]:
    """Put `fsdp` on the dim that the rules name if it divides that, else on another; changes both lists."""
    asked = next(dim for dim, mesh_axes in enumerate(wanted) if "fsdp" in mesh_axes)

    def divides(dim: int) -> bool:
        return shape[dim] % (mesh.size(spec[dim]) * mesh.fsdp) == 0

    def put(dim: int) -> None:
        spec[dim] = (*spec[dim], "fsdp")

    if divides(asked):
        put(asked)
        return []
    others = [dim for dim in range(len(axes)) if dim != asked and axes[dim] != "layers"]
    free_first = sorted(others, key=lambda dim: (bool(spec[dim]), -shape[dim]))
    reason = f"fsdp {mesh.fsdp} does not divide {axes[asked]} {shape[asked]}"
    for dim in filter(divides, free_first):
        put(dim)
        return [f"{reason}: cuts {axes[dim]} {shape[dim]} instead, at the same cost"]
    if not others:
        return [f"{reason} and there is no other dim: held whole on each device"]

    def padded(dim: int) -> int:
        return round_up(shape[dim], mesh.size(spec[dim]) * mesh.fsdp)

    dim = min(others, key=lambda dim: padded(dim) / shape[dim])
    note = f"{reason} nor any other dim: {axes[dim]} stored as {padded(dim)} instead of {shape[dim]}"
    shape[dim] = padded(dim)
    put(dim)
    return [note]


def _decide_by_override(param: ParamSpec, override: Override, mesh: MeshSpec, padding: Padding) -> Decision:
    axes, use_shape = param.axes, padding.use_shape(param.axes)
    spec = override.spec
    if len(spec) == len(axes) - 1 and axes[0] == "layers":
        spec = ((), *spec)
    if len(spec) != len(axes):
        dims = ", ".join(f"{axis} {size}" for axis, size in zip(axes, use_shape, strict=True))
        raise ConfigError(
            f"override {override.text!r} has {len(override.spec)} entries, but {param.path} has"
            f" {len(axes)} dims ({dims})"
            + ("; the first, layers, may be left out" if axes[0] == "layers" else "")
        )
    if axes[0] == "layers" and spec[0]:
        raise ConfigError(
            f"override {override.text!r} cuts the layers of {param.path}, but layers run one after the other;"
            f" cut another dim ({', '.join(axes[1:])})"
        )
    for axis, size, mesh_axes in zip(axes, use_shape, spec, strict=True):
        if size % mesh.size(mesh_axes):
            raise ConfigError(
                f"override {override.text!r}: {'×'.join(mesh_axes)} = {mesh.size(mesh_axes)} does not divide"
                f" dim {axis} of {param.path}, which is {size}; put the axis on another dim, or drop it"
            )
    notes = _padding_notes(axes, mesh, padding)
    return Decision(
        param.path, axes, param.init, padding.true_shape(axes), use_shape, use_shape, spec,
        f"override {override.text}", tuple(notes),
    )  # fmt: skip


def _padding_notes(axes: Sequence[str], mesh: MeshSpec, padding: Padding) -> list[str]:
    """One sentence for each dim that is padded or held once because `tp` does not divide it."""
    notes = []
    heads, tp = padding.heads, f"tp {mesh.tp}"
    real = heads.kv_heads * heads.q_per_kv
    if "heads" in axes and heads.padded_heads != real:
        how = f"{heads.slots} slots of {heads.group}"
        if heads.repeat == 1:
            how = f"{heads.slots} kv groups of {heads.group}"
        notes.append(
            f"{tp} does not divide {real} heads in {heads.kv_heads} kv groups: padded to {how}, masked"
        )
    if "kv_heads" in axes and heads.repeat > 1:
        times = f"{heads.repeat}×"
        notes.append(f"{tp} does not divide {heads.kv_heads} kv heads: held once, repeated {times} at use")
    elif "kv_heads" in axes and heads.slots != heads.kv_heads:
        notes.append(f"{tp} does not divide {heads.kv_heads} kv heads: padded to {heads.slots}")
    for axis in ("mlp", "vocab"):
        if axis in axes and padding.physical[axis] != padding.true[axis]:
            notes.append(
                f"{tp} does not divide {axis} {padding.true[axis]}: padded to {padding.physical[axis]}"
            )
    return notes


def _matched_nothing(override: Override, paths: Sequence[str]) -> str:
    if any(override.matches(path) for path in paths):
        return (
            f"override {override.text!r} decides nothing: earlier overrides match all its parameters; move it"
            " up or drop it"
        )
    near = get_close_matches(override.pattern, paths, n=1, cutoff=0.3)
    return f"override {override.text!r} matches no parameter" + (f"; nearest path: {near[0]}" if near else "")
