"""Matrix products with weights, in the form that is fast on the platform at hand.

Not here: which weight, and where it lies (transformer.py, partition/).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

FEW_ROWS = 32
"""Up to this many rows the weight is made the left operand on a CPU; see `dense`."""


def dense(
    x: jax.Array, kernel: jax.Array, num_inputs: int = 1, cpu: bool = False, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """Contract the last `num_inputs` dims of `x` with the last of `kernel`.

    Args:
        x: [B, T, inputs…].
        kernel: [outputs…, inputs…] in the same dtype.
        cpu: take the form that is fast on XLA's CPU back end. It packs the right operand of a product on every call
            and streams the left one, so with few rows (decoding) the weight must be on the left, and a barrier keeps
            XLA from turning the product round again.
        out_dtype: default x's.

    Returns:
        [B, T, outputs…]; products of narrower types are summed in float32.
    """
    x_dims, k_dims = x.ndim - num_inputs, kernel.ndim - num_inputs
    wide, out_dtype = jnp.promote_types(x.dtype, jnp.float32), out_dtype or x.dtype
    contract_x, contract_k = tuple(range(x_dims, x.ndim)), tuple(range(k_dims, kernel.ndim))
    if cpu and math.prod(x.shape[:x_dims]) <= FEW_ROWS:
        y = jax.lax.dot_general(kernel, x, ((contract_k, contract_x), ((), ())), preferred_element_type=wide)
        y = jax.lax.optimization_barrier(y.astype(out_dtype))
        return jnp.moveaxis(y, tuple(range(k_dims, k_dims + x_dims)), tuple(range(x_dims)))
    y = jax.lax.dot_general(x, kernel, ((contract_x, contract_k), ((), ())), preferred_element_type=wide)
    return y.astype(out_dtype)
