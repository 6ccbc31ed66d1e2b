"""Machines: chips put together into slices or nodes, and the text that names them (`--on`).

Not here: what one chip can do (runtime/chips.py), and where a mesh lies on a machine (hosting.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
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
        what = {"tpu": "slice", "gpu": "node", "cpu": "machine"}[self.chip.kind]
        if self.chip.kind == "cpu":
            return f"{self.num_devices} simulated device{'s' * (self.num_devices > 1)} on this processor"
        unit = "chips" if self.chip.kind == "tpu" else "GPUs"
        each = f"{_by(self.shape)} = {self.slice_chips}" if len(self.shape) > 1 else str(self.slice_chips)
        devices = f", {self.num_devices} JAX devices" if self.chip.devices > 1 else ""
        many = f"{self.slices} {what}s of " if self.slices > 1 else f"one {what} of "
        total = f", {self.num_chips} in all" if self.slices > 1 else ""
        return f"{self.chip.name}, {many}{each} {unit}{total}{devices}"


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
    given = text.strip().lower()
    found = re.fullmatch(
        r"(?:(?P<many>\d+)x)?(?P<name>[a-z][a-z0-9-]*?)(?:-(?P<count>\d+)|:(?P<shape>\d+(?:x\d+)*))?(?:x(?P<times>\d+))?",
        given,
    )
    if found is None or (found["times"] and found["shape"]):
        raise ConfigError(f"--on {text!r} cannot be read; name a machine {EXAMPLES}")
    name, count, shape = found["name"], found["count"], found["shape"]
    if count is not None and _is_chip(f"{name}-{count}", extra):  # a100-80
        name, count = f"{name}-{count}", None
    chip = find_chip(name, extra)
    dims = tuple(map(int, shape.split("x"))) if shape else ()
    many, times = (int(found[key]) if found[key] else None for key in ("many", "times"))
    if 0 in (*dims, many, times) or count == "0":
        raise ConfigError(f"--on {text!r} has a 0; every number must be at least 1")
    if chip.kind == "tpu":
        if times is not None:
            raise ConfigError(f"--on {text!r}: several TPU slices are spelled {times}x{name}…, {EXAMPLES}")
        return _tpu(text, chip, None if count is None else int(count), dims, many or 1)
    if count is not None:
        raise ConfigError(f"--on {text!r}: {chip.name}s are counted with a colon: {chip.name}:{count}")
    if len(dims) > 1:
        raise ConfigError(f"--on {text!r}: {chip.name}s lie in nodes, not in a torus; give {chip.name}:N")
    if chip.kind == "cpu":
        if times is not None or (many is not None and dims):
            raise ConfigError(f"--on {text!r} cannot be read; simulated devices are named cpu:8")
        return System(chip, (dims[0] if dims else many or 1,)), ()
    return _gpu(text, chip, dims[0] if dims else None, many, times)


def _is_chip(name: str, extra: str | None) -> bool:
    try:
        return find_chip(name, extra).name is not None
    except ConfigError:
        return False


def _gpu(
    text: str, chip: Chip, count: int | None, many: int | None, times: int | None
) -> tuple[System, tuple[str, ...]]:
    assert isinstance(chip.fabric, Domain)
    most = chip.fabric.size
    notes: list[str] = []
    if count is not None:
        if many is not None or times is not None:
            raise ConfigError(f"--on {text!r} counts twice; give {chip.name}:{count} or 8x{chip.name}x4")
        if count > most and count % most:
            near = [n for n in (count // most * most, (count // most + 1) * most) if n]
            raise ConfigError(
                f"--on {text!r}: {count} {chip.name}s do not fill nodes of {most}; take"
                f" {' or '.join(f'{chip.name}:{n}' for n in near)}"
            )
        return System(chip, (min(count, most),), max(1, count // most)), ()
    each, nodes = many or 1, times or 1
    if each > most:
        full = -(-each * nodes // most)
        raise ConfigError(
            f"--on {text!r}: a node has {most} {chip.name}s that share a switch; for {each * nodes} of them"
            f" give {chip.name}:{full * most} or {most}x{chip.name}x{full}"
        )
    if times is not None:
        notes.append(f"{text} is read as {nodes} nodes of {each} {chip.name}s, {each * nodes} in all")
    return System(chip, (each,), nodes), tuple(notes)


def _tpu(
    text: str, chip: Chip, count: int | None, dims: tuple[int, ...], slices: int
) -> tuple[System, tuple[str, ...]]:
    torus = chip.fabric
    assert isinstance(torus, Torus)
    notes: list[str] = []
    if len(dims) > 1:
        wanted = tuple(sorted(dims))
        if len(dims) == torus.axes and wanted in set(shapes(chip)):
            return System(chip, wanted, slices), ()
        near = _nearest(chip, math.prod(dims))
        raise ConfigError(
            f"--on {text!r}: {chip.name} has no slice of {_by(dims)}; its torus has {torus.axes} axes;"
            f" nearest: {', '.join(f'{chip.name}:{_by(shape)}' for shape in near)}"
        )
    cores = torus.cores_per_chip
    if count is None:
        wanted_chips = dims[0] if dims else 1
    else:
        wanted_chips, rest = divmod(count, cores)
        if rest:
            raise ConfigError(
                f"--on {text!r}: names of {chip.name} slices count TensorCores, {cores} a chip, but"
                f" {count} is odd"
            )
    default = next((s for s in shapes(chip) if math.prod(s) == wanted_chips), None)
    if default is None:
        near = _nearest(chip, wanted_chips)
        names = ", ".join(
            f"{chip.name}-{math.prod(s) * cores} ({_by(s)}, {math.prod(s)} chips)" for s in near
        )
        raise ConfigError(f"--on {text!r}: no {chip.name} slice has {wanted_chips} chips; nearest: {names}")
    if count is not None and cores > 1:
        notes.append(
            f"{chip.name}-{count} counts TensorCores: {wanted_chips} chip{'s' * (wanted_chips > 1)},"
            f" {_by(default)}"
        )
    elif len(default) > 1 and wanted_chips > 1:
        notes.append(f"{text} is a slice of {_by(default)}")
    return System(chip, default, slices), tuple(notes)


def shapes(chip: Chip) -> Iterator[tuple[int, ...]]:
    """The shapes of a TPU's slices, rising dims; of those with equally many chips the usual one first.

    After Google's tables: a 2-D chip has eight; a 3-D one some below 64 chips, and above that every box of
    4×4×4 cubes. The usual shape is the one nearest to a cube.
    """
    assert isinstance(chip.fabric, Torus)
    return iter(_shapes(chip.fabric))


@lru_cache(maxsize=16)
def _shapes(torus: Torus) -> tuple[tuple[int, ...], ...]:
    if torus.axes == 2:
        return ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    small = [(1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    most = torus.most_chips // 64
    cubes = [
        (4 * a, 4 * b, 4 * c)
        for a in range(1, most + 1)
        for b in range(a, most // a + 1)
        for c in range(b, most // (a * b) + 1)
        if max(4 * c, 4 * b) <= 64
    ]
    return (*small, *sorted(cubes, key=lambda s: (math.prod(s), s[2], s[1])))


def _nearest(chip: Chip, wanted: int, most: int = 3) -> list[tuple[int, ...]]:
    usual: dict[int, tuple[int, ...]] = {}
    for shape in shapes(chip):
        usual.setdefault(math.prod(shape), shape)
    sizes = sorted(usual, key=lambda n: abs(math.log(n / wanted)))[:most]
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
        sizes = tuple(sorted(len({c[i] for c in coords}) for i in range(len(coords[0]))))
        return System(chip, sizes[-chip.fabric.axes :], slices)
    return System(chip, (count,))


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))
