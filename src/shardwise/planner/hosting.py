"""Where the axes of a mesh lie on a machine, and what carries each axis's collectives.

A TPU slice's torus is given to the mesh's axes as JAX's mesh_utils does it, the last axis (tp) first, whole
torus axes only unless the mesh allows splitting them (`!`). Behind a GPUs' switch anything can be cut.
Not here: the machines (hardware.py), and how long a collective takes (cost.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.errors import MeshError
from shardwise.partition.mesh import AXES, MeshSpec, over_slices
from shardwise.planner.hardware import System
from shardwise.runtime.chips import Domain, Torus

_ON_CHIP = 6
"""Between the two devices of one TPU7x chip: this many times a link of the interconnect (Cloud TPU
documentation, TPU7x: the die-to-die interface)."""


@dataclass(frozen=True)
class Link:
    """What carries the collectives of one mesh axis."""

    size: int
    """Devices in a group."""
    bandwidth: float
    """Bytes a second that each device sends in a ring over the group."""
    latency: float
    """Seconds of one hop."""
    delay: float
    """Seconds that a byte takes once round the ring, however little is sent."""
    where: str
    """In words."""


@dataclass(frozen=True)
class Hosting:
    """A mesh on a machine."""

    system: System
    mesh: MeshSpec
    links: dict[str, Link]
    """By mesh axis, those of more than one device."""

    def link(self, axes: Iterable[str]) -> Link | None:
        """What carries a collective over these axes together; None if all have one device."""
        found = [self.links[axis] for axis in axes if axis in self.links]
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        slowest = min(found, key=lambda link: link.bandwidth)
        return Link(
            math.prod(link.size for link in found), slowest.bandwidth, max(link.latency for link in found),
            sum(link.delay for link in found), " and ".join(link.where for link in found),
        )  # fmt: skip


def host(system: System, mesh: MeshSpec) -> Hosting:
    """Lay a mesh on a machine.

    Raises:
        MeshError: another number of devices, or the physical topology cannot host it.
    """
    if mesh.num_devices != system.num_devices:
        mesh.resolve(system.num_devices, system.chip.name)  # raises, with the nearest meshes
    inner, across = (
        over_slices(mesh, system.slices)
        if system.slices > 1 and system.chip.kind == "tpu"
        else (tuple(mesh.sizes.values()), (1, 1, 1))
    )
    fabric = system.chip.fabric
    if isinstance(fabric, Torus):
        links = _on_torus(system, fabric, mesh, inner)
    elif isinstance(fabric, Domain):
        return Hosting(system, mesh, _behind_switch(system, fabric, mesh))
    else:
        chip = system.chip
        links = {
            axis: Link(
                n, chip.scale_out / system.num_devices, chip.latency, (n - 1) * chip.latency, "through memory"
            )
            for axis, n in mesh.sizes.items()
            if n > 1
        }
    for axis, within, slices in zip(AXES, inner, across, strict=True):
        if slices > 1:
            links[axis] = _between_slices(system, links.get(axis), within, slices)
    return Hosting(system, mesh, links)


def _between_slices(system: System, inside: Link | None, within: int, slices: int) -> Link:
    """An axis that spans slices: each of its devices in a slice brings its own share of the slow network."""
    chip = system.chip
    rate = chip.scale_out / chip.devices * within
    bandwidth = rate if inside is None else min(inside.bandwidth, rate)
    delay = (slices - 1) * chip.scale_out_latency + (0.0 if inside is None else inside.delay)
    place = f"{slices} slices" + (f" of {inside.where}" if inside else "")
    return Link(within * slices, bandwidth, chip.scale_out_latency, delay, place)


@dataclass
class _Dim:
    """One physical dim of a slice."""

    size: int
    """Devices along it."""
    left: int
    """Of these, the factor that no mesh axis has taken; 0 when it was taken whole."""
    rate: float
    """Bytes a second of one device over its links along it, one way."""
    wraps: bool
    name: str


def _on_torus(system: System, torus: Torus, mesh: MeshSpec, sizes: Sequence[int]) -> dict[str, Link]:
    chip = system.chip
    dims = [
        _Dim(n, n, torus.link / chip.devices, wraps, f"{n}{' ring' if wraps else ' line'}")
        for n, wraps in zip(system.shape, system.wraps, strict=True)
    ]
    if chip.devices > 1:
        dims.append(_Dim(chip.devices, chip.devices, _ON_CHIP * torus.link, False, f"{chip.devices} a chip"))
    links = {}
    for axis, n in reversed(list(zip(AXES, sizes, strict=True))):
        taken = _whole(dims, n)
        if taken is None and mesh.split_physical:
            return _split(system, dims, mesh, sizes)
        if taken is None:
            left = "x".join(str(dim.left) for dim in dims if dim.left > 1) or "nothing"
            raise MeshError(
                f"{system} cannot host mesh {mesh}: no torus axes make up {axis} {n}, with {left} left;"
                f" !{mesh} lets an axis take part of one"
            )
        if n > 1:
            links[axis] = _over(system, [(dims[i], dims[i].size, 1) for i in taken])
        for i in taken:
            dims[i].left = 0
    return links


def _whole(dims: list[_Dim], n: int) -> tuple[int, ...] | None:
    """Untaken dims whose product is n, as many as possible (mesh_utils' order); () for n = 1."""
    for count in range(len(dims), 0, -1):
        for chosen in itertools.combinations(range(len(dims)), count):
            if math.prod(dims[i].left for i in chosen) == n:
                return chosen
    return () if n == 1 else None


def _split(system: System, dims: list[_Dim], mesh: MeshSpec, sizes: Sequence[int]) -> dict[str, Link]:
    """The same where an axis may take a factor of a torus axis: neighbours first, then at a stride."""
    for dim in dims:
        dim.left = dim.size
    links = {}
    for axis, n in reversed(list(zip(AXES, sizes, strict=True))):
        parts, need = [], n
        for dim in sorted(dims, key=lambda dim: (-math.gcd(dim.left, need), dim.size)):
            part = math.gcd(dim.left, need)
            if part > 1:
                parts.append((dim, part, dim.size // dim.left))
                dim.left //= part
                need //= part
        if need > 1:
            raise MeshError(
                f"{system} cannot host mesh {mesh}: {axis} {n} divides no torus axis that is left"
            )
        if n > 1:
            links[axis] = _over(system, parts)
    return links


def _over(system: System, parts: list[tuple[_Dim, int, int]]) -> Link:
    """A group over (dim, devices of it, stride) together.

    Rings along several torus axes add up (the scaling book's chapter on TPUs). Both devices of a chip in one
    group bring both their shares of its links. A part of an axis is a line; at a stride, groups share links.
    """
    chip = system.chip
    torus = [(dim, n, stride) for dim, n, stride in parts if not dim.name.endswith("a chip")]
    hops = sum(
        (n * stride) // 2 if dim.wraps and n * stride == dim.size else n * stride for dim, n, stride in parts
    )
    names = " and ".join(dim.name if n == dim.size else f"{n} of {dim.size}" for dim, n, _ in parts)
    if not torus:
        return Link(parts[0][1], parts[0][0].rate, chip.latency, chip.latency, names)
    shares = math.prod(n for dim, n, _ in parts if dim.name.endswith("a chip"))
    rate = sum(
        dim.rate * (2 if dim.wraps and n * stride == dim.size else 1) / stride for dim, n, stride in torus
    )
    return Link(math.prod(n for _, n, _ in parts), rate * shares, chip.latency, hops * chip.latency, names)


def _behind_switch(system: System, domain: Domain, mesh: MeshSpec) -> dict[str, Link]:
    """GPUs in the order of the mesh, tp fastest: a group lies in one node, or has some members in each."""
    chip, node = system.chip, system.slice_chips
    links, stride = {}, 1
    for axis, n in reversed(mesh.sizes.items()):
        if n > 1:
            inside = min(n, max(1, node // stride))
            near = (inside - 1) * chip.latency
            if stride * n <= node:
                links[axis] = Link(n, domain.link, chip.latency, near, "NVLink")
            else:
                nodes = -(-n // inside)
                rate = min(domain.link if inside > 1 else math.inf, chip.scale_out * inside)
                place = f"{nodes} nodes" + (f", {inside} GPUs in each" if inside > 1 else "")
                far = (nodes - 1) * chip.scale_out_latency
                links[axis] = Link(n, rate, chip.scale_out_latency, near + far, place)
        stride *= n
    return links
