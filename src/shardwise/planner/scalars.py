"""Whole numbers that a partitioned program computes from constants and the device's number.

They tell how often a loop runs and which part of a buffer a device cuts out. Not here: arrays of data.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardwise.planner.hlo import Computation, Instruction, Module

Value = int | list[int]
"""A scalar, or a short vector such as a table with one number per device."""

PASSES = frozenset({"copy", "convert", "reshape", "bitcast", "optimization-barrier", "opt-barrier"})
"""Operations of one operand whose result has the operand's numbers in the same order."""
_TWO: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max, "minimum": min,
    "divide": lambda a, b: int(a / b) if b else 0, "remainder": lambda a, b: a - int(a / b) * b if b else a,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_SWAPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
_MOST_TRIPS = 1 << 20  # a loop found longer than this is taken as misread


@dataclass(frozen=True, eq=False)
class Site:
    """A computation as one chain of callers runs it."""

    module: Module = field(repr=False)
    computation: Computation = field(repr=False)
    parent: Site | None = None
    caller: Instruction | None = None
    """The parent's instruction that runs this computation."""
    runs: int = 1
    """Times per step, all loops around taken together."""
    in_loop: bool = False
    prefix: str = ""
    """op_name of the call, which the op_names of a shard_map's body leave out."""
    notes: tuple[str, ...] = ()

    def evaluate(self, name: str, device: int = 0) -> Value | None:
        """The instruction's value on partition `device`; None where it is not known."""
        return self._evaluate(name, device, 0)

    def _evaluate(self, name: str, device: int, depth: int) -> Value | None:
        instruction = self.computation.instructions.get(name)
        if instruction is None or depth > 64:
            return None
        op = instruction.op
        if op == "constant":
            return _literal(instruction.literal)
        if op == "partition-id":
            return device
        if op == "replica-id":
            return 0
        if op == "parameter":
            return self._argument(instruction, device, depth)
        if op == "get-tuple-element":
            return self._element(instruction, device, depth)
        values = [self._evaluate(operand, device, depth + 1) for operand in instruction.operands]
        return _apply(instruction, values)

    def _argument(self, parameter: Instruction, device: int, depth: int) -> Value | None:
        """A parameter is what the caller passes; a loop's carried tuple is no number."""
        if self.parent is None or self.caller is None or self.caller.op != "call":
            return None
        return self.parent._evaluate(self.caller.operands[int(parameter.literal)], device, depth + 1)

    def _element(self, get: Instruction, device: int, depth: int) -> Value | None:
        source, index = self.computation.instructions.get(get.operands[0]), int(get.attributes["index"])
        if source is None:
            return None
        if source.op == "tuple":
            return self._evaluate(source.operands[index], device, depth + 1)
        carried = source.op == "parameter" and self.caller is not None and self.caller.op == "while"
        if carried and self.caller is not None and self.parent is not None:
            body = self.module.computations[self.caller.called("body")[0]]
            if carried_on(body, index) == index:  # the loop leaves it as it was
                return self.parent._start(self.caller, index, device, depth)
        return None

    def _start(self, loop: Instruction, index: int, device: int = 0, depth: int = 0) -> Value | None:
        """What a loop of this computation carries at `index` before its first run."""
        given = self.computation.instructions[loop.operands[0]]
        if given.op == "tuple":
            return self._evaluate(given.operands[index], device, depth + 1)
        return None

    def trips(self, loop: Instruction) -> tuple[int | None, str]:
        """How often a `while` of this computation runs, and how that is known; None if it is not."""
        if found := re.search(r'"known_trip_count":\{"n":"?(\d+)"?\}', loop.tail):
            return int(found[1]), "stated by the compiler"
        condition = Site(self.module, self.module.computations[loop.called("condition")[0]], self, loop)
        body = self.module.computations[loop.called("body")[0]]
        test = _through(condition.computation, condition.computation.root)
        if test.op != "compare" or len(test.operands) != 2:
            return None, "its condition is no comparison"
        direction = test.attributes.get("direction", "")
        left, right = (condition.computation.instructions[name] for name in test.operands)
        index = _carried_index(condition.computation, left)
        if index is None or condition.evaluate(right.name) is None:
            left, right, direction = right, left, _SWAPPED.get(direction, direction)
            index = _carried_index(condition.computation, left)
        bound = condition.evaluate(right.name)
        if index is None or not isinstance(bound, int):
            return None, "its bound is computed"
        start, step = self._start(loop, index), _step(Site(self.module, body, self, loop), index)
        if not isinstance(start, int) or step is None:
            return None, "its counter is computed"
        for count, value in enumerate(_counting(start, step)):
            if count > _MOST_TRIPS:
                break
            if not _COMPARE[direction](value, bound):
                return count, "from its condition"
        return None, "its condition never ends it"


def _counting(start: int, step: int) -> Iterator[int]:
    while True:
        yield start
        start += step


def _literal(text: str) -> Value | None:
    flat = text.strip().replace("true", "1").replace("false", "0")
    if re.fullmatch(r"-?\d+", flat):
        return int(flat)
    if re.fullmatch(r"\{[\s\d,-]*\}", flat):
        return [int(n) for n in re.findall(r"-?\d+", flat)]
    return None  # a fraction, a matrix, or left out as {...}


def _apply(instruction: Instruction, values: list[Value | None]) -> Value | None:
    op = instruction.op
    if any(value is None for value in values):
        return None
    if op in PASSES and len(values) == 1:
        (value,) = values
        if isinstance(value, list) and len(value) == 1 and instruction.shapes[0].dims == ():
            return value[0]
        return value
    if op == "dynamic-slice" and len(values) == 2 and isinstance(values[0], list):
        table, start = values[0], values[1]
        (size,) = instruction.numbers("dynamic_slice_sizes") or (1,)
        if not isinstance(start, int):
            return None
        start = min(max(start, 0), len(table) - size)
        return table[start : start + size]
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) != len(values):
        return None
    if op in _TWO and len(numbers) == 2:
        return _TWO[op](*numbers)
    if op == "compare" and len(numbers) == 2:
        return int(_COMPARE[instruction.attributes["direction"]](*numbers))
    if op == "select" and len(numbers) == 3:
        return numbers[1] if numbers[0] else numbers[2]
    if op == "clamp" and len(numbers) == 3:
        return min(max(numbers[0], numbers[1]), numbers[2])
    return None


def _through(computation: Computation, instruction: Instruction) -> Instruction:
    """Past copies and the like to what made the value."""
    while instruction.op in PASSES and instruction.operands[0] in computation.instructions:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _carried_index(computation: Computation, instruction: Instruction) -> int | None:
    """Place in the loop's carried tuple from which the value comes."""
    source = _through(computation, instruction)
    if source.op != "get-tuple-element":
        return None
    tuple_ = computation.instructions.get(source.operands[0])
    return int(source.attributes["index"]) if tuple_ is not None and tuple_.op == "parameter" else None


def carried_on(body: Computation, index: int) -> int | None:
    """The place that the body's result at `index` is taken from unchanged, if any."""
    root = _through(body, body.root)
    if root.op != "tuple":
        return None
    return _carried_index(body, body.instructions[root.operands[index]])


def _step(site: Site, index: int) -> int | None:
    """What the body adds to the carried number at `index` each time."""
    body = site.computation
    root = _through(body, body.root)
    if root.op != "tuple":
        return None
    change = _through(body, body.instructions[root.operands[index]])
    if change.op not in ("add", "subtract") or len(change.operands) != 2:
        return None
    first, second = (body.instructions[name] for name in change.operands)
    if change.op == "add" and _carried_index(body, first) != index:
        first, second = second, first
    amount = site.evaluate(second.name)
    if _carried_index(body, first) != index or not isinstance(amount, int):
        return None
    return amount if change.op == "add" else -amount
