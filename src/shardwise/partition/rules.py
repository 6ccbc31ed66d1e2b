"""Rules (logical axis → mesh axes) and overrides (regex on parameter paths → spec), as the user writes them.

Not here: applying them to tensors (plan.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.partition.mesh import _ALIASES, AXES

Spec = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, the mesh axes that cut it, major first; () leaves it whole."""


@dataclass(frozen=True)
class Rules:
    """Which mesh axes cut each logical axis, for parameters and activations alike."""

    table: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("batch", ("dp", "fsdp")),
        ("length", ()),
        ("layers", ()),
        ("vocab", ("tp",)),
        ("embed", ("fsdp",)),
        ("vector", ()),
        ("heads", ("tp",)),
        ("q_per_kv", ()),
        ("kv_heads", ("tp",)),
        ("head_dim", ()),
        ("mlp", ("tp",)),
    )

    def __post_init__(self) -> None:
        names = [logical for logical, _ in self.table]
        for logical, mesh_axes in self.table:
            if names.count(logical) > 1:
                raise ConfigError(f"logical axis {logical!r} has more than one rule; keep one")
            if any(axis not in AXES for axis in mesh_axes) or len(set(mesh_axes)) < len(mesh_axes):
                raise ConfigError(
                    f"rule {logical!r} → {mesh_axes!r}: give a tuple of different mesh axes out of"
                    f" {', '.join(AXES)}"
                )

    @cached_property
    def axes_of(self) -> dict[str, tuple[str, ...]]:
        """Logical axis → mesh axes."""
        return dict(self.table)

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that cut `logical`; an axis without a rule is an error, never quietly whole."""
        if logical not in self.axes_of:
            raise ConfigError(
                f"no rule for logical axis {logical!r}; rules exist for {', '.join(self.axes_of)}"
            )
        return self.axes_of[logical]


@dataclass(frozen=True)
class Override:
    """A spec for all parameters whose path a regular expression finds (`re.search`, as in EasyLM)."""

    pattern: str
    spec: Spec
    text: str = ""
    """As the user wrote it, for messages."""

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read `REGEX=SPEC`, SPEC being like `tp,fsdp`, `None,(fsdp,tp)` or `P('tp', 'fsdp')`; `mp` is `tp`.

        Raises:
            ConfigError: no `=`, a broken regex, an unknown axis, or one axis on two dims.
        """
        pattern, equals, body = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"override {text!r} has no REGEX=SPEC form; example: mlp/down_proj=tp,fsdp")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"override {text!r}: {pattern!r} is no regular expression: {error}") from None
        return cls(pattern, _parse_spec(body, text), text)

    def matches(self, path: str) -> bool:
        """Whether the pattern is found anywhere in `path`."""
        return re.search(self.pattern, path) is not None


_ITEM = r"(?:\([\w\s,]*\)|\w+)"  # the axes of one dim


def _parse_spec(body: str, text: str) -> Spec:
    wrapped = re.fullmatch(r"(?:PartitionSpec|PS|P)\s*\((.*)\)", body.strip())
    inner = (wrapped[1] if wrapped else body).replace("'", "").replace('"', "")
    if not re.fullmatch(rf"\s*{_ITEM}(\s*,\s*{_ITEM})*\s*,?\s*", inner):
        raise ConfigError(
            f"override {text!r}: the spec {body!r} cannot be read; write one entry a dim, like tp,None,fsdp"
            " or None,(fsdp,tp), with None for a dim that stays whole"
        )
    items = re.findall(_ITEM, inner)
    spec: list[tuple[str, ...]] = []
    for item in items:
        names = [n for n in re.split(r"[(),\s]+", item) if n and n != "None"]
        axes = tuple(_ALIASES.get(name, name) for name in names)
        for axis in axes:
            if axis not in AXES:
                raise ConfigError(
                    f"override {text!r}: unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}"
                )
        spec.append(axes)
    used = [axis for axes in spec for axis in axes]
    for axis in set(used):
        if used.count(axis) > 1:
            raise ConfigError(
                f"override {text!r} puts axis {axis!r} on two dims; an axis can cut a tensor once"
            )
    return tuple(spec)
