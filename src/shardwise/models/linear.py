"""Projections: a kernel with its cut, and several that share an operand; and how modules declare parameters.

Operands and results are held to what a kernel's cut asks for (ProductSpecs), so that no choice is left to the
partitioner. Not here: the form of a product that is fast (dense.py) and who projects what (transformer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardwise.models.dense import dense, operands
from shardwise.partition.constraints import Placement, ProductSpecs, summed_together
from shardwise.partition.padding import Padding
from shardwise.partition.plan import Use, partition_spec
from shardwise.partition.rules import Spec

PRODUCT = "product"
"""Name of the products with kernels, for rematerialisation."""


class Declare:
    """Makes parameters of the padded sizes, with their logical axes, under one path prefix."""

    def __init__(self, padding: Padding, prefix: str = "", stacked: bool = False):
        self.padding, self.prefix, self.stacked = padding, prefix, stacked

    def below(self, name: str, stacked: bool | None = None) -> Declare:
        """The same one level further down."""
        return Declare(self.padding, f"{self.prefix}{name}/", self.stacked if stacked is None else stacked)

    def param(self, *axes: str, use: Use, init: str = "normal") -> nnx.Param:
        """A parameter with these logical axes (behind `layers` where layers are stacked), not yet drawn."""
        axes = ("layers", *axes) if self.stacked else axes
        return nnx.Param(
            jnp.zeros(self.padding.use_shape(axes)),
            out_sharding=axes,
            eager_sharding=False,
            init=init,
            use=use,
        )


class Linear(nnx.Module):
    """A projection from the dims `inputs` to the dims `outputs`, with an optional bias added once, after any
    reduction over `tp`. The kernel lies as Hugging Face's does, [outputs…, inputs…]."""

    def __init__(
        self, declare: Declare, inputs: tuple[str, ...], outputs: tuple[str, ...], bias: bool,
        takes: str, gives: str,
    ):  # fmt: skip
        self.path, self.use = declare.prefix, Use("kernel", takes, gives, len(inputs))
        self.kernel = declare.param(*outputs, *inputs, use=self.use)
        bias_axes = ("vector",) if outputs == ("embed",) else outputs
        self.bias = declare.param(*bias_axes, init="zeros", use=Use("bias", gives=gives)) if bias else None

    def __call__(self, place: Placement, x: jax.Array, repeat: jax.Array | None = None) -> jax.Array:
        """Project `x`, the activation that this kernel takes, [B, T, inputs…] to the one that it gives,
        [B, T, outputs…].

        Args:
            repeat: int32 [K]: which of the stored kv heads (first output dim) each slot takes; None for as
                stored.
        """
        return project(place, x, (self, repeat))[0]

    def specs(self, place: Placement, repeat: jax.Array | None) -> ProductSpecs:
        """How operand and result of its product lie."""
        return ProductSpecs.of(place.plan, self.path + "kernel", repeat is not None)

    def at_use(self, place: Placement, kernel: jax.Array, repeat: jax.Array | None) -> jax.Array:
        """The kernel ready for its product: cast, gathered over `fsdp`, kv heads repeated."""
        kernel = place.weight(self.path + "kernel", kernel)
        if repeat is None:
            return kernel
        return place.constrain(jnp.take(kernel, repeat, axis=0), self.specs(place, repeat).kernel)

    def add_bias(self, place: Placement, y: jax.Array, repeat: jax.Array | None) -> jax.Array:
        """The product with the bias, where there is one."""
        if self.bias is None:
            return y
        bias = place.weight(self.path + "bias", self.bias[...])
        return y + (bias if repeat is None else jnp.take(bias, repeat, axis=0))


def project(
    place: Placement, x: jax.Array, *projections: tuple[Linear, jax.Array | None]
) -> tuple[jax.Array, ...]:
    """Several projections of one operand; see Linear for the second of each pair.

    Where their outputs are cut over `tp`, each device has a part of every sum that makes the operand's
    gradient: the parts of all projections are added up first and reduced once.
    """
    repeats = tuple(repeat for _, repeat in projections)
    product = jax.checkpoint(partial(_products, place, tuple(p for p, _ in projections)), prevent_cse=False)
    kernels = tuple(linear.kernel[...] for linear, _ in projections)
    named = (checkpoint_name(y, PRODUCT) for y in product(x, kernels, repeats))
    return tuple(linear.add_bias(place, y, r) for y, (linear, r) in zip(named, projections, strict=True))


def _products(
    place: Placement,
    linears: tuple[Linear, ...],
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    repeats: tuple[jax.Array | None, ...],
) -> tuple[jax.Array, ...]:
    """Without biases, from kernels as they are stored.

    What is made of the kernels (cast, gathered over `fsdp`) is made again in the backward pass: kept, it
    would be every layer's whole weights at once.
    """
    pairs = list(zip(linears, repeats, strict=True))
    specs = tuple(linear.specs(place, repeat) for linear, repeat in pairs)
    ready = tuple(linear.at_use(place, k, r) for (linear, r), k in zip(pairs, kernels, strict=True))
    paths = tuple(linear.path + "kernel" for linear in linears)
    axes = summed_together(place.plan, paths, tuple(repeat is not None for repeat in repeats))
    # An operand is held to its own cut first: the kernel's must not reach back into what made it.
    if axes:
        x = place.activation(linears[0].use.takes, x)
        shared = _Shared(place, specs, axes, place.plan.activation(linears[0].use.takes))
        ys = _summed(shared, x, ready)
    else:
        ys = tuple(
            dense(
                place.constrain(place.activation(linear.use.takes, x), s.operand),
                k, linear.use.num_inputs, place.on_cpu and s.flat,
            )
            for s, k, linear in zip(specs, ready, linears, strict=True)
        )  # fmt: skip
    return tuple(
        place.result(s, linear.use.gives, y) for s, y, linear in zip(specs, ys, linears, strict=True)
    )


@dataclass(frozen=True)
class _Shared:
    """Kernels of one operand whose outputs are cut over the same axes."""

    place: Placement
    specs: tuple[ProductSpecs, ...]
    axes: tuple[str, ...]
    """Mesh axes over which the operand's gradient is made in parts."""
    takes: Spec
    """How the operand lies as an activation."""

    def product(self, which: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """One of the products, of the operand as it lies as an activation."""
        x = self.place.constrain(x, self.specs[which].operand)
        return dense(x, kernel, 1, self.place.on_cpu and self.specs[which].flat)

    def scattered_dim(self) -> int | None:
        """The dim of the operand that lies cut over `axes`, so that each device needs its part of the sum."""
        operand = self.specs[0].operand
        for dim, (cut, used) in enumerate(zip(self.takes, operand, strict=True)):
            if cut == (*used, *self.axes):
                return dim
        return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(shared: _Shared, x: jax.Array, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Products of x [B, T, D] with kernels [outputs…, D]."""
    return tuple(shared.product(i, x, kernel) for i, kernel in enumerate(kernels))


def _summed_forward(
    shared: _Shared, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], Any]:
    return _summed(shared, x, kernels), (x, kernels)


def _summed_backward(
    shared: _Shared, saved: tuple[jax.Array, tuple[jax.Array, ...]], gradients: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    (x, kernels), place, specs = saved, shared.place, shared.specs
    gradients = tuple(place.constrain(g, s.product) for g, s in zip(gradients, specs, strict=True))
    dim = shared.scattered_dim()

    def kernel_gradient(which: int) -> jax.Array:
        (dw,) = jax.vjp(lambda k: shared.product(which, x, k), kernels[which])[1](gradients[which])
        return dw

    def local(gradients: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]) -> jax.Array:
        total: Any = 0
        for g, kernel in zip(gradients, kernels, strict=True):
            flat = kernel.reshape(-1, kernel.shape[-1])
            g = jax.lax.optimization_barrier(g.reshape(*g.shape[:2], flat.shape[0]))
            g, flat = operands(place.on_cpu, g.shape[0] * g.shape[1], g, flat)
            wide = jnp.promote_types(x.dtype, jnp.float32)
            total += jax.lax.dot_general(g, flat, (((2,), (0,)), ((), ())), preferred_element_type=wide)
        if dim is None:
            return jax.lax.psum(total, shared.axes).astype(x.dtype)
        return jax.lax.psum_scatter(total, shared.axes, scatter_dimension=dim, tiled=True).astype(x.dtype)

    dx = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(
            tuple(partition_spec(s.product) for s in specs),
            tuple(partition_spec(s.kernel) for s in specs),
        ),
        out_specs=partition_spec(specs[0].operand if dim is None else shared.takes),
        check_vma=False,
    )(gradients, kernels)
    return dx, tuple(kernel_gradient(i) for i in range(len(kernels)))


_summed.defvjp(_summed_forward, _summed_backward)
