"""Applying rules: from what a model declares to a Plan.

Each parameter is decided by the first override that matches it, else by the rules' table; the output head by
its layout. Not here: what rules say (rules.py) and what a Plan is (plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import HeadSlots, Padding, round_up
from shardwise.partition.plan import ActivationDecision, Decision, ParamSpec, Plan
from shardwise.partition.rules import ACTIVATIONS, HeadLayout, Override, Rules, Spec

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
            not divide its dim.
    """
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
        for logical in ("heads", "mlp", "vocab"):
            self._check_policy(logical)
        self.rules = self.asked.changed(dict.fromkeys(self.uncut, ()))
        if "vocab" in self.uncut and self.head_layout == "vocab":
            self.head_layout = "replicated"
        parts = {axis: self.mesh.size(self.rules.mesh_axes(axis)) for axis in ("heads", "mlp", "vocab")}
        self.padding = Padding.choose(self.config, parts)
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
        notes = self._idle_axes(decisions, activations)
        return Plan(
            self.config, self.mesh, self.asked, self.padding, tuple(decisions), activations,
            self.overrides, self.asked_layout, notes,
        )  # fmt: skip

    def _check_policy(self, logical: str) -> None:
        """Acts on the policies `replicate` and `error` of heads (with kv heads), mlp or vocab."""
        axes, config = self.asked.mesh_axes(logical), self.config
        size, sizes = self.mesh.size(axes), config.sizes()
        real = {logical: config.num_heads if logical == "heads" else sizes[logical]}
        slots = HeadSlots.choose(config.num_kv_heads, config.q_per_kv, size)
        odd = slots.padded_heads != config.num_heads if logical == "heads" else sizes[logical] % size != 0
        policies = {logical: odd}
        if logical == "heads":
            policies["kv_heads"] = config.num_kv_heads % size != 0
            real["kv_heads"] = config.num_kv_heads
        for name, indivisible in policies.items():
            policy = self.asked.policy_of[name]
            if not indivisible or policy == "pad":
                continue
            what = f"{'×'.join(axes)} {size} does not divide {name} {real[name]}"
            if policy == "error":
                fits = [n for n in range(1, real[name] + 1) if real[name] % n == 0]
                near = ", ".join(map(str, sorted(fits, key=lambda n: abs(n - size))[:3]))
                raise ConfigError(
                    f"rule {name!r} → {'+'.join(axes)}: {what}, and its policy is error; set the policy to"
                    f" pad or replicate, or cut it into a number of parts that divides it, such as {near}"
                )
            self.uncut[name] = f"{what}: whole on each device (policy replicate)"
        if "heads" in self.uncut:
            self.uncut["kv_heads"] = self.uncut["heads"]

    def _decide(self, param: ParamSpec, override: Override | None) -> Decision:
        is_head = param.path == self.head or param.path == "lm_head/bias"
        if is_head and self.head_layout is not None:
            if override is not None and param.path == self.head:
                raise ConfigError(
                    f"head layout {self.head_layout!r} and override {override.text!r} both decide"
                    f" {param.path}; drop one"
                )
            if override is None:
                return self._decide_head(param, self.head_layout)
        override = override or next((o for o in self.rules.overrides if o.matches(param.path)), None)
        if override is not None:
            return self._decide_by_override(param, override)
        wanted = [self.rules.mesh_axes(axis) for axis in param.axes]
        by = ", ".join(f"{a}→{'+'.join(m)}" for a, m in zip(param.axes, wanted, strict=True) if m)
        use_shape = self.padding.use_shape(param.axes)
        return self._decide_by_axes(param, wanted, use_shape, f"rules {by or 'whole (no axis cuts it)'}")

    def _decide_head(self, param: ParamSpec, layout: HeadLayout) -> Decision:
        cut = self.mesh.size(HEAD_AXES)
        vocab, embed = self.config.vocab_size, self.config.embed_dim
        wanted = {"vocab": (), "embed": self.rules.mesh_axes("embed")}
        sizes = {"vocab": vocab, "embed": embed}
        if layout == "vocab":
            wanted["vocab"], sizes["vocab"] = HEAD_AXES, round_up(vocab, cut)
        elif layout == "hidden":
            fsdp = tuple(axis for axis in wanted["embed"] if axis not in HEAD_AXES)
            wanted["embed"], sizes["embed"] = (*HEAD_AXES, *fsdp), round_up(embed, cut)
        axes = [wanted[axis] for axis in param.axes]
        return self._decide_by_axes(
            param, axes, tuple(sizes[axis] for axis in param.axes), f"head layout {layout}"
        )

    def _decide_by_axes(
        self,
        param: ParamSpec,
        wanted: Sequence[tuple[str, ...]],
        use_shape: tuple[int, ...],
        decided_by: str,
    ) -> Decision:
        axes, mesh = param.axes, self.mesh
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
        notes = self._padding_notes(param, use_shape)
        spec: list[tuple[str, ...]] = []
        for dim, mesh_axes in enumerate(wanted):
            kept = tuple(axis for axis in mesh_axes if axis != "fsdp")
            size = mesh.size(kept)
            if use_shape[dim] % size:
                if axes[dim] != "kv_heads":  # kv heads are held once and repeated at use: already noted
                    notes.append(self._whole(param.path, axes[dim], use_shape[dim], kept))
                kept = ()
            spec.append(kept)
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
        if self.rules.policy_of.get(logical) == "replicate":
            return f"{cut} does not divide {logical} {size}: whole on each device (policy replicate)"
        raise ConfigError(
            f"{name}: dim {logical} of {size} is not divided by {cut}, and only heads, kv_heads, mlp and"
            f" vocab are padded; change the rule for {logical!r}, or set its policy to replicate"
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
        free_first = sorted(others, key=lambda dim: (bool(spec[dim]), -shape[dim]))
        reason = f"fsdp {mesh.fsdp} does not divide {axes[asked]} {shape[asked]}"
        for dim in filter(divides, free_first):
            put(dim)
            return [f"{reason}: cuts {axes[dim]} {shape[dim]} instead, at the same cost"]
        policy = self.rules.policy_of["fsdp"]
        if policy == "error":
            raise ConfigError(
                f"{param.path}: {reason} nor any other dim, and the policy for fsdp is error; set it to pad"
                " or replicate, or take another mesh"
            )
        if not others or policy == "replicate":
            return [f"{reason}{' nor any other dim' if others else ''}: held whole on each device"]

        def padded(dim: int) -> int:
            return round_up(shape[dim], mesh.size(spec[dim]) * mesh.fsdp)

        dim = min(others, key=lambda dim: padded(dim) / shape[dim])
        note = f"{reason} nor any other dim: {axes[dim]} stored as {padded(dim)} instead of {shape[dim]}"
        shape[dim] = padded(dim)
        put(dim)
        return [note]

    def _decide_by_override(self, param: ParamSpec, override: Override) -> Decision:
        axes, use_shape = param.axes, self.padding.use_shape(param.axes)
        spec = ((),) * len(axes) if override.spec is None else override.spec
        if len(spec) == len(axes) - 1 and axes[0] == "layers":
            spec = ((), *spec)
        if len(spec) != len(axes):
            dims = ", ".join(f"{axis} {size}" for axis, size in zip(axes, use_shape, strict=True))
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
        for axis, size, mesh_axes in zip(axes, use_shape, spec, strict=True):
            cut = self.mesh.size(mesh_axes)
            if size % cut:
                others = [a for a, s in zip(axes, use_shape, strict=True) if a != "layers" and s % cut == 0]
                fix = f"put it on {' or '.join(others)}, or drop it" if others else "drop it"
                raise ConfigError(
                    f"override {override.text!r}: {'×'.join(mesh_axes)} = {cut} does not divide dim {axis} of"
                    f" {param.path}, which is {size}; {fix}"
                )
        return Decision(
            param.path, axes, param.init, param.use, self.padding.true_shape(axes), use_shape, use_shape,
            spec, f"override {override.text}", tuple(self._padding_notes(param, use_shape)),
        )  # fmt: skip

    def _padding_notes(self, param: ParamSpec, use_shape: tuple[int, ...]) -> list[str]:
        """One sentence for each dim that is padded, held once, or left whole by its policy."""
        axes, heads = param.axes, self.padding.heads
        notes = [why for axis, why in self.uncut.items() if axis in axes]
        real = heads.kv_heads * heads.q_per_kv
        tp = self._cut_by("heads")
        if "heads" in axes and heads.padded_heads != real:
            how = f"{heads.slots} slots of {heads.group}"
            if heads.repeat == 1:
                how = f"{heads.slots} kv groups of {heads.group}"
            notes.append(
                f"{tp} does not divide {real} heads in {heads.kv_heads} kv groups: padded to {how}, masked"
            )
        if "kv_heads" in axes and heads.repeat > 1:
            times = f"{heads.repeat}×"
            notes.append(
                f"{tp} does not divide {heads.kv_heads} kv heads: held once, repeated {times} at use"
            )
        elif "kv_heads" in axes and heads.slots != heads.kv_heads:
            notes.append(f"{tp} does not divide {heads.kv_heads} kv heads: padded to {heads.slots}")
        for axis, size, true in zip(axes, use_shape, self.padding.true_shape(axes), strict=True):
            if axis in ("mlp", "vocab", "embed") and size != true:
                by = self._cut_by(axis) if axis == "mlp" else f"tp {self.mesh.tp}"
                notes.append(f"{by} does not divide {axis} {true}: padded to {size}")
        return notes

    def _cut_by(self, logical: str) -> str:
        axes = self.rules.mesh_axes(logical)
        return f"{'×'.join(axes)} {self.mesh.size(axes)}"

    def _activation(self, name: str) -> ActivationDecision:
        axes = ACTIVATIONS[name]
        asked, spec, notes = self.rules.activation(name), [], []
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


def _matched_nothing(override: Override, paths: Sequence[str]) -> str:
    if any(override.matches(path) for path in paths):
        return (
            f"override {override.text!r} decides nothing: earlier overrides match all its parameters; move it"
            " up or drop it"
        )
    near = get_close_matches(override.pattern, paths, n=1, cutoff=0.3)
    return f"override {override.text!r} matches no parameter" + (f"; nearest path: {near[0]}" if near else "")
