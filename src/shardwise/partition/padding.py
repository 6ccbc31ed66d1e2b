"""True and physical shapes: how heads, kv heads, mlp and vocab are padded so that mesh axes divide them.

A parameter has a true shape (the checkpoint's) and a use shape (after padding). Padding is zeros, always at
the end of a dim, but for query heads, whose two dims (heads, q_per_kv) are regrouped into slots; see
HeadSlots.
Not here: which axis cuts which dim (plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np


class Sized(Protocol):
    """What padding needs to know of a model (ModelConfig has it)."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def q_per_kv(self) -> int: ...
    def sizes(self) -> dict[str, int]: ...


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is no smaller than `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class HeadSlots:
    """How K kv heads with G query heads each are laid out in S slots that `tp` divides.

    Every kv head is repeated `repeat` times; each repetition is a slot and takes `group` = ⌈G / repeat⌉ of
    its query heads. Slots are then padded to a multiple of tp. Query weights lie as (…, S, group, …); the q
    head (k, g) sits in slot k·repeat + g // group at place g % group.
    """

    kv_heads: int
    q_per_kv: int
    repeat: int = 1
    slots: int = 0
    """S; 0 stands for kv_heads × repeat."""

    def __post_init__(self) -> None:
        if not self.slots:
            object.__setattr__(self, "slots", self.kv_heads * self.repeat)
        assert self.slots >= self.kv_heads * self.repeat

    @classmethod
    def choose(cls, kv_heads: int, q_per_kv: int, tp: int) -> HeadSlots:
        """The layout with the least work per device: a query head and a kv head cost two matrices each."""
        candidates = [
            cls(kv_heads, q_per_kv, repeat, round_up(kv_heads * repeat, tp))
            for repeat in range(1, q_per_kv + 1)
        ]
        return min(candidates, key=lambda c: (c.slots * c.group + c.slots, c.repeat))

    @property
    def group(self) -> int:
        """Query heads in a slot."""
        return -(-self.q_per_kv // self.repeat)

    @property
    def stored_kv_heads(self) -> int:
        """kv heads as stored: padded to the slots where none is repeated, else held once."""
        return self.slots if self.repeat == 1 else self.kv_heads

    @property
    def padded_heads(self) -> int:
        """Query heads computed, real or not."""
        return self.slots * self.group

    @cached_property
    def valid(self) -> np.ndarray:
        """bool [S, group]: True where a real query head sits."""
        slot, place = np.meshgrid(np.arange(self.slots), np.arange(self.group), indexing="ij")
        inside = (slot % self.repeat) * self.group + place < self.q_per_kv
        return inside & (slot < self.kv_heads * self.repeat)

    @cached_property
    def kv_of_slot(self) -> np.ndarray:
        """int32 [S]: the stored kv head that each slot attends to."""
        return np.minimum(np.arange(self.slots) // self.repeat, self.stored_kv_heads - 1).astype(np.int32)

    def runs(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Where slots [start, stop) come from: (slot, kv head, first query head, number of them) each."""
        found = []
        for slot in range(start, min(stop, self.kv_heads * self.repeat)):
            first = (slot % self.repeat) * self.group
            count = min(self.group, self.q_per_kv - first)
            if count > 0:
                found.append((slot, slot // self.repeat, first, count))
        return found


@dataclass(frozen=True)
class Padding:
    """The physical size of every logical axis of a model on one mesh."""

    heads: HeadSlots
    mlp: int
    vocab: int
    true_sizes: tuple[tuple[str, int], ...]

    @classmethod
    def choose(cls, model: Sized, parts: int | Mapping[str, int]) -> Padding:
        """Padding with which heads, kv heads (or one copy of them), mlp and vocab can be cut evenly.

        Args:
            parts: into how many parts `heads`, `mlp` and `vocab` are cut; one number for all.
        """
        sizes = model.sizes()
        if isinstance(parts, int):
            parts = dict.fromkeys(("heads", "mlp", "vocab"), parts)
        return cls(
            heads=HeadSlots.choose(model.num_kv_heads, model.q_per_kv, parts["heads"]),
            mlp=round_up(sizes["mlp"], parts["mlp"]),
            vocab=round_up(sizes["vocab"], parts["vocab"]),
            true_sizes=tuple(sizes.items()),
        )

    @classmethod
    def none(cls, model: Sized) -> Padding:
        """No padding: physical sizes are the true ones."""
        return cls.choose(model, 1)

    @cached_property
    def true(self) -> dict[str, int]:
        """Logical axis → true size."""
        return dict(self.true_sizes)

    @cached_property
    def physical(self) -> dict[str, int]:
        """Logical axis → size after padding."""
        return self.true | {
            "heads": self.heads.slots,
            "q_per_kv": self.heads.group,
            "kv_heads": self.heads.stored_kv_heads,
            "mlp": self.mlp,
            "vocab": self.vocab,
        }

    def true_shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Shape of a tensor with these logical axes, as the checkpoint has it."""
        return tuple(self.true[axis] for axis in axes)

    def use_shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Shape of the same tensor as the computation takes it."""
        return tuple(self.physical[axis] for axis in axes)

    def pad(self, array: Any, axes: Sequence[str], shape: Sequence[int] | None = None) -> Any:
        """True → physical for a JAX or NumPy array.

        Args:
            array: of `true_shape(axes)`.
            shape: stored shape, where it is larger still than `use_shape(axes)`.
        """
        xp = array.__array_namespace__()
        at = _query_dims(axes)
        if at is not None:
            slots = self.heads
            array = _pad_dim(xp, array, at + 1, slots.repeat * slots.group)
            merged = (slots.kv_heads * slots.repeat, slots.group)
            array = array.reshape(*array.shape[:at], *merged, *array.shape[at + 2 :])
        for dim, size in enumerate(shape if shape is not None else self.use_shape(axes)):
            array = _pad_dim(xp, array, dim, size)
        return array

    def trim(self, array: Any, axes: Sequence[str]) -> Any:
        """Physical → true for a JAX or NumPy array; the inverse of `pad`."""
        at = _query_dims(axes)
        use = list(self.true_shape(axes))
        if at is not None:
            slots = self.heads
            use[at : at + 2] = [slots.kv_heads * slots.repeat, slots.group]
        array = array[tuple(slice(0, size) for size in use)]
        if at is not None:
            array = array.reshape(*use[:at], slots.kv_heads, slots.repeat * slots.group, *use[at + 2 :])
            array = array[(slice(None),) * (at + 1) + (slice(0, slots.q_per_kv),)]
        return array


def _query_dims(axes: Sequence[str]) -> int | None:
    """Index of the `heads` dim (followed by `q_per_kv`), or None for a tensor without query heads."""
    if "heads" not in axes:
        return None
    at = list(axes).index("heads")
    assert axes[at + 1] == "q_per_kv", f"query heads must be two neighbouring dims, got {axes}"
    return at


def _pad_dim(xp: Any, array: Any, dim: int, size: int) -> Any:
    missing = size - array.shape[dim]
    assert missing >= 0, f"dim {dim} of {array.shape} is larger than {size}"
    if not missing:
        return array
    widths = [(0, missing if d == dim else 0) for d in range(array.ndim)]
    return xp.pad(array, widths)
