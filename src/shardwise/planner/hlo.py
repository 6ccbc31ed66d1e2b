"""Reads XLA's text form of a program (HLO): computations, instructions, shapes, and where each came from.

Only what an audit of communication needs, line by line. Not here: what the instructions mean (partitioned.py,
replica_groups.py, scalars.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
    "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4,
}  # fmt: skip
_NAMES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


@dataclass(frozen=True)
class Shape:
    """One array's dtype (XLA's name) and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size without padding; what is not an array (a token) takes none."""
        bits = _BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 0)
        return -(-self.elements * bits // 8)

    @property
    def jax_dtype(self) -> str:
        """The dtype as JAX names it."""
        if self.dtype in _NAMES:
            return _NAMES[self.dtype]
        if match := re.fullmatch(r"([sfu])(\d+)", self.dtype):
            return {"s": "int", "u": "uint", "f": "float"}[match[1]] + match[2]
        return re.sub(r"^f(\d)(e)", r"float\1_\2", self.dtype)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shapes: tuple[Shape, ...]
    """Arrays of the result; several for a tuple (nested ones flattened)."""
    op: str
    operands: tuple[str, ...]
    """Names of instructions in the same computation."""
    literal: str
    """What stands between the parentheses: a constant's value, a parameter's number."""
    tail: str = field(repr=False)
    """All attributes, as written."""
    type: str = field(default="", repr=False)
    """The result's type, as written."""
    is_root: bool = False

    @property
    def bytes(self) -> int:
        """Size of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Attribute → its text."""
        pairs = (part.partition("=") for part in split(self.tail))
        return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """An attribute like `dimensions={0,2}`; () where it is not there."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attributes.get(attribute, "")))

    @property
    def op_name(self) -> str:
        """The path of JAX's transformations and primitive, like `jit(step)/jvp()/while/body/dot_general`."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.tail)
        return found[1] if found else ""

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations that these attributes name."""
        texts = [self.attributes.get(name, "") for name in attributes]
        return [name for text in texts for name in re.findall(r"%?([\w.\-]+)", text)]


@dataclass(frozen=True)
class Computation:
    """A function of the program."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        roots = [i for i in self.instructions.values() if i.is_root]
        return roots[-1] if roots else list(self.instructions.values())[-1]

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instruction → those that take its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return users


@dataclass(frozen=True)
class Frame:
    """A line of Python on the stack when an operation was traced."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Module:
    """A whole program."""

    name: str
    computations: dict[str, Computation]
    entry: str
    tables: dict[str, dict[int, str]] = field(repr=False)
    """The numbered tables at the head (`FileNames`, `StackFrames`, …), for programs that have them."""

    def frames(self, instruction: Instruction) -> list[Frame]:
        """The traced Python stack, innermost first; one frame in the older form, none without metadata."""
        tail = instruction.tail
        if (found := re.search(r"stack_frame_id=(\d+)", tail)) and "StackFrames" in self.tables:
            return list(self._stack(int(found[1])))
        file, line = re.search(r'source_file="([^"]*)"', tail), re.search(r"source_line=(\d+)", tail)
        return [Frame(file[1], int(line[1]) if line else 0, "")] if file else []

    def _stack(self, number: int) -> Iterator[Frame]:
        # Parents are printed one too high (XLA of 2025 and 2026): then no frame's parent is number 0.
        parents = [self._row("StackFrames", n).get("parent_frame_id", 0) for n in self.tables["StackFrames"]]
        shift = 0 if 0 in parents else 1
        while row := self._row("StackFrames", number):
            place = self._row("FileLocations", row.get("file_location_id", 0))
            name = self.tables.get("FileNames", {}).get(place.get("file_name_id", 0), "")
            function = self.tables.get("FunctionNames", {}).get(place.get("function_name_id", 0), "")
            yield Frame(name.strip('"'), place.get("line", 0), function.strip('"'))
            parent = row.get("parent_frame_id", 0) - shift
            number = parent if parent < number else 0  # a table lists parents first: so this ends

    def _row(self, table: str, number: int) -> dict[str, int]:
        text = self.tables.get(table, {}).get(number, "")
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def parse_module(text: str) -> Module:
    """Read a module's text.

    Raises:
        ValueError: there is no entry computation, so this is not HLO.
    """
    name = re.search(r"^HloModule ([^\s,]+)", text, re.M)
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = ""
    current: dict[str, Instruction] | None = None
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if line.rstrip() == "}":
            current = None
        elif current is not None:
            if instruction := parse_instruction(line):
                _name_elements(current, instruction)
                current[instruction.name] = instruction
        elif header := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$", line):
            current = {}
            computations[header[2]] = Computation(header[2], current)
            entry = header[2] if header[1] else entry
        elif re.fullmatch(r"FileNames|FunctionNames|FileLocations|StackFrames", line.strip()):
            table = tables.setdefault(line.strip(), {})
        elif table is not None and (row := re.match(r"(\d+) (.*)", line)):
            table[int(row[1])] = row[2]
    if not entry:
        raise ValueError("this text has no ENTRY computation, so it is not an HLO module")
    return Module(name[1] if name else "", computations, entry, tables)


def parse_instruction(line: str) -> Instruction | None:
    """One instruction's line; None for any other line."""
    line = re.sub(r"/\*index=\d+\*/", "", line).strip()
    head = re.match(r"(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    start = head.end()
    # a tuple, or dtype[dims] and perhaps a layout, which may hold parentheses: f32[8,128]{1,0:T(8,128)}
    array = re.compile(r"\w+\[[^\]]*\]|\w+").match(line, start)
    end = array.end() if array else _closing(line, start)
    if line[end : end + 1] == "{":
        end = _closing(line, end)
    op = re.compile(r"\s*([\w\-]+)\(").match(line, end)
    if not op:
        return None
    close = _closing(line, op.end() - 1)
    inside = line[op.end() : close - 1]
    literal = op[1] in ("constant", "parameter", "iota", "partition-id", "replica-id")
    names = [] if literal else [re.search(r"%?([\w.\-#]+)\s*$", part) for part in split(inside)]
    return Instruction(
        head[2], _shapes(line[start:end]), op[1], tuple(name[1] for name in names if name), inside,
        line[close:].lstrip(", "), line[start:end], bool(head[1]),
    )  # fmt: skip


def _name_elements(computation: dict[str, Instruction], user: Instruction) -> None:
    """Newer texts write `%x#2` for element 2 of a tuple, without a get-tuple-element; here it gets one."""
    for operand in user.operands:
        name, *indices = operand.split("#")
        for index in indices:
            whole, name = name, f"{name}#{index}"
            made = computation.get(whole)
            if made is not None and name not in computation:
                parts = split(made.type.strip()[1:-1])
                part = parts[int(index)].strip() if int(index) < len(parts) else ""
                computation[name] = Instruction(
                    name, _shapes(part), "get-tuple-element", (whole,), whole, f"index={index}", part
                )


def _shapes(text: str) -> tuple[Shape, ...]:
    """Arrays of a result type; layouts look unlike `dtype[dims]` and are passed over."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", text)
    return tuple(Shape(t, tuple(int(n) for n in re.findall(r"\d+", dims))) for t, dims in found)


_OPEN, _CLOSE = "([{", ")]}"


def _closing(text: str, start: int) -> int:
    """Position behind the bracket that closes the one at `start`; quoted text may hold any bracket."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in _OPEN:
            depth += 1
        elif not quoted and c in _CLOSE:
            depth -= 1
            if depth == 0:
                return i + 1
    return len(text)


def split(text: str) -> list[str]:
    """Parts between commas that stand outside all brackets and quotes."""
    parts, depth, quoted, last = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        elif quoted:
            continue
        elif c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [*parts, text[last:]] if text[last:].strip() else parts
