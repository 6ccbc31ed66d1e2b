"""Which of the program's arguments a value comes from, and which parameter's gradient it is.

So that a collective can be told by the parameter that it serves. Not here: numbers (scalars.py).
"""

from __future__ import annotations

import re
from collections import deque

from shardwise.planner.hlo import Instruction
from shardwise.planner.scalars import PASSES, Site, carried_on

_PARTS = PASSES | {"dynamic-slice", "slice", "transpose"}
_ELEMENTWISE = frozenset({
    "add", "subtract", "multiply", "divide", "negate", "select", "abs", "sign", "sqrt", "rsqrt", "power",
    "maximum", "minimum",
})  # fmt: skip
_MOST_STEPS = 2000


def argument(site: Site, name: str) -> str:
    """The argument of which the value is a copy, a cast or a slice; "" for a computed value.

    A parameter is told by its path, anything else as JAX names it.
    """
    for _ in range(_MOST_STEPS):
        instruction = site.computation.instructions.get(name)
        if instruction is None:
            return ""
        if instruction.op in _PARTS:
            name = instruction.operands[0]
        elif instruction.op == "parameter" and site.parent is None:
            return _path(instruction)
        else:
            behind = _behind(site, instruction)
            if behind is None:
                return ""
            site, name = behind
    return ""


def _path(parameter: Instruction) -> str:
    keys = re.findall(r"\['([^']+)'\]", parameter.op_name.replace("\\", ""))
    return keys[-1] if keys else parameter.op_name


def _behind(site: Site, instruction: Instruction) -> tuple[Site, str] | None:
    """What a call's parameter, a tuple's element or an unchanged part of a loop's carry was given."""
    caller, parent = site.caller, site.parent
    if instruction.op == "parameter" and parent and caller and caller.op == "call":
        return parent, caller.operands[int(instruction.literal)]
    if instruction.op != "get-tuple-element":
        return None
    source = site.computation.instructions.get(instruction.operands[0])
    index = int(instruction.attributes["index"])
    if source is None:
        return None
    if source.op == "tuple":
        return site, source.operands[index]
    if source.op == "parameter" and parent and caller and caller.op == "while":
        body = site.module.computations[caller.called("body")[0]]
        given = parent.computation.instructions[caller.operands[0]]
        if carried_on(body, index) == index and given.op == "tuple":
            return parent, given.operands[index]
    return None


def gradient_of(site: Site, made: Instruction) -> str:
    """The parameter whose update the value goes into, "" if into none.

    Followed are copies, casts, slices, what a loop stacks up, further collectives, and the optimizer's
    arithmetic element by element, until it meets a parameter of the same shape.
    """
    todo: deque[tuple[Site, Instruction]] = deque([(site, made)])
    seen: set[tuple[int, str]] = set()
    while todo and len(seen) < _MOST_STEPS:
        where, value = todo.popleft()
        if (id(where), value.name) in seen:
            continue
        seen.add((id(where), value.name))
        for user in where.computation.users[value.name]:
            if user.op in _ELEMENTWISE and where.parent is None:
                found = _parameter_beside(where, value, user)
                if found:
                    return found
            todo += _onward(where, value, user)
        if value.is_root and where.parent and where.caller and where.caller.op == "call":
            todo.append((where.parent, where.caller))
    return ""


def _parameter_beside(site: Site, value: Instruction, user: Instruction) -> str:
    """A parameter that `user` combines the value with."""
    for name in user.operands:
        other = site.computation.instructions.get(name)
        if other is not None and other.op == "parameter" and other.shapes == value.shapes:
            path = _path(other)
            if path != other.op_name:  # one of a dict of parameters, or of moments like them
                return path
    return ""


def _onward(site: Site, value: Instruction, user: Instruction) -> list[tuple[Site, Instruction]]:
    """Where the value goes through `user`."""
    if user.op == "tuple":
        return _out_of(site, user, user.operands.index(value.name))
    if user.op == "dynamic-update-slice" and user.operands[1] == value.name:
        return [(site, user)]
    same = user.op in _ELEMENTWISE and [s.dims for s in user.shapes] == [s.dims for s in value.shapes]
    # a sum over dims of one element is a reshape
    same |= user.op == "reduce" and user.shapes[0].elements == value.shapes[0].elements
    if same or user.op in _PARTS or user.op.startswith(("all-reduce", "reduce-scatter")):
        return [(site, user)]
    return []


def _out_of(site: Site, root: Instruction, index: int) -> list[tuple[Site, Instruction]]:
    """The elements `index` of what a loop or call whose result is the tuple `root` gives its caller."""
    if not (root.is_root and site.parent and site.caller and site.caller.op in ("while", "call")):
        return []
    users = site.parent.computation.users[site.caller.name]
    gets = [u for u in users if u.op == "get-tuple-element" and int(u.attributes["index"]) == index]
    return [(site.parent, get) for get in gets]
