"""Constraints on values inside a compiled step: where activations lie and how a weight is fetched for use.

Not here: which spec a parameter has (plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint

from shardwise.partition.plan import Plan, named_sharding
from shardwise.partition.rules import Spec


@dataclass(frozen=True)
class Placement:
    """A Plan bound to a device mesh and a compute dtype; the model's forward pass asks it for constraints."""

    plan: Plan
    mesh: jax.sharding.Mesh
    compute_dtype: jnp.dtype

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs, real or fake."""
        return self.mesh.devices.flat[0].platform == "cpu"

    def spread(self, logical: str) -> tuple[str, ...]:
        """Those mesh axes of a logical axis that have more than one device.

        For collectives written out under shard_map: over an axis of one device they move nothing, but XLA
        may still copy for them.
        """
        return self._longer(self.plan.rules.mesh_axes(logical))

    def spread_spec(self, spec: Spec) -> Spec:
        """`spec` without mesh axes of one device."""
        return tuple(self._longer(axes) for axes in spec)

    def _longer(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def constrain(self, x: jax.Array, spec: Spec) -> jax.Array:
        """`x` held to `spec`; nothing to hold on a single device."""
        if self.mesh.size == 1:
            return x
        return with_sharding_constraint(x, named_sharding(self.mesh, spec))

    def activation(self, x: jax.Array, *axes: str) -> jax.Array:
        """`x` cut as the rules say for its logical axes (`embed` stays whole: fsdp splits the batch)."""
        spec = tuple(() if axis == "embed" else self.plan.rules.mesh_axes(axis) for axis in axes)
        return self.constrain(x, spec)

    def stored(self, path: str, value: jax.Array) -> jax.Array:
        """A parameter in the compute dtype, still lying as it is stored.

        The cast is held to the stored spec, so that what travels afterwards is the compute dtype; without
        that the partitioner may gather float32.

        Args:
            path: parameter path; below `layers/` the value is one layer's slice.
            value: of the stored shape, without the layers dim where there is one.
        """
        skip = value.ndim < len(self.plan[path].axes)
        return self.constrain(value.astype(self.compute_dtype), self.plan[path].spec[skip:])

    def weight(self, path: str, value: jax.Array) -> jax.Array:
        """A parameter ready for use: cast, gathered over `fsdp` (and only that), trimmed to its use shape.

        Args and shapes as for `stored`.
        """
        decision = self.plan[path]
        skip = value.ndim < len(decision.axes)
        value = self.constrain(self.stored(path, value), decision.without_fsdp()[skip:])
        use_shape = decision.use_shape[skip:]
        if value.shape != use_shape:
            value = value[tuple(slice(0, size) for size in use_shape)]
        return value
