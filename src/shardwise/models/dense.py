"""Matrix products with weights, in the form that is fast on the platform at hand.

Not here: which weight, and where it lies (transformer.py, partition/).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dense(x: jax.Array, kernel: jax.Array, num_inputs: int = 1) -> jax.Array:
    """Contract the last `num_inputs` dims of `x` with the first of `kernel`.

    Args:
        x: [B, T, inputs…].
        kernel: [inputs…, outputs…] in the same dtype.

    Returns:
        [B, T, outputs…] in x's dtype; products of narrower types are summed in float32.
    """
    last = tuple(range(x.ndim - num_inputs, x.ndim))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.dot_general(x, kernel, ((last, tuple(range(num_inputs))), ((), ())), preferred_element_type=wide)
    return y.astype(x.dtype)
