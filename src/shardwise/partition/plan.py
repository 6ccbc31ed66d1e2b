"""The Plan: one immutable value that says how every parameter and named activation is cut, and by which rule.

Loading, training, evaluation, generation, checkpoints and export all read the same Plan. It needs no arrays
and no devices. Not here: making one (decide.py), files of plans (plan_file.py), arrays themselves
(checkpoints/, steps/) and what a cut costs (planner/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from shardwise.errors import ConfigError
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import Padding
from shardwise.partition.rules import HeadLayout, Override, Rules, Spec

if TYPE_CHECKING:
    import jax

    from shardwise.models.config import ModelConfig


DATA_AXES = ("dp", "fsdp")
"""Mesh axes that may only split rows of the batch: a parameter cut over them is gathered just before use."""


@dataclass(frozen=True)
class Use:
    """What the model does with a parameter, as far as its cut has consequences."""

    kind: Literal["kernel", "bias", "scale", "expert", "embedding", "positions", "head"]
    """`expert`: a kernel of several experts; `embedding`: looked up by tokens (and the head too where it is
    tied); `positions`: looked up by positions."""
    takes: str = ""
    """Name of the activation that a kernel is multiplied with."""
    gives: str = ""
    """Name of the activation that comes out."""
    num_inputs: int = 0
    """Last dims of a kernel that are contracted."""


@dataclass(frozen=True)
class ParamSpec:
    """What a model declares of one parameter."""

    path: str
    """Name, like `layers/attn/q_proj/kernel`; below `layers/` one array holds all layers."""
    axes: tuple[str, ...]
    """Logical axis of each dim."""
    init: str
    """How a fresh one is drawn: `normal`, `zeros` or `ones`."""
    use: Use


@dataclass(frozen=True)
class Decision:
    """How one parameter lies on the mesh, and why."""

    path: str
    axes: tuple[str, ...]
    init: str
    use: Use
    true_shape: tuple[int, ...]
    """Shape in the checkpoint."""
    use_shape: tuple[int, ...]
    """Shape that the computation sees: padded so that the axes that cut it at use divide it."""
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

    def at_use(self) -> Spec:
        """The spec at use, after FSDP's all-gather: axes that split the batch do not cut the computation."""
        return tuple(tuple(axis for axis in axes if axis not in DATA_AXES) for axes in self.spec)


@dataclass(frozen=True)
class ActivationDecision:
    """How one named activation lies on the mesh."""

    name: str
    axes: tuple[str, ...]
    """Logical axis of each dim."""
    spec: Spec
    """Mesh axes that cut each dim."""
    decided_by: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A resolved mesh, one decision per parameter and per named activation; hashable, so that it can key
    compiled steps."""

    config: ModelConfig
    mesh: MeshSpec
    rules: Rules
    padding: Padding
    decisions: tuple[Decision, ...]
    activations: tuple[ActivationDecision, ...]
    overrides: tuple[Override, ...] = ()
    """The user's own, which come before those of the rules."""
    head_asked: HeadLayout | None = None
    """The head layout that was asked for; None left it to the rules."""
    notes: tuple[str, ...] = ()
    """What concerns the mesh as a whole, such as an axis that cuts nothing."""

    @cached_property
    def _by_path(self) -> dict[str, Decision]:
        return {decision.path: decision for decision in self.decisions}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.config, self.mesh, self.decisions, self.activations))

    def __getitem__(self, path: str) -> Decision:
        return self._by_path[path]

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    @property
    def paths(self) -> tuple[str, ...]:
        """Parameter paths in the model's order."""
        return tuple(self._by_path)

    @cached_property
    def _activation_specs(self) -> dict[str, Spec]:
        return {activation.name: activation.spec for activation in self.activations}

    def activation(self, name: str) -> Spec:
        """Mesh axes that cut each dim of a named activation."""
        return self._activation_specs[name]

    @property
    def head_path(self) -> str | None:
        """Path of the output head's matrix [V, D]; None in a model without a head over the vocabulary."""
        return self.config.head_path

    @property
    def head_layout(self) -> HeadLayout | None:
        """How the output head is cut at use, where no axis that splits the batch cuts it; None without."""
        if self.head_path is None:
            return None
        batch = self.batch_axes()
        return layout_of(
            tuple(tuple(a for a in axes if a not in batch) for axes in self[self.head_path].at_use())
        )

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Every padding and everything done otherwise than the rules say, with the tensors concerned."""
        found: dict[str, list[str]] = {note: [] for note in self.notes}
        noted = [(d.path, d.notes) for d in self.decisions] + [(a.name, a.notes) for a in self.activations]
        for name, notes in noted:
            for note in notes:
                found.setdefault(note, []).append(name)
        return tuple(note + (f"  [{', '.join(names)}]" if names else "") for note, names in found.items())

    def batch_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the batch."""
        return self.activation("tokens")[0]

    def batch_multiple(self) -> int:
        """The batch must be a multiple of this: the product of the sizes of the axes that split it."""
        return self.mesh.size(self.batch_axes())

    def length_multiple(self) -> int:
        """Rows of a multiple of this many tokens can be cut as the activations are."""
        return math.lcm(*(self.mesh.size(a.spec[1]) for a in self.activations if a.name != "kv_cache"))

    def at_length(self, length: int) -> Plan:
        """The plan as a step over this many tokens a row follows it.

        What is cut over the length stays whole where its axes do not divide it, if the policy of `length` is
        replicate; a single token is always whole. The cache has a length of its own.

        Raises:
            ConfigError: the policy is error.
        """
        at = tuple(self._at_length(a, length) for a in self.activations)
        return self if at == self.activations else replace(self, activations=at)

    def _at_length(self, a: ActivationDecision, length: int) -> ActivationDecision:
        axes, parts = a.spec[1], self.mesh.size(a.spec[1])
        if a.name == "kv_cache" or length % parts == 0:
            return a
        cut = f"{'×'.join(axes)} {parts} does not divide length {length}"
        if length > 1 and self.rules.policy_of["length"] == "error":
            near = " or ".join(str(n) for n in (length // parts * parts, -(-length // parts) * parts) if n)
            raise ConfigError(
                f"activation {a.name!r}: {cut}; take a multiple, such as {near}, or set the policy of"
                " 'length' to replicate"
            )
        note = (f"{cut}: whole on each device (policy replicate)",) if length > 1 else ()
        return replace(a, spec=(a.spec[0], (), *a.spec[2:]), notes=a.notes + note)

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


def layout_of(spec: Spec) -> HeadLayout:
    """The head layout that a cut of [V, D] (without fsdp) amounts to; of two cuts the vocabulary's counts."""
    vocab, embed = spec
    return "vocab" if vocab else "hidden" if embed else "replicated"
