"""Which devices take part in a collective together: XLA's spellings of it, and the mesh axes that they mean.

Numbers are partition ids: positions in the mesh's flat device order, not the ids of physical devices.
"""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import numpy as np

Groups = list[list[int]]
Pairs = list[tuple[int, int]]


def expand_groups(text: str, num_devices: int) -> Groups:
    """Device ids of every group.

    Args:
        text: the value of `replica_groups`, in any spelling: lists `{{0,1},{2,3}}`, an iota
            `[2,4]<=[4,2]T(1,0)`, or mesh axes `mesh['a'=2,'b'=4] {'b'}`, perhaps with a device order and
            parts of axes `'a':(1)2`. `{}` is one group of all.

    Raises:
        ValueError: another spelling.
    """
    text = text.strip()
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if match := re.fullmatch(r"\[([\d,]+)\](?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, per_group = _ints(match[1])
        return _iota(match[2], match[3]).reshape(groups, per_group).tolist()
    if re.fullmatch(r"\{\s*(\{\s*\})?\s*\}", text):
        return [list(range(num_devices))]
    if re.fullmatch(r"\{[\s{},\d]*\}", text):
        return [list(_ints(part)) for part in re.findall(r"\{([\d,\s]+)\}", text)]
    raise ValueError(f"replica_groups in an unknown spelling: {text}")


def expand_pairs(text: str) -> Pairs:
    """Source and target of each part of a collective-permute: the value of `source_target_pairs`."""
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),\s*(\d+)\}", text)]


def group_axes(groups: Groups, sizes: dict[str, int]) -> tuple[str, ...] | None:
    """The mesh axes over which the groups run, without axes of one device; None if none fit.

    Args:
        sizes: axis → size in mesh order; their product is the number of devices.
    """
    ids = np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values()))
    want = {frozenset(group) for group in groups}
    names = list(sizes)
    long = [axis for axis in names if sizes[axis] > 1]
    for count in range(len(long) + 1):
        for axes in combinations(long, count):
            last = np.moveaxis(ids, [names.index(axis) for axis in axes], range(-count, 0))
            rows = last.reshape(-1, int(np.prod([sizes[axis] for axis in axes], dtype=int)))
            if {frozenset(row) for row in rows.tolist()} == want:
                return axes
    return None


def pair_axes(pairs: Pairs, sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes in which sources and targets differ."""
    shape = tuple(sizes.values())
    places = [(np.unravel_index(a, shape), np.unravel_index(b, shape)) for a, b in pairs]
    return tuple(axis for i, axis in enumerate(sizes) if any(a[i] != b[i] for a, b in places))


def varying_axes(values: list[int], sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which a number that each device has of its own changes."""
    grid = np.asarray(values).reshape(tuple(sizes.values()))
    return tuple(axis for i, axis in enumerate(sizes) if (grid != grid.take([0], axis=i)).any())


def _mesh_groups(text: str) -> Groups:
    match = re.fullmatch(r"mesh\[(.*?)\](?:,\s*device_ids=\((.*?)\))?\s*\{(.*)\}", text)
    if not match:
        raise ValueError(f"replica_groups in an unknown spelling: {text}")
    sizes = {name: int(size) for name, size in re.findall(r"['\"]?([\w.\-]+)['\"]?=(\d+)", match[1])}
    wanted = re.findall(r"['\"]?([\w.\-]+)['\"]?(?::\((\d+)\)(\d+))?", match[3])
    # A part `a:(2)3` of axis a lies behind a factor 2 of it and has size 3: such an axis becomes several
    # dims.
    shape: list[int] = []
    starts: list[tuple[str, int]] = []
    for name, size in sizes.items():
        edges = [int(pre) * more for n, pre, part in wanted if n == name and pre for more in (1, int(part))]
        bounds = sorted({1, size, *edges})
        for low, high in pairwise(bounds):
            starts.append((name, low))
            shape.append(high // low)
    taken: list[int] = []
    for name, pre, part in wanted:
        low = int(pre) if pre else 1
        high = low * int(part) if pre else sizes[name]
        taken += [dim for dim, (n, at) in enumerate(starts) if n == name and low <= at < high]
    ids = _device_ids(match[2], int(np.prod(shape, dtype=int))).reshape(shape)
    per_group = int(np.prod([shape[dim] for dim in taken], dtype=int))
    return np.moveaxis(ids, taken, range(-len(taken), 0)).reshape(-1, per_group).tolist()


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if not text:
        return np.arange(count)
    if match := re.fullmatch(r"(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text.strip()):
        return _iota(match[1], match[2]).reshape(-1)
    return np.asarray(_ints(text))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _ints(dims)
    ids = np.arange(int(np.prod(shape))).reshape(shape)
    return ids.transpose(_ints(order)) if order else ids


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
