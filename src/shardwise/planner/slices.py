"""Whether each device keeps only its own slice of an all-reduce, which then is a reduce-scatter.

Not here: slices by anything but the device's number, such as a loop's counter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from shardwise.planner.hlo import Instruction
from shardwise.planner.replica_groups import varying_axes
from shardwise.planner.scalars import PASSES, Site

_PASSES = PASSES | {"transpose"}


def sliced_axes(
    site: Site, reduced: Instruction, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Those of `axes` along which all uses of a result cut it by the device's place; () if one does not.

    Args:
        axes: mesh axes of the all-reduce.
        sizes: axis → size in mesh order.
    """
    found: set[tuple[str, ...]] = set()
    for use, bytes_before in _uses(site, reduced):
        along = _slice_axes(site, use, sizes) if use is not None else ()
        along = tuple(axis for axis in along if axis in axes)
        factor = math.prod(sizes[axis] for axis in along)
        # padding before the slice would make it larger than a part
        if not along or use is None or use.shapes[0].elements * factor != bytes_before:
            return ()
        found.add(along)
    return found.pop() if len(found) == 1 else ()


def _uses(site: Site, made: Instruction) -> Iterator[tuple[Instruction | None, int]]:
    """Slices that a result ends in, with the elements before them; None for any other use."""
    users = site.computation.users[made.name]
    if made.is_root or not users:
        yield None, 0
    for user in users:
        if user.op in _PASSES and len(user.operands) == 1:
            yield from _uses(site, user)
        elif user.op == "dynamic-slice" and user.operands[0] == made.name:
            yield user, made.shapes[0].elements
        else:
            yield None, 0


def _slice_axes(site: Site, use: Instruction, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the start of a dynamic-slice differs."""
    count = math.prod(sizes.values())
    axes: set[str] = set()
    for start in use.operands[1:]:
        values = [site.evaluate(start, device) for device in range(count)]
        numbers = [value for value in values if isinstance(value, int)]
        if len(numbers) != count:
            return ()
        axes |= set(varying_axes(numbers, dict(sizes)))
    return tuple(axis for axis in sizes if axis in axes)
