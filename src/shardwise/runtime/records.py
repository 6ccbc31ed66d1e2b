"""Frozen dataclasses as JSON values and back, for records that cross a process or lie in a cache.

What comes back equals what went in: tuples are tuples again, records within records too. Not here: files that
users may have edited, which need messages of their own (partition/plan_file.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_values(record: Any) -> dict[str, Any]:
    """A dataclass's fields as JSON gives them back: tuples as lists, records as tables."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(record)))
    return values


def from_values(cls: type[T], values: Any) -> T:
    """The dataclass whose `to_values` these are.

    Raises:
        TypeError: a field that the class does not have, or none for one without a default.
        ValueError: a value of another kind than the field's.
    """
    made: T = _made(cls, values)
    return made


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _made(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is no {hint.__name__}")
        hints = _hints(hint)
        kept = {field.name for field in fields(hint) if field.init}
        # A name that is not a field's is left in, for the class to refuse.
        return hint(**{key: _made(hints[key], v) if key in kept else v for key, v in value.items()})
    if get_origin(hint) in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        (hint,) = (arm for arm in get_args(hint) if arm is not NoneType)
        return _made(hint, value)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{value!r} is no list")
        arms = get_args(hint)
        arms = arms[:1] * len(value) if arms[-1:] == (...,) else arms
        return tuple(_made(arm, v) for arm, v in zip(arms, value, strict=True))
    return value
