"""Host rows of a batch as arrays on the mesh, for one process or many.

Not here: which rows a batch holds (data/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from shardwise.partition.plan import Plan, named_sharding


def local_rows(plan: Plan, mesh: jax.sharding.Mesh, batch: int) -> list[int]:
    """The rows of a global batch of `batch` sequences that this process's devices hold, ascending."""
    sharding = named_sharding(mesh, (plan.batch_axes(),))
    indices = sharding.addressable_devices_indices_map((batch,)).values()
    return sorted({row for (part,) in indices for row in range(*part.indices(batch))})


def put_rows(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    arrays: Mapping[str, np.ndarray],
    rows: Sequence[int] | None = None,
    batch: int | None = None,
) -> dict[str, jax.Array]:
    """Arrays of a batch, split over the axes of `batch`.

    Args:
        arrays: each [B, …]; or, with `rows`, [len(rows), …].
        rows: which rows of the global batch the arrays hold (see local_rows); every process then gives its
            own.
        batch: B, with `rows`.
    """
    where = {row: i for i, row in enumerate(rows)} if rows is not None else None

    def put(array: np.ndarray) -> jax.Array:
        shape = array.shape if batch is None else (batch, *array.shape[1:])
        sharding = named_sharding(mesh, (plan.batch_axes(), *((),) * (array.ndim - 1)))

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            if where is None:
                return array[index]
            return array[[where[row] for row in range(*index[0].indices(shape[0]))]]

        return jax.make_array_from_callback(shape, sharding, piece)

    return {name: put(np.asarray(array)) for name, array in arrays.items()}
