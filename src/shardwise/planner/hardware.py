"""Machines: chips put together into slices or nodes, and the text that names them (`--on`).

Not here: what one chip can do (runtime/chips.py), and where a mesh lies on a machine (hosting.py).
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import ConfigError
from shardwise.runtime.chips import Chip, Domain, Torus, chip_of_device, find_chip

EXAMPLES = "such as v5p-128, v5p:4x4x4, 2xv5e:16x16, h100:64, 8xh100x4 or cpu:2"


@dataclass(frozen=True)
class System:
    """Chips of one kind, in slices (TPU) or nodes (GPU) of one shape."""

    chip: Chip
    shape: tuple[int, ...]
    """Chips of one slice along each axis of its torus; of one node (n,)."""
    slices: int = 1
    """How many slices or nodes; between them is the slower network."""

    @property
    def slice_chips(self) -> int:
        """Chips in a slice."""
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        """All chips."""
        return self.slice_chips * self.slices

    @property
    def num_devices(self) -> int:
        """JAX devices: what a mesh is made of."""
        return self.num_chips * self.chip.devices

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which axes of a TPU slice close into a ring."""
        fabric = self.chip.fabric
        if not isinstance(fabric, Torus):
            return (False,) * len(self.shape)
        if fabric.axes == 3:
            cubes = all(size % fabric.wraps_from == 0 for size in self.shape)
            return (cubes,) * len(self.shape)
        return tuple(size == fabric.wraps_from for size in self.shape)

    @property
    def hbm(self) -> float:
        """Bytes of memory of one JAX device; devices that a host simulates share its own."""
        if self.chip.hbm is not None:
            return self.chip.hbm / self.chip.devices
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self.num_devices

    @property
    def flops_share(self) -> float:
        """The part of a chip's rates that one device has: simulated devices share their processor."""
        return 1.0 if self.chip.kind != "cpu" else 1.0 / self.num_devices

    @property
    def topology(self) -> str | None:
        """What the TPU compiler calls a slice, `v5p:4x4x4`; None for others."""
        return f"{self.chip.name}:{_by(self.shape)}" if self.chip.kind == "tpu" else None

    def __str__(self) -> str:
        if self.chip.kind == "cpu":
            return f"{_some(self.num_devices, 'simulated device')} on this processor"
        what, unit = ("slice", "chip") if self.chip.kind == "tpu" else ("node", "GPU")
        each = f"{_by(self.shape)} = " if len(self.shape) > 1 else ""
        devices = f", {self.num_devices} JAX devices" if self.chip.devices > 1 else ""
        many = f"{self.slices} {what}s of " if self.slices > 1 else f"one {what} of "
        total = f", {self.num_chips} in all" if self.slices > 1 else ""
        return f"{self.chip.name}, {many}{each}{_some(self.slice_chips, unit)}{total}{devices}"


_TEXT = re.compile(
    r"(?:(?P<many>[0-9]+)x)?(?P<name>7x|[a-z][a-z0-9._-]*?)"
    r"(?:-(?P<count>[0-9]+)|:(?P<shape>[0-9]+(?:x[0-9]+)*))?(?:x(?P<times>[0-9]+))?"
)


def parse_system(text: str, extra: str | None = None) -> tuple[System, tuple[str, ...]]:
    """Read `--on`.

    `CHIP-N` is Google's name, in which N counts TensorCores for chips with two (v4, v5p, tpu7x) and chips
    for the rest; `CHIP:AxBxC` is a slice of that shape; `CHIP:N` is N chips or GPUs. `Mx` in front of a TPU
    means M slices. `8xh100` is one node of eight GPUs, `8xh100x4` four of them. `cpu:N` is N simulated
    devices.

    Args:
        extra: a YAML file of more chips (chips()).

    Returns:
        The machine, and what should be said of how it was read.

    Raises:
        ConfigError: not a machine that exists; gives the nearest.
    """
    found = _TEXT.fullmatch(text.strip().lower())
    if found is None or (found["times"] and found["shape"]):
        raise ConfigError(f"--on {text!r} cannot be read; name a machine {EXAMPLES}")
    name, count, shape = found["name"], found["count"], found["shape"]
    if count is not None and _is_chip(f"{name}-{count}", extra):  # a100-80
        name, count = f"{name}-{count}", None
    chip = _named(text, name, extra)
    dims = tuple(map(int, shape.split("x"))) if shape else ()
    many, times = (int(found[key]) if found[key] else None for key in ("many", "times"))
    if 0 in (*dims, many, times) or (count is not None and int(count) == 0):
        raise ConfigError(f"--on {text!r} has a 0; every number must be at least 1")
    notes = [] if name == chip.name else [f"{name} is read as {chip.name}"]
    if not (count or dims or many or times or chip.kind == "cpu"):
        notes.append(f"{text} names no number: one {chip.name} alone")
    if chip.kind == "tpu":
        if times is not None:
            alone = text.strip().lower().removesuffix(f"x{found['times']}")
            raise ConfigError(f"--on {text!r}: {times} TPU slices are spelled {times}x{alone}")
        system, more = _tpu(text, chip, None if count is None else int(count), dims, many or 1)
    elif count is not None:
        raise ConfigError(f"--on {text!r}: {chip.name}s are counted with a colon: {chip.name}:{count}")
    elif len(dims) > 1:
        raise ConfigError(f"--on {text!r}: {chip.name}s lie in nodes, not in a torus; give {chip.name}:N")
    elif chip.kind == "cpu":
        if times is not None or (many is not None and dims):
            raise ConfigError(f"--on {text!r} cannot be read; simulated devices are named cpu:8")
        system, more = System(chip, (dims[0] if dims else many or 1,)), []
    else:
        system, more = _gpu(text, chip, dims[0] if dims else None, many, times)
    return system, (*notes, *more)


def _named(text: str, name: str, extra: str | None) -> Chip:
    try:
        return find_chip(name, extra)
    except ConfigError as error:
        raise ConfigError(f"--on {text!r}: {error}") from None


def _is_chip(name: str, extra: str | None) -> bool:
    try:
        return find_chip(name, extra).name is not None
    except ConfigError:
        return False


def _gpu(
    text: str, chip: Chip, count: int | None, many: int | None, times: int | None
) -> tuple[System, list[str]]:
    assert isinstance(chip.fabric, Domain)
    most = chip.fabric.size
    if count is not None:
        if many is not None or times is not None:
            raise ConfigError(
                f"--on {text!r} counts twice; give {chip.name}:{count}, or {most}x{chip.name}x4 for 4 nodes"
            )
        if count > most and count % most:
            near = [n for n in (count // most * most, (count // most + 1) * most) if n]
            raise ConfigError(
                f"--on {text!r}: {count} {chip.name}s do not fill nodes of {most}; take"
                f" {' or '.join(f'{chip.name}:{n}' for n in near)}"
            )
        part = [f"{text} is part of one node of {most}"] if count < most else []
        return System(chip, (min(count, most),), max(1, count // most)), part
    each, nodes = many or 1, times or 1
    if each > most:
        full = -(-each * nodes // most)
        raise ConfigError(
            f"--on {text!r}: a node has {most} {chip.name}s that share a switch; for {each * nodes} of them"
            f" give {chip.name}:{full * most} or {most}x{chip.name}x{full}"
        )
    said = f"{text} is read as {_some(nodes, 'node')} of {_some(each, chip.name)}, {each * nodes} in all"
    return System(chip, (each,), nodes), [said] if times is not None else []


def _tpu(
    text: str, chip: Chip, count: int | None, dims: tuple[int, ...], slices: int
) -> tuple[System, list[str]]:
    torus = chip.fabric
    assert isinstance(torus, Torus)
    if len(dims) > 1:
        turned = [shape for shape in shapes(chip) if sorted(shape) == sorted(dims)]
        if not turned:
            why = f" (its torus has {torus.axes} axes)" if len(dims) != torus.axes else ""
            raise ConfigError(
                f"--on {text!r}: {chip.name} has no slice of {_by(dims)}{why}; nearest:"
                f" {', '.join(f'{chip.name}:{_by(shape)}' for shape in _nearest(chip, math.prod(dims)))}"
            )
        same = [] if turned[0] == dims else [f"a slice of {_by(dims)} is Google's {_by(turned[0])}, turned"]
        return System(chip, turned[0], slices), same
    cores = 1 if count is None else torus.cores_per_chip
    wanted, rest = divmod(count or (dims[0] if dims else 1), cores)
    default = None if rest else next((s for s in shapes(chip) if math.prod(s) == wanted), None)
    if default is None:
        near = _nearest(chip, wanted)
        sign = ":" if count is None else "-"
        names = ", ".join(f"{chip.name}{sign}{math.prod(s) * cores} ({_slice(s)})" for s in near)
        what = f"{_some(count or 0, 'TensorCore')}, at {cores} a chip" if cores > 1 else _some(wanted, "chip")
        raise ConfigError(f"--on {text!r}: no {chip.name} slice has {what}; nearest: {names}")
    if cores > 1:
        return System(chip, default, slices), [
            f"{chip.name}-{count} counts TensorCores: {_some(wanted, 'chip')}, {_by(default)}"
        ]
    return System(chip, default, slices), [f"{text} is a slice of {_by(default)}"] if wanted > 1 else []


def shapes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """The shapes of a TPU's slices, as Google spells them; of those with equally many chips the usual first.

    After Google's tables: a 2-D chip has eight; a 3-D one some below 64 chips, and every box of 4×4×4 cubes.
    The usual shape is the one nearest to a cube ("Types and topologies", Cloud TPU documentation); that rule
    gives what Google's XPK makes of each name of a v4, v5p or tpu7x slice.
    """
    assert isinstance(chip.fabric, Torus)
    return _shapes(chip.fabric)


_LONGEST = 256
"""Chips along one axis of a slice, at most (Google's XPK)."""


@lru_cache(maxsize=16)
def _shapes(torus: Torus) -> tuple[tuple[int, ...], ...]:
    if torus.axes == 2:
        return torus.slices
    most = torus.most_chips // 64
    cubes = {
        (4 * a, 4 * b, 4 * c)
        for a in range(1, most + 1)
        for b in range(a, most // a + 1)
        for c in range(b, most // (a * b) + 1)
        if 4 * c <= _LONGEST
    }
    return tuple(sorted({*torus.slices, *cubes}, key=lambda s: (math.prod(s), sorted(s, reverse=True))))


def _nearest(chip: Chip, wanted: int, most: int = 3) -> list[tuple[int, ...]]:
    usual: dict[int, tuple[int, ...]] = {}
    for shape in shapes(chip):
        usual.setdefault(math.prod(shape), shape)
    sizes = sorted(usual, key=lambda n: abs(math.log(n / max(wanted, 1))))[:most]
    return [usual[n] for n in sorted(sizes)]


def local_system() -> System | None:
    """The devices that are there; None where the table does not know them."""
    import jax

    devices = jax.devices()
    chip = chip_of_device(devices[0].device_kind, devices[0].platform)
    if chip is None:
        return None
    count = len(devices) // chip.devices
    if isinstance(chip.fabric, Domain):
        hosts = max(1, jax.process_count())
        return System(chip, (max(1, count // hosts),), hosts if count % hosts == 0 else 1)
    if isinstance(chip.fabric, Torus):
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        coords = [device.coords for device in devices if getattr(device, "slice_index", 0) == 0]
        found = sorted(len({c[i] for c in coords}) for i in range(len(coords[0])))[-chip.fabric.axes :]
        # as Google spells it, or as found where some of a slice's chips are missing
        spelled = next((shape for shape in shapes(chip) if sorted(shape) == found), tuple(found))
        return System(chip, spelled, slices) if math.prod(found) * slices == count else None
    return System(chip, (count,))


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def _some(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


def _slice(dims: tuple[int, ...]) -> str:
    return f"{_by(dims)}, {_some(math.prod(dims), 'chip')}"
