"""A classifier of whole sequences, which reads the first token's last hidden state.

Not here: its loss and scores (steps/labels.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.models.linear import Declare, Linear
from shardwise.partition.constraints import Placement


class Classifier(nnx.Module):
    """out_proj(tanh(dense(x))) of the first token (Devlin et al. 2019, §4.1, as RoBERTa has it).

    Both products have one row a sequence, so neither is worth cutting over `tp`.
    """

    def __init__(self, declare: Declare):
        self.dense = Linear(declare.below("dense"), ("embed",), ("vector",), True, "first", "pooled")
        self.out_proj = Linear(
            declare.below("out_proj"), ("embed",), ("labels",), True, "pooled", "label_logits"
        )

    def __call__(self, place: Placement, hidden: jax.Array) -> jax.Array:
        """Hidden states [B, T, D], the first token at place 0 → float32 (or wider) [B, 1, labels]."""
        # Whole in T and D before the slice: nothing below takes over its cut, nor the other way round.
        first = place.constrain(hidden, (place.plan.batch_axes(), (), ()))[:, :1]
        pooled = jnp.tanh(self.dense(place, place.activation("first", first)))
        logits = self.out_proj(place, place.activation("pooled", pooled))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
