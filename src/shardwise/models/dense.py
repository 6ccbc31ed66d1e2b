"""Matrix products with weights, in the form that is fast on the platform at hand.

Not here: which weight, and where it lies (transformer.py, partition/).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from shardwise.runtime.cpu import multiplies_bfloat16

FEW_ROWS = 32
"""Up to this many rows the weight is made the left operand on a CPU; see `dense`."""
WIDEN_ROWS = 256
"""From this many rows on it pays to widen bfloat16 operands; see `operands`."""


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
            its product needs. Kernels of more than two dims it would transpose on every call: they are
            reshaped to two.
        out_dtype: default x's.

    Returns:
        [B, T, outputs…]; products of narrower types are summed in float32.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    rows, outputs = x.shape[: x.ndim - num_inputs], kernel.shape[: kernel.ndim - num_inputs]
    if not cpu:
        last = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(len(outputs), kernel.ndim))
        y = jax.lax.dot_general(x, kernel, (last, ((), ())), preferred_element_type=_wide(x))
        return y.astype(out_dtype)
    inputs = math.prod(kernel.shape[len(outputs) :])
    form = _few_rows if math.prod(rows) <= FEW_ROWS else _many_rows
    y = form(x.reshape(*rows, inputs), kernel.reshape(-1, inputs), out_dtype)
    return y.reshape(*rows, *outputs)


def kernel_gradient(x: jax.Array, g: jax.Array, num_inputs: int = 1, cpu: bool = False) -> jax.Array:
    """The gradient of `dense`'s kernel, not yet rounded, so that other devices' parts can be added.

    Args:
        x: [B, T, inputs…], what the kernel was multiplied with.
        g: [B, T, outputs…], the gradient of the product, in the same dtype.
        num_inputs, cpu: as for `dense`.

    Returns:
        float32 (or wider) [outputs…, inputs…].
    """
    rows, inputs = x.shape[: x.ndim - num_inputs], x.shape[x.ndim - num_inputs :]
    outputs, wide = g.shape[len(rows) :], _wide(x)
    if not cpu:
        over_rows = (tuple(range(len(rows))),) * 2
        return jax.lax.dot_general(g, x, (over_rows, ((), ())), preferred_element_type=wide)
    g = jax.lax.optimization_barrier(g.reshape(*rows, math.prod(outputs)))
    x, g = operands(True, math.prod(rows), x.reshape(*rows, math.prod(inputs)), g)
    return _over_rows(x, g, wide).reshape(*outputs, *inputs)


def operands(cpu: bool, rows: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays as a product of `rows` rows should take them.

    A CPU without bfloat16 arithmetic multiplies bfloat16 at 60 to 80 % of float32's speed; there they are
    widened to float32 first, which changes no product, unless there are so few rows that this costs more.
    """
    if not cpu or rows < WIDEN_ROWS or multiplies_bfloat16():
        return arrays
    return tuple(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arrays)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _few_rows(x: jax.Array, kernel: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    last = ((1,), (x.ndim - 1,))
    y = jax.lax.dot_general(kernel, x, (last, ((), ())), preferred_element_type=_wide(x))
    return jnp.moveaxis(jax.lax.optimization_barrier(y.astype(out_dtype)), 0, -1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _many_rows(x: jax.Array, kernel: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    x, kernel = operands(True, x.size // x.shape[-1], x, kernel)
    last = ((x.ndim - 1,), (1,))
    y = jax.lax.dot_general(x, kernel, (last, ((), ())), preferred_element_type=_wide(x))
    return y.astype(out_dtype)


def _many_rows_forward(
    x: jax.Array, kernel: jax.Array, out_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _many_rows(x, kernel, out_dtype), (x, kernel)


def _many_rows_backward(
    out_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    dtypes = [array.dtype for array in saved]
    wide = _wide(saved[0])
    g = jax.lax.optimization_barrier(cotangent.astype(dtypes[0]))
    x, kernel, g = operands(True, g.size // g.shape[-1], *saved, g)
    dx = jax.lax.dot_general(g, kernel, (((g.ndim - 1,), (0,)), ((), ())), preferred_element_type=wide)
    dw = _over_rows(x, g, wide)
    return dx.astype(dtypes[0]), dw.astype(dtypes[1])


def _over_rows(x: jax.Array, g: jax.Array, wide: jnp.dtype) -> jax.Array:
    """The sum over rows of x […, inputs] times g […, outputs]: [outputs, inputs]."""
    rows = tuple(range(x.ndim - 1))
    over_rows = ((rows, rows), ((), ()))
    if x.shape[-1] < g.shape[-1]:
        # the left operand is transposed first, together with what made it: let that be the smaller one
        dw = jax.lax.dot_general(x, g, over_rows, preferred_element_type=wide)
        return jax.lax.optimization_barrier(dw).T
    return jax.lax.dot_general(g, x, over_rows, preferred_element_type=wide)


_many_rows.defvjp(_many_rows_forward, _many_rows_backward)
