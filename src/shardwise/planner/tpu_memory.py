"""What a step holds in a TPU's memory, from the files that the TPU compiler writes about a program.

The compiler refuses a program by the sum of its allocations in HBM, which its buffer assignment lists to the
byte; JAX's `memory_analysis()` says less (its temporaries can exceed the HBM of a program that fits). Not
here: compiling (compile_worker.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.planner.hlo import Instruction, Module, parse_module

ASSIGNED = "after_optimizations-buffer-assignment.txt"
RANGES = "after_optimizations-live-range.txt"
PROGRAM = "after_optimizations.txt"
ACCEPTED = "after_optimizations_after_buffer_assignment.txt"
"""Ends of file names. The last is written only for a program that fits, before its machine code is made."""

_HBM = 0
"""Number ("color") of the memory space; others are on the chip (VMEM, SMEM, semaphores)."""
_MOST_HOPS = 12
_MOST_LINES = 8
_SMALL = 1 << 16
"""Bytes; smaller arrays are not told."""


_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")


@dataclass(frozen=True)
class LiveBuffer:
    """An array in HBM, beside the arguments, at the moment when the step holds most."""

    bytes: int
    """As it lies in tiles: padded to 8 × 128 elements in its last two dims."""
    shape: str
    """XLA's dtype and dims on one device: `f32[128256,2048]`."""
    cause: str
    """JAX's path of the operation that makes it, or the argument that it is a copy of; and the innermost line
    of this package behind it. Empty where the compiler does not say."""


@dataclass(frozen=True)
class Allocations:
    """Sums of HBM on one device, in bytes."""

    arguments: int
    """Of arguments, as they lie in tiles."""
    aliased: int
    """Those arguments whose memory a result takes over (donated)."""
    outputs: int
    """Of results, those in donated memory too."""
    temporaries: int
    """One heap for everything else, with the gaps that stay between arrays of different lifetimes."""
    live: tuple[LiveBuffer, ...] = field(repr=False)
    """The largest in the heap at its fullest, the largest first."""

    @property
    def total(self) -> int:
        """What the compiler compares with the HBM that there is."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class _Value:
    name: str
    shape: str
    size: int
    offset: int


def read_allocations(folder: str | Path, most: int = 24) -> Allocations | None:
    """From the files of one program; None where they are not there, or not of the known form.

    Args:
        most: how many of the arrays to list.
    """
    texts = {end: _text(folder, end) for end in (ASSIGNED, RANGES, PROGRAM)}
    if not texts[ASSIGNED]:
        return None
    sums = dict.fromkeys(("parameter", "aliased", "output", "heap"), 0)
    values: list[_Value] = []
    kind = ""
    for line in texts[ASSIGNED].splitlines():
        if allocation := re.match(r"allocation \d+: size (\d+)(.*)", line):
            size, rest = int(allocation[1]), allocation[2]
            kind = _kind(rest)
            if kind == "parameter" and "maybe-live-out" in rest:
                sums["aliased"] += size
            if kind:
                sums[kind] += size
        elif kind == "heap" and (value := _VALUE.match(line)):
            values.append(_Value(value[1], value[4], int(value[2]), int(value[3])))
    if not sums["parameter"]:
        return None
    live = _at_peak(values, _ranges(texts[RANGES]))
    return Allocations(
        sums["parameter"], sums["aliased"], sums["aliased"] + sums["output"], sums["heap"],
        _told(live[:most], values, texts[PROGRAM]),
    )  # fmt: skip


@dataclass(frozen=True)
class Overrun:
    """Why the TPU compiler refused a program for want of memory."""

    space: str
    """The memory: `HBM`, or one on the chip, such as `VMEM`."""
    needed_bytes: int
    """What the program would take, arguments and all."""
    available_bytes: int
    """What a program may take: HBM less what the system keeps."""
    message: str
    """The first lines of the compiler's own words."""

    @property
    def over_bytes(self) -> int:
        """By how much it is too large."""
        return self.needed_bytes - self.available_bytes

    def __str__(self) -> str:
        return (
            f"needs {_gib(self.needed_bytes)} of {self.space}, {_gib(self.over_bytes)} more than the"
            f" {_gib(self.available_bytes)} that there are"
        )


def overrun(message: str) -> Overrun | None:
    """What a refusal says; None where it is of another kind.

    The compiler rounds to hundredths of a unit of 1,024: read_allocations knows the bytes.
    """
    size = r"([\d.]+)([KMGT]?)i?B?"
    total = re.search(
        rf"out of memory on (\w+).*?required[^(]*\({size}\) exceeds[^(]*\({size}\)", message, re.S
    )
    used = re.search(rf"out of memory in memory space (\w+).*?Used {size} of {size}", message, re.S)
    found = total or used
    if found is None:
        return None
    head = "\n".join(message.strip().splitlines()[:_MOST_LINES])
    return Overrun(found[1].upper(), _bytes(found[2], found[3]), _bytes(found[4], found[5]), head)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** (" KMGT".index(unit or " ")))


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


def _text(folder: str | Path, end: str) -> str:
    found = sorted(Path(folder).glob(f"*.{end}"))
    return found[-1].read_text(errors="replace") if found else ""


def _kind(rest: str) -> str:
    """Which sum an allocation belongs to; "" for another memory than HBM."""
    color = re.search(r"\bcolor (\d+)", rest)
    if color and int(color[1]) != _HBM:
        return ""
    if re.search(r"\bparameter \d+", rest):
        return "parameter"
    return "output" if "maybe-live-out" in rest or "output shape" in rest else "heap"


def _ranges(text: str) -> dict[str, tuple[int, int]]:
    """Value → when it is made and used last, in the program's order."""
    found = re.findall(r"^\s+(\S+):(\d+)-(\d+)$", text, re.M)
    return {name.removesuffix("{}"): (int(first), int(last)) for name, first, last in found}


def _at_peak(values: list[_Value], ranges: dict[str, tuple[int, int]]) -> list[_Value]:
    """Those that lie in the heap when most of it is taken; of those that share memory one, the largest."""
    named = ((v, v.name.removesuffix("{}")) for v in values if v.size >= _SMALL)
    held = [(ranges[name], v) for v, name in named if name in ranges]
    best: tuple[int, list[_Value]] = (0, [])
    for moment in sorted({first for (first, _), _ in held}):
        taken = _apart([v for (first, last), v in held if first <= moment <= last])
        total = sum(v.size for v in taken)
        if total > best[0]:
            best = total, taken
    return sorted(best[1], key=lambda v: -v.size)


def _overlap(a: _Value, b: _Value) -> bool:
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size


def _apart(values: list[_Value]) -> list[_Value]:
    """Of values that overlap in memory the largest."""
    kept: list[_Value] = []
    for value in sorted(values, key=lambda v: -v.size):
        if not any(_overlap(value, k) for k in kept):
            kept.append(value)
    return kept


def _told(live: list[_Value], values: list[_Value], program: str) -> tuple[LiveBuffer, ...]:
    """With what the program says of where they come from: they, or what else is written to the same place."""
    try:
        module = parse_module(program) if program else None
    except ValueError:
        module = None
    where = {
        name: (computation.instructions, instruction)
        for computation in (module.computations.values() if module else ())
        for name, instruction in computation.instructions.items()
    }
    written: dict[tuple[int, str], list[str]] = {}
    for v in values:
        written.setdefault((v.offset, v.shape), []).append(v.name.split("{")[0])
    told = []
    for v in live:
        names = [v.name.split("{")[0], *written[v.offset, v.shape]]
        causes = (_cause(module, *where[name]) for name in names if module and name in where)
        told.append(LiveBuffer(v.size, re.sub(r"\{.*", "", v.shape), next(filter(None, causes), "")))
    return tuple(told)


def _cause(module: Module, around: dict[str, Instruction], instruction: Instruction) -> str:
    """The operation's path; of a copy or a cast that of what is copied."""
    for _ in range(_MOST_HOPS):
        if name := instruction.op_name:
            # tokamax writes a kernel's arguments into the path
            name = re.sub(r"tokamax:\{.*\}", "tokamax", name.replace("\\'", "'").replace('\\"', '"'))
            frames = [f for f in module.frames(instruction) if "/shardwise/" in f.file]
            line = f" at {frames[0].file.rpartition('/shardwise/')[2]}:{frames[0].line}" if frames else ""
            return name.removeprefix("jit(step)/") + line
        nearer = [around[o.split("#")[0]] for o in instruction.operands if o.split("#")[0] in around]
        if not nearer:
            break
        instruction = nearer[0]
    return ""
