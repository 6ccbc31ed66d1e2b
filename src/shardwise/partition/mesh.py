"""Mesh specifications: reading `dp:1,fsdp:-1,tp:1` or `1,-1,1`, fitting them to devices, building the mesh.

Not here: which tensor goes on which axis (rules.py, plan.py) and how fake devices come to be
(runtime/devices.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardwise.errors import MeshError, did_you_mean

if TYPE_CHECKING:
    import jax

AXES = ("dp", "fsdp", "tp")
_ALIASES = {"mp": "tp"}
_FORMS = "write three numbers for dp,fsdp,tp like 1,-1,1, or names like dp:1,fsdp:-1,tp:1 (one may be -1)"


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes `dp`, `fsdp`, `tp`; one may still be -1 (inferred from the device count)."""

    dp: int = 1
    """Copies of the parameters; splits the batch."""
    fsdp: int = 1
    """Splits the batch, the parameters and the optimizer state."""
    tp: int = 1
    """Splits the computation of each layer."""
    split_physical: bool = False
    """Allow a mesh axis to take a part of a physical (torus) axis: EasyLM's leading `!`."""

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if not isinstance(size, int) or (size < 1 and size != -1):
                raise MeshError(f"mesh {self}: the size of {axis} is {size!r}; give -1 or at least 1")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Read `1,-1,1`, `dp:1,fsdp:-1,tp:1`, `dp=2,tp=4` (axes left out are 1), perhaps with a leading `!`.

        Raises:
            MeshError: anything else, more than one -1, or a size below 1.
        """
        body = text.strip()
        split = body.startswith("!")
        parts = [part.strip() for part in body.removeprefix("!").split(",")]
        if parts == ["auto"]:
            raise MeshError(f"mesh 'auto' needs the planner, which this version does not have; {_FORMS}")
        named = [part.replace("=", ":").split(":") for part in parts]
        if all(len(item) == 1 for item in named) and (len(parts) > 1 or _is_number(parts[0])):
            if len(parts) != len(AXES):
                many = "1 number" if len(parts) == 1 else f"{len(parts)} numbers"
                raise MeshError(f"mesh {text!r} has {many}, but there are 3 axes; {_FORMS}")
            named = [[axis, part] for axis, part in zip(AXES, parts, strict=True)]
        sizes: dict[str, int] = {}
        for item in named:
            if len(item) != 2:
                raise MeshError(f"mesh {text!r} cannot be read at {':'.join(item)!r}; {_FORMS}")
            axis, number = _ALIASES.get(item[0].strip(), item[0].strip()), item[1].strip()
            if axis not in AXES:
                near = did_you_mean(axis, AXES, cutoff=0.3)
                raise MeshError(
                    f"mesh {text!r}: unknown axis {axis!r}; the axes are dp, fsdp, tp (or mp for tp){near}"
                )
            if axis in sizes:
                raise MeshError(
                    f"mesh {text!r} gives axis {axis!r} twice, {sizes[axis]} and {number}; keep one"
                )
            if not _is_number(number):
                raise MeshError(
                    f"mesh {text!r}: the size of {axis} is {number!r}, not a whole number; {_FORMS}"
                )
            sizes[axis] = int(number)
            if sizes[axis] < 1 and sizes[axis] != -1:
                raise MeshError(
                    f"mesh {text!r}: the size of {axis} is {number}; dp, fsdp, tp must be -1 or at least 1"
                )
        if list(sizes.values()).count(-1) > 1:
            raise MeshError(
                f"mesh {text!r} has more than one -1 (dp, fsdp, tp); only one size can be inferred"
            )
        return cls(**sizes, split_physical=split)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name → size, in the mesh's order."""
        return {"dp": self.dp, "fsdp": self.fsdp, "tp": self.tp}

    @property
    def num_devices(self) -> int:
        """Devices that a resolved mesh occupies."""
        assert -1 not in self.sizes.values(), "resolve the mesh first"
        return math.prod(self.sizes.values())

    def size(self, axes: Sequence[str]) -> int:
        """Product of the sizes of `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def resolve(self, num_devices: int, kind: str = "") -> MeshSpec:
        """Fill in a -1 and check that the mesh takes exactly `num_devices`.

        Args:
            num_devices: devices that there are.
            kind: what they are, for the message (`cpu`, `gpu`, …).

        Raises:
            MeshError: the product is another number; names it, the devices there are and the nearest meshes.
        """
        known = math.prod(size for size in self.sizes.values() if size != -1)
        sizes = dict(self.sizes)
        for axis, size in sizes.items():
            if size == -1 and num_devices % known == 0:
                sizes[axis] = num_devices // known
        if -1 not in sizes.values() and math.prod(sizes.values()) == num_devices:
            return MeshSpec(**sizes, split_physical=self.split_physical)
        have = f"{num_devices} {kind} device{'s' if num_devices > 1 else ''}".replace("  ", " ")
        if -1 in sizes.values():
            need = f"needs a multiple of {known} devices"
        else:
            product = math.prod(sizes.values())
            need = f"needs {product} device{'s' if product > 1 else ''}"
        nearest = " or ".join(str(mesh) for mesh in _nearest(sizes, num_devices))
        # With a -1 the most of these devices that it can take. Nobody with too many accelerators wants fake
        # ones.
        count = max(known, num_devices // known * known) if -1 in self.sizes.values() else known
        fake = (
            f"; for fake devices give --devices cpu:{count}" if kind == "cpu" or count > num_devices else ""
        )
        raise MeshError(f"mesh {self} {need}, but there are {have}; meshes that fit: {nearest}{fake}")

    def __str__(self) -> str:
        return ("!" if self.split_physical else "") + ",".join(f"{a}:{n}" for a, n in self.sizes.items())


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", text) is not None


def _nearest(wanted: dict[str, int], num_devices: int, most: int = 3) -> list[MeshSpec]:
    """Meshes of exactly `num_devices` whose sizes are closest, in ratio, to those wanted."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    candidates = [
        MeshSpec(dp, fsdp, num_devices // dp // fsdp)
        for dp in divisors
        for fsdp in divisors
        if num_devices % (dp * fsdp) == 0
    ]

    def distance(mesh: MeshSpec) -> float:
        pairs = ((wanted[axis], size) for axis, size in mesh.sizes.items())
        return sum(abs(math.log(have / want)) for want, have in pairs if want > 0)

    return sorted(candidates, key=distance)[:most]


def default_mesh(task: str) -> MeshSpec:
    """The mesh when none is asked for: training all FSDP (`1,-1,1`), everything else all TP (`1,1,-1`)."""
    return MeshSpec(fsdp=-1) if task == "train" else MeshSpec(tp=-1)


def build_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The device mesh of a spec, with all axes in Auto mode.

    Args:
        devices: the devices to take, all of them; default `jax.devices()`.

    Raises:
        MeshError: the number of devices differs, or the physical topology cannot host the shape.
    """
    import jax

    found = tuple(jax.devices() if devices is None else devices)
    return _build_mesh(spec.resolve(len(found), found[0].platform), found)


@lru_cache(maxsize=32)
def _build_mesh(spec: MeshSpec, devices: tuple[Any, ...]) -> jax.sharding.Mesh:
    import jax
    from jax.experimental import mesh_utils

    shape = tuple(spec.sizes.values())
    slices = {getattr(device, "slice_index", 0) for device in devices}
    try:
        if len(slices) > 1:
            grid = mesh_utils.create_hybrid_device_mesh(
                *over_slices(spec, len(slices)), devices, allow_split_physical_axes=spec.split_physical
            )
        else:
            grid = mesh_utils.create_device_mesh(
                shape, devices, allow_split_physical_axes=spec.split_physical
            )
    except (ValueError, NotImplementedError, AssertionError) as error:
        hint = "" if spec.split_physical else f"; !{spec} lets an axis take part of a physical axis"
        raise MeshError(f"the devices cannot host mesh {spec}: {error}{hint}") from error
    return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def over_slices(spec: MeshSpec, num_slices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes within a slice and across slices; the slow network takes `dp` first, then `fsdp`, never `tp`."""
    for axis in ("dp", "fsdp"):
        if spec.sizes[axis] % num_slices == 0:
            across = {a: num_slices if a == axis else 1 for a in AXES}
            return tuple(spec.sizes[a] // across[a] for a in AXES), tuple(across.values())
    raise MeshError(
        f"mesh {spec} cannot span {num_slices} slices: dp or fsdp must be a multiple of {num_slices}, since"
        " tp over the network between slices would stall every layer"
    )
