"""Projections: a kernel with its cut, and several that share an operand; and how modules declare parameters.

Operands and results are held to what a kernel's cut asks for (ProductSpecs), so that no choice is left to the
partitioner. Not here: the form of a product that is fast (dense.py) and who projects what (transformer.py).
"""

from __future__ import annotations

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
    # Held to its own cut first: the kernels' must not reach back into what made it.
    x = place.activation(linears[0].use.takes, x)
    paths = tuple(linear.path + "kernel" for linear in linears)
    axes = summed_together(place.plan, paths, tuple(repeat is not None for repeat in repeats))
    if axes:
        ys = _summed(place, specs, axes, place.constrain(x, specs[0].operand), ready)
    else:
        ys = tuple(
            dense(place.constrain(x, s.operand), k, linear.use.num_inputs, place.on_cpu and s.flat)
            for s, k, linear in zip(specs, ready, linears, strict=True)
        )
    return tuple(
        place.result(s, linear.use.gives, y) for s, y, linear in zip(specs, ys, linears, strict=True)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _summed(
    place: Placement,
    specs: tuple[ProductSpecs, ...],
    axes: tuple[str, ...],
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    """Products of x [B, T, D] with kernels [outputs…, D] whose outputs are cut over `axes`."""
    return tuple(
        dense(x, kernel, 1, place.on_cpu and s.flat) for s, kernel in zip(specs, kernels, strict=True)
    )


def _summed_forward(
    place: Placement,
    specs: tuple[ProductSpecs, ...],
    axes: tuple[str, ...],
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], Any]:
    return _summed(place, specs, axes, x, kernels), (x, kernels)


def _summed_backward(
    place: Placement,
    specs: tuple[ProductSpecs, ...],
    axes: tuple[str, ...],
    saved: tuple[jax.Array, tuple[jax.Array, ...]],
    gradients: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, kernels = saved
    gradients = tuple(place.constrain(g, s.product) for g, s in zip(gradients, specs, strict=True))
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def kernel_gradient(s: ProductSpecs, kernel: jax.Array, g: jax.Array) -> jax.Array:
        (dw,) = jax.vjp(lambda k: dense(x, k, 1, place.on_cpu and s.flat), kernel)[1](g)
        return dw

    def local(gradients: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]) -> jax.Array:
        total: Any = 0
        for g, kernel in zip(gradients, kernels, strict=True):
            flat = kernel.reshape(-1, kernel.shape[-1])
            g = jax.lax.optimization_barrier(g.reshape(*g.shape[:2], flat.shape[0]))
            g, flat = operands(place.on_cpu, g.shape[0] * g.shape[1], g, flat)
            contracted = (((2,), (0,)), ((), ()))
            total += jax.lax.dot_general(g, flat, contracted, preferred_element_type=wide)
        return jax.lax.psum(total, axes).astype(x.dtype)

    dx = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(
            tuple(partition_spec(s.product) for s in specs),
            tuple(partition_spec(s.kernel) for s in specs),
        ),
        out_specs=partition_spec(specs[0].operand),
        check_vma=False,
    )(gradients, kernels)
    return dx, tuple(kernel_gradient(*of) for of in zip(specs, kernels, gradients, strict=True))


_summed.defvjp(_summed_forward, _summed_backward)
