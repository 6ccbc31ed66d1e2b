"""Applying rules: from what a model declares to a Plan.

Each parameter is decided by the first override that matches it, else by the rules' table; the output head by
its layout. Not here: what rules say (rules.py), what a Plan is (plan.py), what a refusal says (refusals.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from shardwise.errors import ConfigError, did_you_mean
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import HeadSlots, Padding, round_up
from shardwise.partition.plan import DATA_AXES, ActivationDecision, Decision, ParamSpec, Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.refusals import Refusals
from shardwise.partition.rules import (
    ACTIVATIONS,
    HeadLayout,
    Override,
    Rules,
    Spec,
    activation_text,
    spec_text,
)

_NEVER_PADDED = (
    "layers", "embed", "word_embed", "vector", "word_vector", "positions", "token_types", "labels", "experts",
)  # fmt: skip
"""Logical axes that `fsdp` does not pad."""
HEAD_AXES = ("tp",)
"""Mesh axes over which the layouts `vocab` and `hidden` cut the output head."""


def make_plan(
    config: ModelConfig,
    params: Sequence[ParamSpec],
    mesh: MeshSpec,
    rules: Rules | None = None,
    overrides: Iterable[Override] = (),
    head_layout: HeadLayout | None = None,
) -> Plan:
    """Decide how every parameter and named activation is cut on a resolved mesh.

    Args:
        params: what the model declares.
        rules: default `Rules()`.
        overrides: tried in order before the rules; the first that matches a path decides it.
        head_layout: of the output head, whatever the rules say; None leaves it to rules and overrides.

    Raises:
        ConfigError: a logical axis without a rule, an axis on two dims, a dim that its axes do not divide
            under policy `error`, an override that decides nothing, has the wrong rank or an axis that does
            not divide its dim; an unknown head layout, or any where tp is 1.
    """
    if head_layout is not None and head_layout not in get_args(HeadLayout):
        allowed = get_args(HeadLayout)
        near = did_you_mean(str(head_layout), allowed) or "; without one the rules decide"
        raise ConfigError(f"head layout {head_layout!r}: allowed are {', '.join(allowed)}{near}")
    if head_layout is not None and config.head != "vocab":
        raise ConfigError(
            f"head layout {head_layout!r}: this model has no output head over the vocabulary; leave it out"
        )
    return _Decider(config, tuple(params), mesh, rules or Rules(), tuple(overrides), head_layout).plan()


@dataclass
class _Decider:
    """One run of make_plan."""

    config: ModelConfig
    params: tuple[ParamSpec, ...]
    mesh: MeshSpec
    asked: Rules
    overrides: tuple[Override, ...]
    head_layout: HeadLayout | None

    def __post_init__(self) -> None:
        self.head = self.config.head_path or ""
        self._check_head_layout()
        self.asked_layout = self.head_layout
        self.refusals = Refusals(self.params, Padding.none(self.config), self.mesh, self.asked.name)
        self.uncut: dict[str, str] = {}
        """Logical axis → why its policy leaves it whole."""
        self.head_note = ""
        """Why the head is not cut by the layout asked for."""
        self._check_policies()
        self.rules = self.asked.changed(dict.fromkeys(self.uncut, ()))
        self.cuts = {axis: _but_fsdp(self.rules.mesh_axes(axis)) for axis in ("heads", "mlp", "vocab")}
        """Mesh axes for which a logical axis is padded; `fsdp` looks for a dim that it divides instead."""
        self.padding = Padding.choose(self.config, {a: self.mesh.size(cut) for a, cut in self.cuts.items()})
        self.refusals = replace(self.refusals, padding=self.padding)

    def plan(self) -> Plan:
        paths = [param.path for param in self.params]
        self._refuse_without_effect(self.overrides, paths)
        decisions = [self._decide(param, _first(self.overrides, param.path)) for param in self.params]
        # Rules are for more than one model: what they say of a head that this one does not have may stand.
        paths = list(dict.fromkeys((*paths, "lm_head/kernel", "lm_head/bias")))
        self._refuse_without_effect(self.rules.overrides, paths, f"rules {self.asked.name!r}: ")
        activations = tuple(self._activation(name) for name in ACTIVATIONS if self._has(name))
        notes = self._idle_axes(decisions, activations)
        return Plan(
            self.config, self.mesh, self.asked, self.padding, tuple(decisions), activations,
            self.overrides, self.asked_layout, notes,
        )  # fmt: skip

    def _check_policies(self) -> None:
        """Acts on the policies `replicate` and `error` of heads, kv heads, mlp and vocab."""
        config, axes_of, tied = self.config, self.asked.mesh_axes, self.config.tie_embeddings
        heads, kv_heads, group = config.num_heads, config.num_kv_heads, config.q_per_kv

        def odd_heads(parts: int) -> bool:
            return HeadSlots.choose(kv_heads, group, parts).padded_heads != heads

        in_groups = f" in {kv_heads} kv groups" if group > 1 else ""
        for axis, by, size, odd, more in (
            ("heads", "heads", heads, odd_heads, in_groups),
            ("kv_heads", "heads", kv_heads, _not_divided(kv_heads), ""),
            ("kv_heads", "kv_heads", kv_heads, _not_divided(kv_heads), ""),
            ("mlp", "mlp", config.mlp_dim, _not_divided(config.mlp_dim), ""),
        ):
            cut = _but_fsdp(axes_of(by))
            why = self._policy(axis, cut, size, odd, f"rule {by!r} → {'+'.join(cut)}", more)
            if why:
                self.uncut |= {axis: why} | ({"kv_heads": why} if axis == "heads" else {})
        vocab = config.vocab_size
        if not (tied and self.head_layout):  # else the only matrix over the vocabulary is the head
            cut = _but_fsdp(axes_of("vocab"))
            why = self._policy("vocab", cut, vocab, _not_divided(vocab), f"rule 'vocab' → {'+'.join(cut)}")
            self.uncut |= {"vocab": why} if why else {}
        if self.head_layout == "vocab":
            self.head_note = self._policy(
                "vocab", HEAD_AXES, vocab, _not_divided(vocab), "head layout 'vocab'", head=self.head
            )
            self.head_layout = "replicated" if self.head_note else "vocab"

    def _policy(
        self,
        logical: str,
        axes: tuple[str, ...],
        size: int,
        odd: Callable[[int], bool],
        rule: str,
        more: str = "",
        head: str = "",
    ) -> str:
        """Why `logical` stays whole, or nothing where `axes` may cut it.

        Args:
            odd: whether a number of parts needs padding.
            rule: what cuts it; `head`, if it cuts that alone.
        """
        parts, policy = self.mesh.size(axes), self.asked.policy_of[logical]
        if policy == "pad" or not odd(parts):
            return ""
        what = f"{'×'.join(axes)} {parts} does not divide {logical} {size}{more}"
        if policy == "replicate":
            return f"{what}: whole on each device (policy replicate)"
        fits = (n for n in range(1, size + 1) if not odd(n))
        policies = ["pad"] if logical == "kv_heads" else ["pad", "replicate"]
        raise self.refusals.rule_not_divided(rule, logical, what, parts, fits, policies, head)

    def _decide(self, param: ParamSpec, override: Override | None) -> Decision:
        is_head = param.path == self.head or param.path == "lm_head/bias"
        if is_head and self.head_layout is not None:
            if override is not None and param.path == self.head:
                raise ConfigError(
                    f"head layout {self.asked_layout!r} and override {override.text!r} both decide"
                    f" {param.path}; drop one"
                )
            own = _first(self.asked.overrides, param.path)
            if override is None and param.path == self.head and own and own not in _PRESET_OVERRIDES:
                raise ConfigError(
                    f"head layout {self.asked_layout!r} and override {own.text!r} of rules"
                    f" {self.asked.name!r} both decide {param.path}; drop one"
                )
            if override is None:
                return self._decide_head(param, self.head_layout)
        if override is not None:
            return self._decide_by_override(param, override)
        table = tuple(self.rules.mesh_axes(axis) for axis in param.axes)
        use_shape = self.padding.use_shape(param.axes)
        override = _first(self.rules.overrides, param.path)
        if override is not None:  # one of the rules' own, so that their policies hold
            wanted = self._spec_of(param, override, f"rules {self.asked.name!r}: ")
            return self._decide_by_axes(param, wanted, use_shape, f"override {override.text}")
        by = ", ".join(f"{a}→{'+'.join(m)}" for a, m in zip(param.axes, table, strict=True) if m)
        return self._decide_by_axes(param, table, use_shape, f"rules {by or 'whole (no axis cuts it)'}")

    def _decide_head(self, param: ParamSpec, layout: HeadLayout) -> Decision:
        """By its layout over `tp`; by the rules over other axes, which must not change what the layout is."""
        words = self.config.word_axis
        wanted = {
            axis: tuple(a for a in self.rules.mesh_axes(axis) if a not in HEAD_AXES)
            for axis in ("vocab", words)
        }
        sizes = {axis: self.padding.true[axis] for axis in ("vocab", words)}
        cut_dim = {"vocab": "vocab", "hidden": words}.get(layout)
        if cut_dim:
            wanted[cut_dim] = (*HEAD_AXES, *wanted[cut_dim])
        cuts = {axis: _but_fsdp(wanted[axis]) for axis in ("vocab", cut_dim) if axis}
        sizes |= {axis: round_up(sizes[axis], self.mesh.size(cut)) for axis, cut in cuts.items()}
        return self._decide_by_axes(
            param,
            [wanted[axis] for axis in param.axes],
            tuple(sizes[axis] for axis in param.axes),
            f"head layout {layout}",
            cuts,
        )

    def _decide_by_axes(
        self,
        param: ParamSpec,
        wanted: Sequence[tuple[str, ...]],
        use_shape: tuple[int, ...],
        decided_by: str,
        cuts: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Decision:
        """`wanted` where it divides `use_shape`, which was padded for `cuts` (default self.cuts)."""
        axes, mesh = param.axes, self.mesh
        flat = [axis for mesh_axes in wanted for axis in mesh_axes]
        if axes[0] == "layers" and wanted[0]:
            raise self.refusals.rules_cut_layers(param, wanted[0])
        twice = _twice(wanted)
        if twice is not None:
            raise self.refusals.rules_cut_twice(param, twice, self.rules.axes_of)
        notes: list[str] = []
        spec: list[tuple[str, ...]] = []
        for logical, size, mesh_axes in zip(axes, use_shape, wanted, strict=True):
            kept = _gathered_last(_but_fsdp(mesh_axes))
            if size % mesh.size(kept):
                held_once = logical == "kv_heads" and self.padding.heads.repeat > 1
                if not (held_once or logical in self.uncut):  # which have notes of their own
                    notes.append(self._whole(f"{param.path}, by {decided_by}", logical, size, kept))
                kept = ()
            spec.append(kept)
        notes = self._padding_notes(param, use_shape, spec, cuts or self.cuts) + notes
        if self.head_note and decided_by.startswith("head layout"):
            notes = [self.head_note, *(note for note in notes if note != self.head_note)]
        shape = list(use_shape)
        if "fsdp" in flat:
            notes += self._place_fsdp(param, spec, shape, wanted, decided_by)
        return Decision(
            param.path, axes, param.init, param.use, self.padding.true_shape(axes), use_shape, tuple(shape),
            tuple(spec), decided_by, tuple(notes),
        )  # fmt: skip

    def _whole(self, name: str, logical: str, size: int, mesh_axes: tuple[str, ...]) -> str:
        """The note on a dim that stays whole, or the error if its policy does not allow that."""
        cut = f"{'×'.join(mesh_axes)} = {self.mesh.size(mesh_axes)}"
        if logical == "kv_heads":
            return f"{cut} does not divide {logical} {size}: whole on each device"
        policy = self.rules.policy_of[logical]
        if policy == "replicate":
            return f"{cut} does not divide {logical} {size}: whole on each device (policy replicate)"
        why = "its policy is error"
        if policy == "pad":
            rule = "+".join(self.cuts[logical]) or "nothing"
            why = f"it is padded only for the axes of rule {logical!r}, {rule}"
        raise self.refusals.dim_not_divided(name, logical, size, mesh_axes, why)

    def _place_fsdp(
        self,
        param: ParamSpec,
        spec: list[tuple[str, ...]],
        shape: list[int],
        wanted: Sequence[tuple[str, ...]],
        decided_by: str,
    ) -> list[str]:
        """Put `fsdp` on the dim that the rules name if it divides that, else on another; changes both."""
        axes, mesh = param.axes, self.mesh
        asked = next(dim for dim, mesh_axes in enumerate(wanted) if "fsdp" in mesh_axes)

        def divides(dim: int) -> bool:
            return shape[dim] % (mesh.size(spec[dim]) * mesh.fsdp) == 0

        def put(dim: int) -> None:
            spec[dim] = (*spec[dim], "fsdp")

        if divides(asked):
            put(asked)
            return []
        others = [dim for dim in range(len(axes)) if dim != asked and axes[dim] != "layers"]
        # A kernel is padded in store alone, so that its embed dim may be; a table would be padded at use too.
        may = ("embed", "word_embed") if param.use.kind == "kernel" else ()
        paddable = [dim for dim, axis in enumerate(axes) if axis in may or axis not in _NEVER_PADDED]
        paddable = [] if param.use.kind == "expert" else paddable
        free_first = sorted(others, key=lambda dim: (bool(spec[dim]), -shape[dim]))
        reason = f"fsdp {mesh.fsdp} does not divide {axes[asked]} {shape[asked]}"
        for dim in filter(divides, free_first):
            put(dim)
            return [f"{reason}: cuts {axes[dim]} {shape[dim]} instead, at the same cost"]
        policy = self.rules.policy_of["fsdp"]
        reason += " nor any other dim" if others else ""
        if policy == "error":
            raise self.refusals.fsdp_not_placed(param, decided_by, reason, spec, shape)
        if not paddable or policy == "replicate":
            return [f"{reason}: held whole on each device"]

        def padded(dim: int) -> int:
            return round_up(shape[dim], mesh.size(spec[dim]) * mesh.fsdp)

        def cut_at_use(dim: int) -> bool:
            return mesh.size([axis for axis in spec[dim] if axis not in DATA_AXES]) > 1

        # Parts that other axes cut at use would end elsewhere with padding than without: moved at every use.
        dim = min(paddable, key=lambda dim: (cut_at_use(dim), padded(dim) / shape[dim]))
        note = f"{reason}: {axes[dim]} stored as {padded(dim)} instead of {shape[dim]}"
        shape[dim] = padded(dim)
        put(dim)
        return [note]

    def _spec_of(self, param: ParamSpec, override: Override, of: str = "") -> Spec:
        """An override's spec for this parameter, with an entry for each dim.

        Args:
            of: where the override stands, for messages.
        """
        axes = param.axes
        spec = ((),) * len(axes) if override.spec is None else override.spec
        if len(spec) == len(axes) - 1 and axes[0] == "layers":
            spec = ((), *spec)
        if len(spec) != len(axes):
            raise self.refusals.wrong_rank(override, param, of)
        if axes[0] == "layers" and spec[0]:
            raise self.refusals.cuts_layers(override, param, of)
        twice = _twice(spec)
        if twice is not None:
            raise self.refusals.cuts_twice(override, param, twice, spec, of)
        return spec

    def _decide_by_override(self, param: ParamSpec, override: Override) -> Decision:
        axes, use_shape = param.axes, self.padding.use_shape(param.axes)
        asked = self._spec_of(param, override)
        spec = tuple(_gathered_last(mesh_axes) for mesh_axes in asked)
        for dim, (size, mesh_axes) in enumerate(zip(use_shape, spec, strict=True)):
            if size % self.mesh.size(mesh_axes):
                raise self.refusals.not_divided(override, param, dim, mesh_axes)
        notes = self._padding_notes(param, use_shape, spec, self.cuts)
        if spec != asked:
            notes.append(
                f"override {override.text}: laid out as {spec_text(spec)}, so that what is gathered for use"
                " lies together"
            )
        return Decision(
            param.path, axes, param.init, param.use, self.padding.true_shape(axes), use_shape, use_shape,
            spec, f"override {override.text}", tuple(notes),
        )  # fmt: skip

    def _padding_notes(
        self,
        param: ParamSpec,
        use_shape: tuple[int, ...],
        spec: Sequence[tuple[str, ...]],
        cuts: Mapping[str, tuple[str, ...]],
    ) -> list[str]:
        """One sentence for each dim that is padded, held once, or left whole by its policy."""
        axes, heads = param.axes, self.padding.heads

        def by(logical: str) -> str:
            return f"{'×'.join(cuts[logical])} {self.mesh.size(cuts[logical])}"

        notes = [
            self.uncut[axis]
            for axis, mesh_axes in zip(axes, spec, strict=True)
            if axis in self.uncut and set(mesh_axes) <= set(DATA_AXES)
        ]
        real = heads.kv_heads * heads.q_per_kv
        if "heads" in axes and heads.padded_heads != real:
            how = f"{heads.slots} slots of {heads.group}"
            if heads.repeat == 1:
                how = f"{heads.slots} kv groups of {heads.group}"
            notes.append(
                f"{by('heads')} does not divide {real} heads in {heads.kv_heads} kv groups: padded to {how},"
                " masked"
            )
        if "kv_heads" in axes and heads.slots != heads.kv_heads:
            what = f"{by('heads')} does not divide {heads.kv_heads} kv heads"
            times = f"held once, repeated {heads.repeat}× at use"
            notes.append(f"{what}: {times if heads.repeat > 1 else f'padded to {heads.slots}'}")
        for axis, size, true in zip(axes, use_shape, self.padding.true_shape(axes), strict=True):
            if axis in ("mlp", "vocab", "embed", "word_embed") and size != true:
                notes.append(f"{by(axis)} does not divide {axis} {true}: padded to {size}")
        return notes

    def _has(self, name: str) -> bool:
        """Whether the model has a named activation."""
        only_in = {
            "words": self.config.word_axis != "embed",
            "router_logits": self.config.num_experts > 0,
            **dict.fromkeys(("first", "pooled", "label_logits"), self.config.head == "labels"),
        }
        return only_in.get(name, True)

    def _activation(self, name: str) -> ActivationDecision:
        axes, given = ACTIVATIONS[name], name in dict(self.asked.activations)
        by = f"activation rule {name!r}" if given else "rules of its logical axes"
        asked, spec, notes = self.asked.activation(name), [], []
        for axis, mesh_axes in zip(axes, asked, strict=True):
            size = self.padding.physical.get(axis)
            if axis in self.uncut and mesh_axes:
                mesh_axes = ()
                notes.append(self.uncut[axis])
            elif size is not None and size % self.mesh.size(mesh_axes):
                rule = f"rule {name}: {activation_text(asked)}" if given else by
                notes.append(self._whole(f"activation {name}, by {rule}", axis, size, mesh_axes))
                mesh_axes = ()
            spec.append(mesh_axes)
        twice = _twice(spec)
        if twice is not None:
            raise self.refusals.activation_cut_twice(name, axes, twice, tuple(spec))
        return ActivationDecision(name, axes, tuple(spec), by, tuple(notes))

    def _check_head_layout(self) -> None:
        """Refuses a head layout where there is nothing to lay out."""
        if self.head_layout is None or self.mesh.tp > 1:
            return
        config = self.config
        raise ConfigError(
            f"head layout {self.head_layout!r} has no effect: it says how tp cuts the output head {self.head}"
            f" (vocab {config.vocab_size}, embed {config.embed_dim}), and tp is 1 on mesh {self.mesh}; leave"
            " it out (--head-layout auto), or take a mesh with a tp of 2 or more"
        )

    def _refuse_without_effect(
        self, overrides: Sequence[Override], paths: Sequence[str], of: str = ""
    ) -> None:
        """Refuses an override that decides none of `paths`; presets' own are for all models."""
        first = {
            path: next((i for i, override in enumerate(overrides) if override.matches(path)), None)
            for path in paths
        }
        for i, override in enumerate(overrides):
            if i not in first.values() and not (of and override in _PRESET_OVERRIDES):
                earlier = {path: overrides[j] for path, j in first.items() if j is not None and j < i}
                raise self.refusals.matches_nothing(override, earlier, of)

    def _idle_axes(
        self, decisions: Sequence[Decision], activations: Sequence[ActivationDecision]
    ) -> tuple[str, ...]:
        """A sentence for each mesh axis that cuts nothing at all: its devices repeat each other's work."""
        specs: list[Spec] = [d.spec for d in decisions] + [a.spec for a in activations]
        used = {axis for spec in specs for axes in spec for axis in axes}
        return tuple(
            f"mesh axis {axis} {size} cuts nothing under rules {self.asked.name!r}: its devices repeat the"
            " same work"
            for axis, size in self.mesh.sizes.items()
            if size > 1 and axis not in used
        )


def _but_fsdp(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != "fsdp")


def _gathered_last(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes that are gathered for use behind those that cut it there: the parts are then contiguous."""
    return tuple(sorted(axes, key=lambda axis: axis in DATA_AXES))


def _not_divided(size: int) -> Callable[[int], bool]:
    return lambda parts: size % parts != 0


_PRESET_OVERRIDES = frozenset(override for rules in PRESETS.values() for override in rules.overrides)


def _first(overrides: Sequence[Override], path: str) -> Override | None:
    """The override that decides a path: the first that matches it."""
    return next((override for override in overrides if override.matches(path)), None)


def _twice(spec: Iterable[tuple[str, ...]]) -> str | None:
    """A mesh axis that stands in a spec twice, if there is one."""
    flat = [axis for axes in spec for axis in axes]
    return next((axis for axis in flat if flat.count(axis) > 1), None)
