"""Projections: a kernel with its cut, and several that share an operand; and how modules declare parameters.

Operands and results are held to what a kernel's cut asks for (ProductSpecs), so that no choice is left to the
partitioner. Not here: the form of a product that is fast (dense.py) and who projects what (transformer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardwise.models.dense import dense, kernel_gradient, operands
from shardwise.partition.constraints import GradientSpecs, Placement, ProductSpecs, summed_together
from shardwise.partition.padding import Padding
from shardwise.partition.plan import Use, partition_spec
from shardwise.partition.rules import Spec

PRODUCT = "product"
"""Name of the products with kernels, for rematerialisation."""

_Arrays = tuple[jax.Array, ...]
_Repeats = tuple[jax.Array | None, ...]
"""For each projection, which of its stored kv heads each slot takes; see Linear."""


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
    linears, repeats = zip(*projections, strict=True)
    products = _Products(
        place,
        tuple(linear.path + "kernel" for linear in linears),
        tuple(linear.use for linear in linears),
        tuple(repeat is not None for repeat in repeats),
    )
    # The operand is held to its own cut first: the kernel's must not reach back into what made it.
    x = place.constrain(x, products.takes)
    ys = _multiplied(products, x, tuple(linear.kernel[...] for linear in linears), repeats)
    return tuple(
        linear.add_bias(place, checkpoint_name(place.result(specs, linear.use.gives, y), PRODUCT), repeat)
        for specs, linear, y, repeat in zip(products.specs, linears, ys, repeats, strict=True)
    )


@dataclass(frozen=True)
class _Products:
    """Products of one operand with several kernels."""

    place: Placement
    paths: tuple[str, ...]
    """Of the kernels."""
    uses: tuple[Use, ...]
    repeated: tuple[bool, ...]
    """For each, whether its kv heads are repeated at use."""

    @cached_property
    def specs(self) -> tuple[ProductSpecs, ...]:
        """How operand and result of each lie."""
        each = zip(self.paths, self.repeated, strict=True)
        return tuple(ProductSpecs.of(self.place.plan, path, repeated) for path, repeated in each)

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """Mesh axes over which all kernels' parts of the operand's gradient are added up together; () if each
        has a sum of its own."""
        return summed_together(self.place.plan, self.paths, self.repeated)

    @property
    def takes(self) -> Spec:
        """How the operand lies as an activation."""
        return self.place.plan.activation(self.uses[0].takes)

    def scattered_dim(self, shape: tuple[int, ...]) -> int | None:
        """The dim of the operand that lies cut over `shared`: each device needs its part of the sum alone."""
        parts, operand = self.place.plan.mesh.size(self.shared), self.specs[0].operand
        for dim, (cut, used) in enumerate(zip(self.takes, operand, strict=True)):
            if cut == (*used, *self.shared) and shape[dim] % parts == 0:
                return dim
        return None

    def ready(self, which: int, kernel: jax.Array, repeat: jax.Array | None) -> jax.Array:
        """A stored kernel as it is used: cast, gathered over `fsdp`, kv heads repeated."""
        kernel = self.place.weight(self.paths[which], kernel)
        if repeat is None:
            return kernel
        return self.place.constrain(jnp.take(kernel, repeat, axis=0), self.specs[which].kernel)

    def laid_out(self, which: int, x: jax.Array) -> jax.Array:
        """The operand as a kernel takes it; where no sum is shared, moved there, and back, for it alone."""
        x = x if self.shared else self.place.constrain(x, self.takes)
        return self.place.constrain(x, self.specs[which].operand)

    def product(self, which: int, x: jax.Array, ready: jax.Array) -> jax.Array:
        """The product of a kernel as it is used."""
        flat = self.place.on_cpu and self.specs[which].flat
        return dense(self.laid_out(which, x), ready, self.uses[which].num_inputs, flat)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiplied(products: _Products, x: jax.Array, kernels: _Arrays, repeats: _Repeats) -> _Arrays:
    """Products [B, T, outputs…] of x [B, T, inputs…], without biases, with kernels as they are stored.

    What is made of the kernels is made again in the backward pass: kept, it would be every layer's whole
    weights at once.
    """
    each = enumerate(zip(kernels, repeats, strict=True))
    return tuple(products.product(i, x, products.ready(i, *pair)) for i, pair in each)


def _forward(
    products: _Products, x: jax.Array, kernels: _Arrays, repeats: _Repeats
) -> tuple[_Arrays, tuple[jax.Array, _Arrays, _Repeats]]:
    return _multiplied(products, x, kernels, repeats), (x, kernels, repeats)


def _backward(
    products: _Products, saved: tuple[jax.Array, _Arrays, _Repeats], gradients: _Arrays
) -> tuple[jax.Array, _Arrays, tuple[None, ...]]:
    (x, kernels, repeats), place = saved, products.place
    pairs = list(zip(kernels, repeats, strict=True))
    gradients = tuple(place.constrain(g, s.product) for g, s in zip(gradients, products.specs, strict=True))
    ready = tuple(products.ready(i, *pair) for i, pair in enumerate(pairs))
    if products.shared:
        dx = _summed_once(products, x, ready, gradients)
    else:
        dx = _summed_apart(products, x, ready, gradients)
    each = enumerate(zip(pairs, gradients, strict=True))
    return (
        dx,
        tuple(_kernel_gradient(products, i, x, *pair, g) for i, (pair, g) in each),
        (None,) * len(pairs),
    )


_multiplied.defvjp(_forward, _backward)


def _summed_apart(products: _Products, x: jax.Array, ready: _Arrays, gradients: _Arrays) -> jax.Array:
    """The gradient of x [B, T, inputs…], each kernel's part summed over devices alone."""

    def part(which: int) -> jax.Array:
        (dx,) = jax.vjp(lambda x: products.product(which, x, ready[which]), x)[1](gradients[which])
        return dx

    return reduce(jnp.add, [part(i) for i in reversed(range(len(ready)))])


def _summed_once(products: _Products, x: jax.Array, ready: _Arrays, gradients: _Arrays) -> jax.Array:
    """The same for kernels [outputs…, D] whose parts are added on each device and summed over `shared`."""
    place, specs, dim = products.place, products.specs, products.scattered_dim(x.shape)

    def local(gradients: _Arrays, kernels: _Arrays) -> jax.Array:
        total: Any = 0
        for g, kernel in zip(gradients, kernels, strict=True):
            flat = kernel.reshape(-1, kernel.shape[-1])
            g = jax.lax.optimization_barrier(g.reshape(*g.shape[:2], flat.shape[0]))
            g, flat = operands(place.on_cpu, g.shape[0] * g.shape[1], g, flat)
            wide = jnp.promote_types(x.dtype, jnp.float32)
            total += jax.lax.dot_general(g, flat, (((2,), (0,)), ((), ())), preferred_element_type=wide)
        if dim is None:
            return jax.lax.psum(total, products.shared).astype(x.dtype)
        return jax.lax.psum_scatter(total, products.shared, scatter_dimension=dim, tiled=True).astype(x.dtype)

    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(
            tuple(partition_spec(s.product) for s in specs),
            tuple(partition_spec(s.kernel) for s in specs),
        ),
        out_specs=partition_spec(specs[0].operand if dim is None else products.takes),
        check_vma=False,
    )(gradients, ready)


def _kernel_gradient(
    products: _Products, which: int, x: jax.Array, kernel: jax.Array, repeat: jax.Array | None, g: jax.Array
) -> jax.Array:
    """The gradient of a kernel, lying as it is stored; see GradientSpecs.

    Left to the partitioner, the sum is reduced whole wherever padding, or adding up the copies of a kv head,
    comes between it and the slice that a device keeps.
    """
    place, path, specs = products.place, products.paths[which], products.specs[which]
    if place.mesh.size == 1:
        ready = partial(products.ready, which, repeat=repeat)
        (made,) = jax.vjp(lambda k: products.product(which, x, ready(k)), kernel)[1](g)
        return made
    to = GradientSpecs.of(place.plan, path, repeat is not None)
    whole = tuple(n // place.plan.mesh.size(axes) for n, axes in zip(to.shape, to.part, strict=True))

    def local(x: jax.Array, g: jax.Array, *slots: jax.Array) -> jax.Array:
        part = kernel_gradient(x, g, products.uses[which].num_inputs, place.on_cpu)
        for kv_heads in slots:
            part = jnp.zeros((whole[0], *part.shape[1:]), part.dtype).at[kv_heads].add(part)
        part = jnp.pad(part, [(0, size - have) for size, have in zip(whole, part.shape, strict=True)])
        for dim, axes in to.scattered:
            part = jax.lax.psum_scatter(part, axes, scatter_dimension=dim, tiled=True)
        part = jax.lax.psum(part, to.rest) if to.rest else part
        return part.astype(place.compute_dtype).astype(kernel.dtype)

    slots = () if repeat is None else (repeat,)
    made = jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(
            partition_spec(specs.operand), partition_spec(specs.product),
            *(partition_spec(specs.kernel[:1]) for _ in slots),
        ),
        out_specs=partition_spec(to.spec),
        check_vma=False,
    )(products.laid_out(which, x), g, *slots)  # fmt: skip
    return place.constrain(made, place.plan[path].spec[-made.ndim :])
