"""Applying rules: from what a model declares to a Plan.

Each parameter is decided by the first override that matches it, else by the rules' table; the output head by
its layout. Not here: what rules say (rules.py) and what a Plan is (plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import HeadSlots, Padding, round_up
from shardwise.partition.plan import DATA_AXES, ActivationDecision, Decision, ParamSpec, Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import ACTIVATIONS, HeadLayout, Override, Rules, Spec, spec_text

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
            not divide its dim; an unknown head layout.
    """
    if head_layout is not None and head_layout not in get_args(HeadLayout):
        raise ConfigError(f"head layout {head_layout!r}: allowed are {', '.join(get_args(HeadLayout))}")
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
        self.asked_layout = self.head_layout
        self.uncut: dict[str, str] = {}
        """Logical axis → why its policy leaves it whole."""
        self.head_note = ""
        """Why the head is not cut by the layout asked for."""
        self._check_policies()
        self.rules = self.asked.changed(dict.fromkeys(self.uncut, ()))
        self.cuts = {axis: _but_fsdp(self.rules.mesh_axes(axis)) for axis in ("heads", "mlp", "vocab")}
        """Mesh axes for which a logical axis is padded; `fsdp` looks for a dim that it divides instead."""
        self.padding = Padding.choose(self.config, {a: self.mesh.size(cut) for a, cut in self.cuts.items()})
        self.head = "embed/table" if self.config.tie_embeddings else "lm_head/kernel"

    def plan(self) -> Plan:
        used: set[int] = set()
        decisions = []
        for param in self.params:
            first = next((i for i, o in enumerate(self.overrides) if o.matches(param.path)), None)
            if first is not None:
                used.add(first)
            decisions.append(self._decide(param, None if first is None else self.overrides[first]))
        for i, override in enumerate(self.overrides):
            if i not in used:
                raise ConfigError(_matched_nothing(override, [param.path for param in self.params]))
        activations = tuple(self._activation(name) for name in ACTIVATIONS)
        self._refuse_unused_rules()
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
            ("heads", axes_of("heads"), heads, odd_heads, in_groups),
            ("kv_heads", axes_of("heads"), kv_heads, _not_divided(kv_heads), ""),
            ("kv_heads", axes_of("kv_heads"), kv_heads, _not_divided(kv_heads), ""),
            ("mlp", axes_of("mlp"), config.mlp_dim, _not_divided(config.mlp_dim), ""),
        ):
            why = self._policy(axis, _but_fsdp(by), size, odd, more)
            if why:
                self.uncut |= {axis: why} | ({"kv_heads": why} if axis == "heads" else {})
        vocab = config.vocab_size
        if not (tied and self.head_layout):  # else the only matrix over the vocabulary is the head
            why = self._policy("vocab", _but_fsdp(axes_of("vocab")), vocab, _not_divided(vocab))
            self.uncut |= {"vocab": why} if why else {}
        if self.head_layout == "vocab":
            self.head_note = self._policy("vocab", HEAD_AXES, vocab, _not_divided(vocab))
            self.head_layout = "replicated" if self.head_note else "vocab"

    def _policy(
        self, logical: str, axes: tuple[str, ...], size: int, odd: Callable[[int], bool], more: str = ""
    ) -> str:
        """Why `logical` stays whole, or nothing where `axes` may cut it.

        Args:
            odd: whether a number of parts needs padding.
        """
        parts, policy = self.mesh.size(axes), self.asked.policy_of[logical]
        if policy == "pad" or not odd(parts):
            return ""
        what = f"{'×'.join(axes)} {parts} does not divide {logical} {size}{more}"
        if policy == "replicate":
            return f"{what}: whole on each device (policy replicate)"
        fits = [n for n in range(1, size + 1) if not odd(n)]
        near = ", ".join(map(str, sorted(fits, key=lambda n: abs(n - parts))[:3]))
        others = "pad" if logical == "kv_heads" else "pad or replicate"
        raise ConfigError(
            f"rule {logical!r} → {'+'.join(axes)}: {what}, and its policy is error; set the policy to"
            f" {others}, or cut it into a number of parts that divides it, such as {near}"
        )

    def _decide(self, param: ParamSpec, override: Override | None) -> Decision:
        is_head = param.path == self.head or param.path == "lm_head/bias"
        if is_head and self.head_layout is not None:
            if override is not None and param.path == self.head:
                raise ConfigError(
                    f"head layout {self.asked_layout!r} and override {override.text!r} both decide"
                    f" {param.path}; drop one"
                )
            own = next((o for o in self.asked.overrides if o.matches(param.path)), None)
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
        override = next((o for o in self.rules.overrides if o.matches(param.path)), None)
        if override is not None:  # one of the rules' own, so that their policies hold
            wanted = self._spec_of(param, override)
            return self._decide_by_axes(param, wanted, use_shape, f"override {override.text}")
        by = ", ".join(f"{a}→{'+'.join(m)}" for a, m in zip(param.axes, table, strict=True) if m)
        return self._decide_by_axes(param, table, use_shape, f"rules {by or 'whole (no axis cuts it)'}")

    def _decide_head(self, param: ParamSpec, layout: HeadLayout) -> Decision:
        """By its layout over `tp`; by the rules over other axes, which must not change what the layout is."""
        wanted = {
            axis: tuple(a for a in self.rules.mesh_axes(axis) if a not in HEAD_AXES)
            for axis in ("vocab", "embed")
        }
        sizes = {"vocab": self.config.vocab_size, "embed": self.config.embed_dim}
        cut_dim = {"vocab": "vocab", "hidden": "embed"}.get(layout)
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
            raise ConfigError(
                f"rule 'layers' → {'+'.join(wanted[0])}: layers run one after the other; cut another dim"
            )
        twice = next((axis for axis in flat if flat.count(axis) > 1), None)
        if twice:
            names = [axis for axis, mesh_axes in zip(axes, wanted, strict=True) if twice in mesh_axes]
            raise ConfigError(
                f"rules put mesh axis {twice!r} on two dims of {param.path} ({', '.join(names)}); change one"
            )
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
            notes += self._place_fsdp(param, spec, shape, wanted)
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
        raise ConfigError(
            f"{name}: dim {logical} of {size} is not divided by {cut}, and {why}; cut it otherwise, or set"
            f" the policy of {logical!r} to replicate"
        )

    def _place_fsdp(
        self,
        param: ParamSpec,
        spec: list[tuple[str, ...]],
        shape: list[int],
        wanted: Sequence[tuple[str, ...]],
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
        never = ("layers", "vector") if param.use.kind == "kernel" else ("layers", "vector", "embed")
        paddable = [dim for dim in range(len(axes)) if axes[dim] not in never]
        free_first = sorted(others, key=lambda dim: (bool(spec[dim]), -shape[dim]))
        reason = f"fsdp {mesh.fsdp} does not divide {axes[asked]} {shape[asked]}"
        for dim in filter(divides, free_first):
            put(dim)
            return [f"{reason}: cuts {axes[dim]} {shape[dim]} instead, at the same cost"]
        policy = self.rules.policy_of["fsdp"]
        if policy == "error":
            raise ConfigError(
                f"{param.path}: {reason}{' nor any other dim' if others else ''}, and the policy for fsdp is"
                " error; set it to pad or replicate, or take another mesh"
            )
        if not paddable or policy == "replicate":
            return [f"{reason}{' nor any other dim' if others else ''}: held whole on each device"]

        def padded(dim: int) -> int:
            return round_up(shape[dim], mesh.size(spec[dim]) * mesh.fsdp)

        def cut_at_use(dim: int) -> bool:
            return mesh.size([axis for axis in spec[dim] if axis not in DATA_AXES]) > 1

        # Parts that other axes cut at use would end elsewhere with padding than without: moved at every use.
        dim = min(paddable, key=lambda dim: (cut_at_use(dim), padded(dim) / shape[dim]))
        note = f"{reason} nor any other dim: {axes[dim]} stored as {padded(dim)} instead of {shape[dim]}"
        shape[dim] = padded(dim)
        put(dim)
        return [note]

    def _spec_of(self, param: ParamSpec, override: Override) -> Spec:
        """An override's spec for this parameter, with an entry for each dim."""
        axes = param.axes
        spec = ((),) * len(axes) if override.spec is None else override.spec
        if len(spec) == len(axes) - 1 and axes[0] == "layers":
            spec = ((), *spec)
        if len(spec) != len(axes):
            dims = ", ".join(
                f"{axis} {size}" for axis, size in zip(axes, self.padding.use_shape(axes), strict=True)
            )
            raise ConfigError(
                f"override {override.text!r} has {len(spec)} entries, but {param.path} has"
                f" {len(axes)} dims ({dims})"
                + ("; the first, layers, may be left out" if axes[0] == "layers" else "")
            )
        if axes[0] == "layers" and spec[0]:
            raise ConfigError(
                f"override {override.text!r} cuts the layers of {param.path}, but layers run one after the"
                f" other; cut another dim ({', '.join(axes[1:])})"
            )
        return spec

    def _decide_by_override(self, param: ParamSpec, override: Override) -> Decision:
        axes, use_shape = param.axes, self.padding.use_shape(param.axes)
        asked = self._spec_of(param, override)
        spec = tuple(_gathered_last(mesh_axes) for mesh_axes in asked)
        for axis, size, mesh_axes in zip(axes, use_shape, spec, strict=True):
            cut = self.mesh.size(mesh_axes)
            if size % cut:
                others = [a for a, s in zip(axes, use_shape, strict=True) if a != "layers" and s % cut == 0]
                fix = f"put it on {' or '.join(others)}, or drop it" if others else "drop it"
                raise ConfigError(
                    f"override {override.text!r}: {'×'.join(mesh_axes)} = {cut} does not divide dim {axis} of"
                    f" {param.path}, which is {size}; {fix}"
                )
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
            if axis in ("mlp", "vocab", "embed") and size != true:
                notes.append(f"{by(axis)} does not divide {axis} {true}: padded to {size}")
        return notes

    def _activation(self, name: str) -> ActivationDecision:
        axes = ACTIVATIONS[name]
        asked, spec, notes = self.asked.activation(name), [], []
        for axis, mesh_axes in zip(axes, asked, strict=True):
            size = self.config.embed_dim if axis == "embed" else self.padding.physical.get(axis)
            if axis in self.uncut and mesh_axes:
                mesh_axes = ()
                notes.append(self.uncut[axis])
            elif size is not None and size % self.mesh.size(mesh_axes):
                notes.append(self._whole(f"activation {name}", axis, size, mesh_axes))
                mesh_axes = ()
            spec.append(mesh_axes)
        flat = [axis for mesh_axes in spec for axis in mesh_axes]
        twice = next((axis for axis in flat if flat.count(axis) > 1), None)
        if twice:
            names = [axis for axis, mesh_axes in zip(axes, spec, strict=True) if twice in mesh_axes]
            raise ConfigError(
                f"rules put mesh axis {twice!r} on two dims of activation {name} ({', '.join(names)}); change"
                " a rule, or give the activation one of its own"
            )
        given = name in dict(self.asked.activations)
        by = f"activation rule {name!r}" if given else "rules of its logical axes"
        return ActivationDecision(name, axes, tuple(spec), by, tuple(notes))

    def _refuse_unused_rules(self) -> None:
        """Refuses an override of the rules that no parameter of such a model, tied or not, could match."""
        paths = [*dict.fromkeys((*(p.path for p in self.params), "lm_head/kernel", "lm_head/bias"))]
        for override in self.rules.overrides:
            if not any(override.matches(path) for path in paths):
                raise ConfigError(f"rules {self.asked.name!r}: {_matched_nothing(override, paths)}")

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


def _matched_nothing(override: Override, paths: Sequence[str]) -> str:
    if any(override.matches(path) for path in paths):
        return (
            f"override {override.text!r} decides nothing: earlier overrides match all its parameters; move it"
            " up or drop it"
        )
    near = get_close_matches(override.pattern, paths, n=1, cutoff=0.3)
    return f"override {override.text!r} matches no parameter" + (f"; nearest path: {near[0]}" if near else "")
