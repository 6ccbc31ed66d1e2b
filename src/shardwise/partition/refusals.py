"""What is said of rules and overrides that do not fit: rule, tensor, dims with sizes, and a fix that works.

A fix is written as a user would type it, after the word `write`: 'REGEX=SPEC' in place of the override, or
entries of a rules file (`policy: {mlp: pad}`).
Not here: when something is refused (decide.py), and rules that contradict themselves alone (rules.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shardwise.errors import ConfigError
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import Padding
from shardwise.partition.plan import ParamSpec
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import Override, Spec, activation_text, axes_text, spec_text

_WITHIN_HEADS = ("q_per_kv", "head_dim")
"""Dims that take an axis only where no other can: a cut within a head moves more."""


@dataclass(frozen=True)
class Refusals:
    """Refusals that concern the parameters of one model on one mesh."""

    params: tuple[ParamSpec, ...]
    padding: Padding
    mesh: MeshSpec
    rules: str
    """Name of the rules."""

    # --- overrides

    def matches_nothing(
        self, override: Override, earlier: Mapping[str, Override], of: str = ""
    ) -> ConfigError:
        """An override that decides no parameter.

        Args:
            earlier: parameter path → the override before this one that decides it.
            of: where the override stands, `rules 'mine.yaml': `, if it is not the user's own.
        """
        taken = [path for path in earlier if override.matches(path)]
        if taken:
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            return ConfigError(
                f"{of}override {override.text!r} decides nothing: the earlier {earlier[taken[0]].text!r}"
                f" decides {taken[0]}{more}; put it before that one, or drop it"
            )
        near = self._near(override)
        if near is None:
            fix = f"there are {', '.join(param.path for param in self.params)}"
        else:
            what = "this model's head is its" if override.matches("lm_head/kernel") else "nearest is"
            written = _quoted(self._short(near), self._adapted(near, override.spec))
            fix = f"{what} {self._sized(near)}; write {written}"
        return ConfigError(f"{of}override {override.text!r} matches no parameter; {fix}")

    def wrong_rank(self, override: Override, param: ParamSpec, of: str = "") -> ConfigError:
        """An override whose spec has more or fewer entries than the parameter has dims."""
        count = len(override.spec or ())
        entries = "1 entry" if count == 1 else f"{count} entries"
        dims = "1 dim" if len(param.axes) == 1 else f"{len(param.axes)} dims"
        layers = ", of which layers may be left out" if param.axes[0] == "layers" else ""
        return ConfigError(
            f"{of}override {override.text!r} has {entries}, but {param.path} has {dims}"
            f" ({self._sizes(param)}){layers}; write {self._written(override, param)}"
        )

    def cuts_layers(self, override: Override, param: ParamSpec, of: str = "") -> ConfigError:
        """An override that cuts the dim over layers."""
        return ConfigError(
            f"{of}override {override.text!r} cuts the layers of {self._sized(param)}, but layers run one"
            f" after the other; write {self._written(override, param)}"
        )

    def cuts_twice(
        self, override: Override, param: ParamSpec, axis: str, spec: Spec, of: str = ""
    ) -> ConfigError:
        """An override that puts an axis on two dims; `spec` has an entry for each dim of the parameter."""
        return ConfigError(
            f"{of}override {override.text!r} puts mesh axis {axis!r} on two dims of {param.path},"
            f" {self._cut_by(param, axis, spec)}; write {self._written(override, param)}"
        )

    def not_divided(
        self, override: Override, param: ParamSpec, dim: int, axes: tuple[str, ...]
    ) -> ConfigError:
        """A user's override whose axes do not divide a dim."""
        size = self.padding.use_shape(param.axes)[dim]
        return ConfigError(
            f"override {override.text!r}: {'×'.join(axes)} = {self.mesh.size(axes)} does not divide dim"
            f" {param.axes[dim]} of {param.path}, which is {size} (of {self._sizes(param)}); write"
            f" {self._written(override, param)}"
        )

    # --- rules

    def rules_cut_twice(
        self, param: ParamSpec, axis: str, table: Mapping[str, tuple[str, ...]]
    ) -> ConfigError:
        """Rules that put an axis on two dims of a parameter.

        Args:
            table: logical axis → mesh axes, all of them.
        """
        names = list(dict.fromkeys(logical for logical in param.axes if axis in table[logical]))

        def cost(logical: str) -> tuple[int, int]:
            """Of no longer cutting `logical` over `axis`: parameters in conflict still, and those changed."""
            changed = {**table, logical: _without(table[logical], axis)}
            flat = [[a for name in p.axes for a in changed.get(name, ())] for p in self.params]
            in_conflict = sum(len(set(axes)) < len(axes) for axes in flat)
            return in_conflict, sum(logical in p.axes for p in self.params)

        changed = min(names, key=cost)
        spec = tuple(table[logical] for logical in param.axes)
        rules = " and ".join(f"{name}→{'+'.join(table[name])}" for name in names)
        return ConfigError(
            f"rules {rules} put mesh axis {axis!r} on two dims of {param.path},"
            f" {self._cut_by(param, axis, spec)}; write params: {{{changed}:"
            f" {axes_text(_without(table[changed], axis))}}} {self._where()}"
        )

    def rules_cut_layers(self, param: ParamSpec, axes: tuple[str, ...]) -> ConfigError:
        """A rule that cuts the dim over layers."""
        return ConfigError(
            f"rule 'layers' → {'+'.join(axes)} cuts the layers of {self._sized(param)}, but layers run one"
            f" after the other; write params: {{layers: null}} {self._where()}"
        )

    def rule_not_divided(
        self,
        rule: str,
        logical: str,
        what: str,
        parts: int,
        fits: Iterable[int],
        policies: Sequence[str],
        head: str = "",
    ) -> ConfigError:
        """A rule for a dim of all parameters that have it, under policy `error`.

        Args:
            what: which axes do not divide which dim, with both sizes.
            parts: what the axes come to.
            fits: numbers of parts that would do.
            policies: those that would do.
            head: path of the output head, where only that is cut.
        """
        having = [param for param in self.params if logical in param.axes and head in ("", param.path)]
        paths = [param.path for param in sorted(having, key=lambda param: param.use.kind == "bias")]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return ConfigError(
            f"{rule}: {what} of {paths[0]}{more}, and its policy is error; {self._policy(logical, policies)},"
            f" or cut it into a number of parts that divides it, such as {_closest(fits, parts)}"
        )

    def dim_not_divided(
        self, name: str, logical: str, size: int, axes: tuple[str, ...], why: str
    ) -> ConfigError:
        """A dim of one tensor that its axes do not divide.

        Args:
            name: tensor and rule.
            why: it is not left whole.
        """
        parts = self.mesh.size(axes)
        fits = (n for n in range(1, size + 1) if size % n == 0)
        return ConfigError(
            f"{name}: dim {logical} of {size} is not divided by {'×'.join(axes)} = {parts}, and {why};"
            f" {self._policy(logical, ['replicate'])}, or cut it into a number of parts that divides it, such"
            f" as {_closest(fits, parts)}"
        )

    def fsdp_not_placed(
        self,
        param: ParamSpec,
        decided_by: str,
        reason: str,
        spec: Sequence[tuple[str, ...]],
        shape: Sequence[int],
    ) -> ConfigError:
        """An axis `fsdp` that divides no dim of a parameter, under policy `error`."""
        dims = [(size, self.mesh.size(axes)) for size, axes in zip(shape, spec, strict=True)]
        dims = dims[param.axes[0] == "layers" :]
        most = max(size for size, _ in dims)
        fits = (n for n in range(1, most + 1) if any(size % (cut * n) == 0 for size, cut in dims))
        return ConfigError(
            f"{self._sized(param)}, by {decided_by}: {reason}, and the policy of fsdp is error;"
            f" {self._policy('fsdp', ['pad', 'replicate'])}, or take a mesh whose fsdp divides one, such as"
            f" {_closest(fits, self.mesh.fsdp)}"
        )

    def activation_cut_twice(self, name: str, dims: Sequence[str], axis: str, spec: Spec) -> ConfigError:
        """Rules of logical axes that put an axis on two dims of an activation."""
        used: set[str] = set()
        once = []
        for axes in spec:
            once.append(tuple(a for a in axes if a not in used))
            used |= set(axes)
        sizes = self.padding.physical
        on = [
            d + (f" {sizes[d]}" if d in sizes else "")
            for d, axes in zip(dims, spec, strict=True)
            if axis in axes
        ]
        return ConfigError(
            f"rules put mesh axis {axis!r} on two dims of activation {name}, {' and '.join(on)}; write"
            f" activations: {{{name}: {activation_text(tuple(once))}}} {self._where()}"
        )

    # --- parts of messages

    def _sizes(self, param: ParamSpec) -> str:
        shape = self.padding.use_shape(param.axes)
        return ", ".join(f"{axis} {size}" for axis, size in zip(param.axes, shape, strict=True))

    def _sized(self, param: ParamSpec) -> str:
        return f"{param.path} ({self._sizes(param)})"

    def _cut_by(self, param: ParamSpec, axis: str, spec: Spec) -> str:
        dims = zip(param.axes, self.padding.use_shape(param.axes), spec, strict=True)
        return " and ".join(f"{logical} {size}" for logical, size, axes in dims if axis in axes)

    def _where(self) -> str:
        """Where entries of rules are written."""
        if self.rules in PRESETS:
            return "in a rules file" + (f" with preset: {self.rules}" if self.rules != "fsdp+tp" else "")
        return f"in {self.rules}"

    def _policy(self, logical: str, policies: Sequence[str]) -> str:
        other = f" (or {policies[1]})" if len(policies) > 1 else ""
        return f"write policy: {{{logical}: {policies[0]}}}{other} {self._where()}"

    def _short(self, param: ParamSpec) -> str:
        """The least end of the path that finds no other parameter, of two names at least."""
        names = param.path.split("/")
        ends = ("/".join(names[start:]) for start in range(len(names) - 2, -1, -1))
        alone = (end for end in ends if sum(end in p.path for p in self.params) == 1)
        return next(alone, f"^{param.path}$")

    def _near(self, override: Override) -> ParamSpec | None:
        """The parameter whose path, or a part of it, looks most like an override's pattern."""
        parts: dict[str, ParamSpec] = {}
        if override.matches("lm_head/kernel"):  # of a model whose head is its embedding table
            return next((param for param in self.params if param.path == "embed/table"), None)
        for param in self.params:
            names = param.path.split("/")
            for start in range(len(names)):
                for stop in range(start + 1, len(names) + 1):
                    parts.setdefault("/".join(names[start:stop]), param)
        near = get_close_matches(override.pattern, parts, n=1, cutoff=0.5)
        return parts[near[0]] if near else None

    # --- overrides that fit

    def _written(self, override: Override, param: ParamSpec) -> str:
        """An override near the one given that every parameter which it matches can follow, as users type it.

        The same pattern where that can be, else a narrower one; else one more for this parameter alone.
        """
        for pattern, spec in self._candidates(override, param):
            if self._all_fit(pattern, spec):
                return _quoted(pattern, spec)
        return f"{_quoted(self._short(param), self._adapted(param, override.spec))} before it"

    def _candidates(self, override: Override, param: ParamSpec) -> Iterator[tuple[str, Spec | None]]:
        pattern, spec = override.pattern, override.spec
        yield pattern, self._adapted(param, spec)
        if not any(spec or ()):
            yield pattern, None
        matched = [p for p in self.params if override.matches(p.path)]
        leaves = {p.path.rpartition("/")[2]: p for p in reversed(matched)}
        for leaf in [leaf for leaf in ("kernel", "table") if leaf in leaves] or leaves:
            narrower = f"({pattern}).*{leaf}" if "|" in pattern else f"{pattern.removesuffix('.*')}.*{leaf}"
            yield narrower, spec
            yield narrower, self._adapted(leaves[leaf], spec)

    def _all_fit(self, pattern: str, spec: Spec | None) -> bool:
        try:
            matched = [param for param in self.params if re.search(pattern, param.path)]
        except re.error:  # of a pattern that a narrower one was made of
            return False
        return bool(matched) and all(spec is None or self._fits(param, spec) for param in matched)

    def _fits(self, param: ParamSpec, spec: Spec) -> bool:
        if param.axes[0] == "layers" and len(spec) == len(param.axes) - 1:
            spec = ((), *spec)
        used = [axis for axes in spec for axis in axes]
        shape = self.padding.use_shape(param.axes)
        return (
            len(spec) == len(shape)
            and len(set(used)) == len(used)
            and not (param.axes[0] == "layers" and spec[0])
            and all(size % self.mesh.size(axes) == 0 for size, axes in zip(shape, spec, strict=True))
        )

    def _adapted(self, param: ParamSpec, spec: Spec | None) -> Spec | None:
        """A spec for this parameter, without its layers, that keeps of `spec` what can be kept.

        An axis stays on its dim where it divides that, else goes to another, else is left out.
        """
        if spec is None:
            return None
        skip = param.axes[0] == "layers"
        dims, shape = param.axes[skip:], self.padding.use_shape(param.axes)[skip:]
        entries, loose = _entries(spec, param)
        placed: list[tuple[str, ...]] = []
        for axes, size in zip(entries, shape, strict=True):
            kept: tuple[str, ...] = ()
            for axis in axes:
                if axis in (*kept, *(a for other in placed for a in other)):
                    continue
                if size % self.mesh.size((*kept, axis)):
                    loose = (*loose, axis)
                else:
                    kept = (*kept, axis)
            placed.append(kept)
        for axis in dict.fromkeys(loose):
            if any(axis in axes for axes in placed):
                continue
            free_first = sorted(
                range(len(dims)), key=lambda dim: (dims[dim] in _WITHIN_HEADS, placed[dim] != ())
            )
            fitting = (dim for dim in free_first if shape[dim] % self.mesh.size((*placed[dim], axis)) == 0)
            dim = next(fitting, None)
            if dim is not None:
                placed[dim] = (*placed[dim], axis)
        return tuple(placed)


def _entries(spec: Spec, param: ParamSpec) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """An entry for each dim of the parameter but layers, and the axes that found none.

    Two entries for a kernel of more dims are its output and its input, as in EasyLM, whose kernels have no
    dims of heads.
    """
    skip = param.axes[0] == "layers"
    rank, entries = len(param.axes) - skip, list(spec)
    loose: tuple[str, ...] = ()
    if skip and len(entries) == rank + 1:
        loose = entries.pop(0)
    if len(entries) == 2 and param.use.kind == "kernel":
        inputs = param.use.num_inputs
        entries = [entries[0], *[()] * (rank - inputs - 1), entries[1], *[()] * (inputs - 1)]
    while len(entries) > rank and () in entries:
        entries.reverse()
        entries.remove(())
        entries.reverse()
    loose = (*loose, *(axis for axes in entries[rank:] for axis in axes))
    return (entries + [()] * rank)[:rank], loose


def _quoted(pattern: str, spec: Spec | None) -> str:
    return f"'{pattern}={spec_text(spec)}'"


def _without(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(a for a in axes if a != axis)


def _closest(numbers: Iterable[int], wanted: int, most: int = 3) -> str:
    """Those of the numbers that are closest to one that will not do."""
    return ", ".join(map(str, sorted(numbers, key=lambda n: abs(n - wanted))[:most]))
