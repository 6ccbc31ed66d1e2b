"""Rules, as the user writes them: which mesh axes cut each dim of parameters and of named activations.

Three tables (parameters by logical axis, activations by name, what to do where an axis does not divide) and
overrides (a regular expression on parameter paths → spec). Not here: named sets of rules and rules files
(presets.py), applying rules to tensors (plan.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from shardwise.errors import ConfigError, did_you_mean
from shardwise.partition.mesh import _ALIASES, AXES

Spec = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, the mesh axes that cut it, major first; () leaves it whole."""

Policy = Literal["pad", "replicate", "error"]
"""What to do where mesh axes do not divide a dim: pad it, leave it whole, or refuse."""

HeadLayout = Literal["vocab", "hidden", "replicated"]
"""How the output head [V, D] is cut over `tp`: its ids, its hidden dim, or not at all."""

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "tokens": ("batch", "length"),
    "residual": ("batch", "length", "embed"),
    "query": ("batch", "length", "heads", "q_per_kv", "head_dim"),
    "key": ("batch", "length", "heads", "head_dim"),
    "value": ("batch", "length", "heads", "head_dim"),
    "attention_out": ("batch", "length", "heads", "q_per_kv", "head_dim"),
    "mlp_hidden": ("batch", "length", "mlp"),
    "kv_cache": ("batch", "length", "heads", "head_dim"),
    "router_logits": ("batch", "length", "experts"),
    "words": ("batch", "length", "word_embed"),
    "first": ("batch", "one", "embed"),
    "pooled": ("batch", "one", "embed"),
    "label_logits": ("batch", "one", "labels"),
}
"""Named activations and the logical axis of each dim; `one` has one place, that of a sequence's first token.
Logits of the vocabulary are not here: their cut is the head layout."""

_BATCH = ("dp", "fsdp")
DEFAULT_PARAMS: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": ("tp",),
    "embed": ("fsdp",),
    "word_embed": ("fsdp",),
    "word_vector": (),
    "vector": (),
    "positions": (),
    "token_types": (),
    "labels": (),
    "experts": (),
    "heads": ("tp",),
    "q_per_kv": (),
    "kv_heads": ("tp",),
    "head_dim": (),
    "mlp": ("tp",),
}
_PADDED = ("heads", "kv_heads", "mlp", "vocab")
DEFAULT_POLICY: dict[str, Policy] = {
    "heads": "pad",
    "kv_heads": "pad",
    "mlp": "pad",
    "vocab": "pad",
    "embed": "error",
    "word_embed": "error",
    "word_vector": "error",
    "vector": "error",
    "positions": "error",
    "token_types": "error",
    "labels": "error",
    "experts": "error",
    "q_per_kv": "error",
    "head_dim": "error",
    "length": "error",
    "fsdp": "pad",
}


@dataclass(frozen=True)
class Override:
    """A spec for all parameters whose path a regular expression finds (`re.search`, as in EasyLM)."""

    pattern: str
    spec: Spec | None
    """None leaves every dim whole, whatever the rank."""
    text: str = ""
    """As the user wrote it, for messages and plan files."""

    def __post_init__(self) -> None:
        if self.spec is not None:
            _check_is_spec(f"override {self.text or self.pattern!r}", self.spec)
        if not self.text:
            object.__setattr__(self, "text", f"{self.pattern}={spec_text(self.spec)}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"override {self.text!r}: {self.pattern!r} is no regular expression: {error}"
            ) from None
        for axes in self.spec or ():
            _check_known(f"override {self.text!r}", axes)
        once = tuple(tuple(dict.fromkeys(axes)) for axes in self.spec or ())
        for axes in self.spec or ():
            _check_once(f"override {self.text!r}", axes, f"'{self.pattern}={spec_text(once)}'")

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read `REGEX=SPEC`, SPEC being like `tp,fsdp`, `None,(fsdp,tp)`, `P('tp', 'fsdp')` or `whole`; `mp`
        is `tp`.

        Raises:
            ConfigError: no `=`, a broken regex, an unknown axis, or one axis twice on a dim. One axis on two
                dims is refused when planning, which knows the tensor.
        """
        pattern, equals, body = text.rpartition("=")
        pattern = pattern.strip()  # no path has spaces
        if not equals or not pattern:
            raise ConfigError(f"override {text!r} has no REGEX=SPEC form; example: mlp/down_proj=tp,fsdp")
        return cls(pattern, None if body.strip() == "whole" else _parse_spec(body, text), text)

    def matches(self, path: str) -> bool:
        """Whether the pattern is found anywhere in `path`."""
        return re.search(self.pattern, path) is not None


@dataclass(frozen=True)
class Rules:
    """How every parameter and named activation is cut, by logical axis and name."""

    name: str = "fsdp+tp"
    """Of the preset, or of the file, for reports."""
    params: tuple[tuple[str, tuple[str, ...]], ...] = tuple(DEFAULT_PARAMS.items())
    """Logical axis of a parameter's dim → mesh axes that cut it."""
    activations: tuple[tuple[str, Spec], ...] = ()
    """Name of an activation → mesh axes of each dim; see ACTIVATIONS. Those left out follow `params`."""
    policy: tuple[tuple[str, Policy], ...] = tuple(DEFAULT_POLICY.items())
    """Logical axis → what happens where its axes do not divide it. `fsdp` stands for that mesh axis: it cuts
    another dim of the tensor where it can, at the same cost, and only then follows its policy."""
    overrides: tuple[Override, ...] = ()
    """Tried in order before `params`. Unlike a user's, one that matches only a head that this model does not
    have is no error, and one whose axes do not divide a dim follows the policies."""

    def __post_init__(self) -> None:
        for what, table in (
            ("logical axis", self.params),
            ("activation", self.activations),
            ("policy of", self.policy),
        ):
            names = [name for name, _ in table]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ConfigError(f"{what} {twice!r} has more than one rule; keep one")
        for logical, mesh_axes in self.params:
            if logical not in DEFAULT_PARAMS:
                raise ConfigError(
                    f"no parameter has a logical axis {logical!r}; there are"
                    f" {', '.join(DEFAULT_PARAMS)}{did_you_mean(logical, DEFAULT_PARAMS)}"
                )
            _check_is_tuple(f"rule {logical!r}", mesh_axes)
            what = f"rule {logical}: {axes_text(mesh_axes)}"
            _check_known(what, mesh_axes)
            _check_once(what, mesh_axes, f"params: {{{logical}: {axes_text(dict.fromkeys(mesh_axes))}}}")
        for name, spec in sorted(self.activations, key=lambda item: item[0] != "tokens"):  # others follow it
            self._check_activation(name, spec)
        for axis, policy in self.policy:
            self._check_policy(axis, policy)

    @cached_property
    def axes_of(self) -> dict[str, tuple[str, ...]]:
        """Logical axis → mesh axes."""
        return dict(self.params)

    @cached_property
    def policy_of(self) -> dict[str, Policy]:
        """Logical axis → policy; the default's where none is given."""
        return DEFAULT_POLICY | dict(self.policy)

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that cut `logical`; an axis without a rule is an error, never quietly whole."""
        if logical not in self.axes_of:
            raise ConfigError(
                f"no rule for logical axis {logical!r}; rules exist for {', '.join(self.axes_of)}; give it"
                " mesh axes, or () to leave it whole"
            )
        return self.axes_of[logical]

    def activation(self, name: str) -> Spec:
        """Mesh axes that cut each dim of a named activation, before sizes are looked at.

        Where the table does not name it: the batch as `tokens` (by itself over dp and fsdp), heads and mlp as
        the parameters' are at use (over dp and fsdp those are gathered before), all else whole.
        """
        table = dict(self.activations)
        if name in table:
            return table[name]
        batch = table["tokens"][0] if "tokens" in table else _BATCH
        fixed = {"batch": batch, "length": (), "embed": (), "word_embed": (), "experts": ()}
        return tuple(
            fixed[axis] if axis in fixed else tuple(a for a in self.axes_of.get(axis, ()) if a not in _BATCH)
            for axis in ACTIVATIONS[name]
        )

    def changed(
        self,
        params: Mapping[str, tuple[str, ...]] | None = None,
        activations: Mapping[str, Spec] | None = None,
        policy: Mapping[str, Policy] | None = None,
        overrides: Iterable[Override] = (),
        name: str | None = None,
    ) -> Rules:
        """These rules with some entries replaced; new overrides come before those there are."""
        return replace(
            self,
            name=name or self.name,
            params=tuple((self.axes_of | dict(params or {})).items()),
            activations=tuple((dict(self.activations) | dict(activations or {})).items()),
            policy=tuple((self.policy_of | dict(policy or {})).items()),
            overrides=(*overrides, *self.overrides),
        )

    def _check_activation(self, name: str, spec: Spec) -> None:
        if name not in ACTIVATIONS:
            extra = "; the cut of logits is --head-layout" if name == "logits" else ""
            raise ConfigError(
                f"no activation is named {name!r}; there are {', '.join(ACTIVATIONS)}"
                f"{extra or did_you_mean(name, ACTIVATIONS)}"
            )
        _check_is_spec(f"activation {name!r}", spec)
        dims, what = ACTIVATIONS[name], f"activation {name}: {activation_text(spec)}"
        for axes in spec:
            _check_known(what, axes)
        tokens = dict(self.activations).get("tokens", (_BATCH,))
        batch = tuple(dict.fromkeys(tokens[0] if tokens else _BATCH))
        fixed = f"activations: {{{name}: {activation_text(_nearest_activation(spec, dims, batch))}}}"
        for axes in spec:
            _check_once(what, axes, fixed)
        if len(spec) != len(dims):
            entries = "1 entry" if len(spec) == 1 else f"{len(spec)} entries"
            raise ConfigError(
                f"{what} has {entries}, but {name} has {len(dims)} dims ({', '.join(dims)}); write {fixed}"
            )
        twice = [axis for axes in spec for axis in axes if sum(axis in others for others in spec) > 1]
        if twice:
            on = [dim for dim, axes in zip(dims, spec, strict=True) if twice[0] in axes]
            raise ConfigError(
                f"{what} puts mesh axis {twice[0]!r} on two dims ({', '.join(on)}); write {fixed}"
            )
        if spec[0] != batch:
            raise ConfigError(
                f"{what} cuts the batch over {'+'.join(spec[0]) or 'nothing'}, but tokens over"
                f" {'+'.join(batch) or 'nothing'}; the batch is split once: write {fixed}, or change tokens"
            )

    def _check_policy(self, axis: str, policy: str) -> None:
        if axis not in DEFAULT_POLICY:
            near = did_you_mean(axis, DEFAULT_POLICY)
            raise ConfigError(
                f"no policy can be set for {axis!r}; there are {', '.join(DEFAULT_POLICY)}{near}"
            )
        allowed = tuple(
            p
            for p in get_args(Policy)
            if not (p == "pad" and axis not in (*_PADDED, "fsdp")) and (axis, p) != ("kv_heads", "replicate")
        )
        if policy not in allowed:
            near = did_you_mean(str(policy), allowed)
            raise ConfigError(f"policy {policy!r} for {axis!r}: allowed are {', '.join(allowed)}{near}")


def _check_is_tuple(what: str, value: object) -> None:
    """Of rules made in Python, where 'tp' would pass for the axes t and p."""
    if not isinstance(value, tuple):
        raise ConfigError(f"{what}: {value!r} is no tuple of mesh axes; write ('tp',) or ('dp', 'fsdp')")


def _check_is_spec(what: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(
            f"{what}: {value!r} is no tuple; write one with mesh axes for each dim: (('tp',), ())"
        )
    for axes in value:
        _check_is_tuple(what, axes)


def _check_known(what: str, mesh_axes: Iterable[str]) -> None:
    for axis in mesh_axes:
        if axis not in AXES:
            near = did_you_mean(str(axis), AXES, cutoff=0.3)
            raise ConfigError(f"{what}: unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}{near}")


def _check_once(what: str, mesh_axes: tuple[str, ...], fixed: str) -> None:
    """Refuses an axis that one dim has twice."""
    twice = next((axis for axis in mesh_axes if mesh_axes.count(axis) > 1), None)
    if twice is not None:
        raise ConfigError(f"{what} names mesh axis {twice!r} twice for one dim; write {fixed}")


def _nearest_activation(spec: Spec, dims: tuple[str, ...], batch: tuple[str, ...]) -> Spec:
    """A spec of the right rank, with the batch cut as tokens are, and each axis once."""
    rest = spec if len(spec) == len(dims) - 1 and spec[:1] != (batch,) else spec[1:]  # the batch left out
    used, out = set(batch), [batch]
    for axes in (*rest, *((),) * len(dims))[: len(dims) - 1]:
        out.append(tuple(axis for axis in dict.fromkeys(axes) if axis not in used))
        used |= set(axes)
    return tuple(out)


def axes_text(axes: Iterable[str]) -> str:
    """The mesh axes of one dim as users write them in a rules file: `tp`, `[dp, fsdp]`, `null`."""
    names = list(map(str, axes))
    return f"[{', '.join(names)}]" if len(names) > 1 else names[0] if names else "null"


def activation_text(spec: Spec) -> str:
    """An activation's spec as users write it in a rules file: `[[dp, fsdp], tp, null]`."""
    return f"[{', '.join(map(axes_text, spec))}]"


def spec_text(spec: Spec | None) -> str:
    """A spec as users write it in an override."""
    if spec is None:
        return "whole"
    entries = [",".join(axes) or "None" for axes in spec]
    return ",".join(f"({e})" if "," in e else e for e in entries)


_ITEM = r"(?:\([\w\s,]*\)|\w+)"  # the axes of one dim


def _parse_spec(body: str, text: str) -> Spec:
    wrapped = re.fullmatch(r"(?:PartitionSpec|PS|P)\s*\((.*)\)", body.strip())
    inner = (wrapped[1] if wrapped else body).replace("'", "").replace('"', "")
    if not re.fullmatch(rf"\s*{_ITEM}(\s*,\s*{_ITEM})*\s*,?\s*", inner):
        raise ConfigError(
            f"override {text!r}: the spec {body!r} cannot be read; write one entry a dim, like tp,None,fsdp"
            " or None,(fsdp,tp), with None for a dim that stays whole, or the word whole for all of them"
        )
    names = [re.split(r"[(),\s]+", item) for item in re.findall(_ITEM, inner)]
    return tuple(tuple(_ALIASES.get(n, n) for n in item if n and n != "None") for item in names)
