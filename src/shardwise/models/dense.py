"""Matrix products with weights, in the form that is fast on the platform at hand.

Not here: which weight, and where it lies (transformer.py, partition/).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

FEW_ROWS = 32
"""Up to this many rows the weight is made the left operand on a CPU; see `dense`."""


def dense(
    x: jax.Array,
    kernel: jax.Array,
    num_inputs: int = 1,
    cpu: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Contract the last `num_inputs` dims of `x` with the last of `kernel`.

    Args:
        x: [B, T, inputs…].
        kernel: [outputs…, inputs…] in the same dtype.
        cpu: take the forms that are fast on XLA's CPU back end. It packs the right operand of a product on
            every call and streams the left one, so with few rows (decoding) the weight must be on the left,
            and a barrier keeps XLA from turning the product round again. In the backward pass a barrier keeps
            what made the cotangent from being computed again, column by column, inside the transposition that
            its product needs.
        out_dtype: default x's.

    Returns:
        [B, T, outputs…]; products of narrower types are summed in float32.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    if not cpu:
        return _product(x, kernel, num_inputs, out_dtype)
    if math.prod(x.shape[: x.ndim - num_inputs]) <= FEW_ROWS:
        return _few_rows(x, kernel, num_inputs, out_dtype)
    return _many_rows(x, kernel, num_inputs, out_dtype)


def _product(x: jax.Array, kernel: jax.Array, num_inputs: int, out_dtype: jnp.dtype) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.dot_general(x, kernel, _last(x, kernel, num_inputs), preferred_element_type=wide).astype(
        out_dtype
    )


def _few_rows(x: jax.Array, kernel: jax.Array, num_inputs: int, out_dtype: jnp.dtype) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.dot_general(kernel, x, _last(kernel, x, num_inputs), preferred_element_type=wide)
    y = jax.lax.optimization_barrier(y.astype(out_dtype))
    outputs, rows = kernel.ndim - num_inputs, x.ndim - num_inputs
    return jnp.moveaxis(y, tuple(range(outputs, outputs + rows)), tuple(range(rows)))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _many_rows(x: jax.Array, kernel: jax.Array, num_inputs: int, out_dtype: jnp.dtype) -> jax.Array:
    return _product(x, kernel, num_inputs, out_dtype)


def _many_rows_forward(
    x: jax.Array, kernel: jax.Array, num_inputs: int, out_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel, num_inputs, out_dtype), (x, kernel)


def _many_rows_backward(
    num_inputs: int, out_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rows, outputs = x.ndim - num_inputs, kernel.ndim - num_inputs
    g = jax.lax.optimization_barrier(cotangent.astype(x.dtype))
    over_outputs = (tuple(range(rows, g.ndim)), tuple(range(outputs)))
    over_rows = (tuple(range(rows)), tuple(range(rows)))
    dx = jax.lax.dot_general(g, kernel, (over_outputs, ((), ())), preferred_element_type=wide)
    if math.prod(x.shape[rows:]) < math.prod(g.shape[rows:]):
        # the left operand is transposed first, together with what made it: let that be the smaller one
        dw = jax.lax.dot_general(x, g, (over_rows, ((), ())), preferred_element_type=wide)
        dw = jax.lax.optimization_barrier(dw)
        dw = jnp.moveaxis(dw, tuple(range(num_inputs)), tuple(range(outputs, kernel.ndim)))
    else:
        dw = jax.lax.dot_general(g, x, (over_rows, ((), ())), preferred_element_type=wide)
    return dx.astype(x.dtype), dw.astype(kernel.dtype)


_many_rows.defvjp(_many_rows_forward, _many_rows_backward)


def _last(a: jax.Array, b: jax.Array, count: int) -> jax.lax.DotDimensionNumbers:
    """Dimension numbers that contract the last `count` dims of both."""
    return ((tuple(range(a.ndim - count, a.ndim)), tuple(range(b.ndim - count, b.ndim))), ((), ()))
