"""Constraints on values inside a compiled step: where activations lie and how a weight is fetched for use.

Not here: which spec a parameter has (plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint

from shardwise.partition.plan import DATA_AXES, Plan, named_sharding
from shardwise.partition.rules import Spec


@dataclass(frozen=True)
class ProductSpecs:
    """How operands and result of a product with a kernel lie, so that the kernel's cut alone says what moves.

    Output dims cut: each device makes its part of the result, and nothing moves. Input dims cut: each device
    makes a part of every sum, and the result is reduced. An operand cut otherwise is gathered first, a result
    that its activation wants cut otherwise is moved afterwards; the planner counts both.
    """

    kernel: Spec
    """Of the kernel at use, [outputs…, inputs…]."""
    operand: Spec
    """Of what it is multiplied with, [B, T, inputs…]."""
    product: Spec
    """Of the result [B, T, outputs…], before it is laid out as its activation; its gradient is held to this
    too."""
    flat: bool
    """Whether the kernel may be reshaped to two dims: only the first output and the first input are cut."""
    reduced: bool
    """Whether the result is a sum over devices; it is then laid out as its activation at once, which may make
    a reduce-scatter of the sum."""

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, plan: Plan, path: str, repeated: bool) -> ProductSpecs:
        """Those of the kernel at `path`.

        Args:
            repeated: its first dim, kv heads held once, is repeated to the slots that the result has.
        """
        decision = plan[path]
        kernel = decision.at_use()[decision.stacked :]
        gives = plan.activation(decision.use.gives)
        used = {axis for axes in kernel for axis in axes}
        if repeated:
            slots = tuple(axis for axis in gives[2] if axis not in used)
            kernel, used = (slots, *kernel[1:]), used | set(slots)
        outputs, inputs = kernel[: -decision.use.num_inputs], kernel[-decision.use.num_inputs :]
        rows = tuple(tuple(axis for axis in axes if axis not in used) for axes in gives[:2])
        flat = not any(outputs[1:]) and not any(inputs[1:])
        return cls(kernel, (*rows, *inputs), (*rows, *outputs), flat, any(inputs))


@dataclass(frozen=True)
class GradientSpecs:
    """How a kernel's gradient is added up over devices and comes to lie as the kernel is stored.

    Each device has a part of the sum, over its own rows and its own copies of kv heads. It is padded as the
    kernel is, scattered over the axes that were gathered for use, and reduced over the rest.
    """

    shape: tuple[int, ...]
    """Of the kernel as stored, without the layers' dim."""
    part: Spec
    """How a device's part lies: as the kernel at use, but all kv heads that are held once."""
    scattered: tuple[tuple[int, tuple[str, ...]], ...]
    """(dim, mesh axes) of each scatter."""
    rest: tuple[str, ...]
    """Mesh axes of the reduction."""

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, plan: Plan, path: str, repeated: bool) -> GradientSpecs:
        """Those of the kernel at `path`, without mesh axes of one device; `repeated` as for ProductSpecs."""
        decision, specs = plan[path], ProductSpecs.of(plan, path, repeated)
        stored = decision.spec[decision.stacked :]
        part = decision.at_use()[decision.stacked :]
        differ = (*specs.operand[:2], specs.kernel[0] if repeated else ())
        parts = {axis for axes in differ for axis in axes if plan.mesh.sizes[axis] > 1}
        fetched = [tuple(axis for axis in axes if axis in parts and axis in DATA_AXES) for axes in stored]
        rest = parts - {axis for axes in fetched for axis in axes}
        return cls(
            decision.shape[decision.stacked :],
            part,
            tuple((dim, axes) for dim, axes in enumerate(fetched) if axes),
            tuple(axis for axis in plan.mesh.sizes if axis in rest),
        )

    @property
    def spec(self) -> Spec:
        """How the sum lies in the end."""
        fetched = dict(self.scattered)
        return tuple((*axes, *fetched.get(dim, ())) for dim, axes in enumerate(self.part))


def summed_together(plan: Plan, paths: Sequence[str], repeated: Sequence[bool]) -> tuple[str, ...]:
    """Mesh axes over which kernels of one operand make its gradient in parts, if all do so alike; else ().

    Args:
        paths: of kernels that take the same activation [B, T, D].
        repeated: for each, whether its kv heads are repeated at use.
    """
    specs = [ProductSpecs.of(plan, path, r) for path, r in zip(paths, repeated, strict=True)]
    outputs = {
        tuple(sorted(a for axes in s.kernel[:-1] for a in axes if plan.mesh.sizes[a] > 1)) for s in specs
    }
    alike = len(outputs) == 1 and len({s.operand for s in specs}) == 1 and not any(s.reduced for s in specs)
    if len(paths) < 2 or not alike or any(plan[path].use.num_inputs != 1 for path in paths):
        return ()
    return outputs.pop()


@dataclass(frozen=True)
class Placement:
    """A Plan bound to a device mesh and a compute dtype; the model's forward pass asks it for constraints."""

    plan: Plan
    mesh: jax.sharding.Mesh
    compute_dtype: jnp.dtype

    @property
    def device(self) -> jax.Device:
        """One of the mesh's devices, for what they all have in common; it need not be there (a step can be
        compiled for absent ones), so that no array is put on it."""
        return self.mesh.devices.flat[0]

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs, real or fake."""
        return self.device.platform == "cpu"

    def spread(self, logical: str) -> tuple[str, ...]:
        """Those mesh axes of a logical axis that have more than one device.

        For collectives written out under shard_map: over an axis of one device they move nothing, but XLA
        may still copy for them.
        """
        plan = self.plan
        return self._longer(plan.batch_axes() if logical == "batch" else plan.rules.mesh_axes(logical))

    def spread_spec(self, spec: Spec) -> Spec:
        """`spec` without mesh axes of one device."""
        return tuple(self._longer(axes) for axes in spec)

    def _longer(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def constrain(self, x: jax.Array, spec: Spec) -> jax.Array:
        """`x` held to `spec`; on a single device there is nothing to hold."""
        if self.mesh.size == 1:
            return x
        assert len(spec) == x.ndim, f"{spec} does not fit {x.shape}"
        return with_sharding_constraint(x, named_sharding(self.mesh, spec))

    def result(self, specs: ProductSpecs, name: str, y: jax.Array) -> jax.Array:
        """The result of a product as the named activation."""
        if not specs.reduced:
            y = self.constrain(y, specs.product)
        elif specs.product != self.plan.activation(name):
            y = _with_gradient_held(y, self, specs.product)
        return self.activation(name, y)

    def activation(self, name: str, x: jax.Array) -> jax.Array:
        """The named activation, cut as the plan says."""
        return self.constrain(x, self.plan.activation(name))

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
        value = self.constrain(self.stored(path, value), decision.at_use()[skip:])
        use_shape = decision.use_shape[skip:]
        if value.shape != use_shape:
            value = value[tuple(slice(0, size) for size in use_shape)]
        return value


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _with_gradient_held(x: jax.Array, place: Placement, spec: Spec) -> jax.Array:
    """`x`, of which only the gradient is held to `spec`."""
    return x


_with_gradient_held.defvjp(
    lambda x, place, spec: (x, None),
    lambda place, spec, _, gradient: (place.constrain(gradient, spec),),
)
