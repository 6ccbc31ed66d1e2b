"""Plans as JSON: writing one, reading it back for a model and a mesh, telling two apart.

A file holds what the plan was made from (rules, overrides, head layout) and what came of it. Reading makes
the plan again and refuses a file whose decisions are not those: one edited by hand, or made by other rules.
To change a plan, change what it was made from. Not here: making plans (decide.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import AXES, MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rules import HeadLayout, Override, Rules, Spec, spec_text
from shardwise.runtime.files import why, write_new

FORMAT = "shardwise-plan-1"
_PARTS = ("model", "mesh", "rules", "parameters", "activations")
_MOST_DIFFERENCES = 8

MakePlan = Callable[[Rules, Sequence[Override], "HeadLayout | None"], Plan]


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; see docs/partitioning.md for the form."""
    return {
        "format": FORMAT,
        "model": _plain(asdict(plan.config)),
        "mesh": {**plan.mesh.sizes, "split_physical": plan.mesh.split_physical},
        "rules": {
            "name": plan.rules.name,
            "params": {name: list(axes) for name, axes in plan.rules.params},
            "activations": {name: _lists(spec) for name, spec in plan.rules.activations},
            "policy": dict(plan.rules.policy),
            "overrides": [override.text for override in plan.rules.overrides],
        },
        "overrides": [override.text for override in plan.overrides],
        "head_layout": plan.head_asked,
        "parameters": {
            d.path: {
                "axes": list(d.axes),
                "true_shape": list(d.true_shape),
                "shape": list(d.shape),
                "spec": _lists(d.spec),
                "decided_by": d.decided_by,
                "notes": list(d.notes),
            }
            for d in plan.decisions
        },
        "activations": {
            a.name: {
                "axes": list(a.axes),
                "spec": _lists(a.spec),
                "decided_by": a.decided_by,
                "notes": list(a.notes),
            }
            for a in plan.activations
        },
        "notes": list(plan.notes),
    }


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file, and the folders above it that there are not.

    Raises:
        ConfigError: the file exists or cannot be written.
    """
    write_new("plan file", path, json.dumps(to_json(plan), indent=1) + "\n")


def read_plan_file(path: str | Path) -> dict[str, Any]:
    """The content of a plan file.

    Raises:
        ConfigError: unreadable, or not a plan file of this version.
    """
    try:
        read = Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"plan file {path} cannot be read: {why(error)}") from None
    try:
        content = json.loads(read)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"plan file {path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{path} is no plan file of this version (format {FORMAT}); save the plan again")
    missing = [key for key in _PARTS if key not in content]
    if missing:
        raise ConfigError(f"plan file {path} has no {', '.join(missing)}; save the plan again")
    for key in _PARTS:
        inner = content[key].values() if isinstance(content[key], dict) else [None]
        if not isinstance(content[key], dict) or (
            key in ("parameters", "activations") and not all(isinstance(entry, dict) for entry in inner)
        ):
            raise ConfigError(
                f"plan file {path}: {key} is not a table of what it should hold; save the plan again"
            )
    return content


def mesh_of(content: Mapping[str, Any], path: str | Path) -> MeshSpec:
    """The mesh of a plan file."""
    saved = content["mesh"]
    wrong = set(saved) - {*AXES, "split_physical"} or [
        axis for axis in AXES if type(saved.get(axis, 1)) is not int or saved.get(axis, 1) < 1
    ]
    if wrong or not isinstance(saved.get("split_physical", False), bool):
        raise ConfigError(
            f"plan file {path}: mesh {json.dumps(saved)} cannot be read; it has a size of at least 1 for"
            f" each of {', '.join(AXES)}, and split_physical"
        )
    return MeshSpec(**saved)


def restore_plan(
    content: Mapping[str, Any], path: str | Path, config: ModelConfig, mesh: MeshSpec, make: MakePlan
) -> Plan:
    """The plan of a file, for this model and mesh.

    Args:
        content: from read_plan_file.
        make: plans this model on this mesh with given rules, overrides and head layout.

    Raises:
        ConfigError: model or mesh are not those that the plan was made for, or its decisions are not those
            that its rules give; the differences are named.
    """
    wrong = [*_unlike("model", content["model"], _plain(asdict(config)))]
    wrong += _unlike("mesh", {axis: content["mesh"].get(axis) for axis in mesh.sizes}, mesh.sizes)
    if wrong:
        raise ConfigError(f"plan file {path} does not fit: {_listed(wrong)}; make a plan for this one")
    try:
        rules = _rules(content["rules"])
        overrides = [Override.parse(text) for text in content.get("overrides", [])]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"plan file {path}: its rules cannot be read: {error!r}") from None
    except ConfigError as error:
        raise ConfigError(f"plan file {path}: {error}") from None
    try:
        plan = make(rules, overrides, content.get("head_layout"))
    except ConfigError as error:
        raise ConfigError(f"plan file {path}: {error}") from None
    made = to_json(plan)
    wrong = differences(content, made | {"mesh": content["mesh"]})  # how devices are laid out changes no cut
    if wrong:
        raise ConfigError(
            f"plan file {path} says otherwise than its own rules and overrides: {_listed(wrong)}; change"
            " those instead of the decisions, or save the plan again"
        )
    return plan


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What sets two plan files apart, a line each; `x → y` is what the first and the second say."""
    found: list[str] = []
    for key in ("model", "mesh", "rules"):
        found += _unlike(key, a[key], b[key])
    for key in ("overrides", "head_layout", "notes"):
        if a.get(key) != b.get(key):
            found.append(f"{key}: {_text(a.get(key))} → {_text(b.get(key))}")
    for kind in ("parameters", "activations"):
        mine, other = a[kind], b[kind]
        found += [f"{name}: only in the first" for name in mine if name not in other]
        found += [f"{name}: only in the second" for name in other if name not in mine]
        for name in mine:
            if name in other:
                found += _unlike(name, mine[name], other[name])
    return found


def _unlike(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for each key, at any depth, of which the two say different things."""
    found: list[str] = []
    for key in [*a, *(key for key in b if key not in a)]:
        one, other = a.get(key), b.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _unlike(f"{name} {key}", one, other)
        elif one != other:
            found.append(f"{name} {key}: {_text(one)} → {_text(other)}")
    return found


def _text(value: Any) -> str:
    """A spec as users write it, anything else as JSON."""
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return spec_text(tuple(tuple(map(str, axes)) for axes in value))
    return json.dumps(value, ensure_ascii=False)


def _listed(found: Sequence[str]) -> str:
    more = len(found) - _MOST_DIFFERENCES
    return "; ".join(found[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _rules(saved: Mapping[str, Any]) -> Rules:
    return Rules(
        saved["name"],
        tuple((name, tuple(axes)) for name, axes in saved["params"].items()),
        tuple((name, tuple(map(tuple, spec))) for name, spec in saved["activations"].items()),
        tuple(saved["policy"].items()),
        tuple(Override.parse(text) for text in saved["overrides"]),
    )


def _lists(spec: Spec) -> list[list[str]]:
    return [list(axes) for axes in spec]


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples as lists."""
    return json.loads(json.dumps(value))
