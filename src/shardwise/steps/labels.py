"""Loss and scores of a classifier: one label a sequence.

A batch carries the label where other steps have a token's target: in `targets[:, 0]`, weighted by
`weights[:, 0]`. Not here: the logits (models/classifier.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def label_cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float
) -> jax.Array:
    """Σ weight · (NLL + z_loss · log²Z) over all sequences of all devices.

    Args:
        logits: [B, 1, N].
        targets: int32 [B, T], of which the first place counts.
        weights: float32 [B, T]; likewise. 0 leaves a sequence out.
        z_loss: as in loss.cross_entropy.
    """
    lse = jax.nn.logsumexp(logits, axis=-1)
    losses = lse - _picked(logits, targets) + z_loss * jnp.square(lse)
    return jnp.sum(weights[:, :1].astype(losses.dtype) * losses)


def label_scores(logits: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Negative log-likelihood of every sequence's label, and whether it is the likeliest.

    Args:
        logits: [B, 1, N].
        targets: int32 [B, T], of which the first place counts.

    Returns:
        nll: like the logits, [B, 1], in nats.
        right: bool [B, 1]; of equal logits the lowest label is taken as chosen.
    """
    nll = jax.nn.logsumexp(logits, axis=-1) - _picked(logits, targets)
    return {"nll": nll, "right": jnp.argmax(logits, axis=-1) == targets[:, :1]}


def _picked(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each sequence's label, [B, 1]: by a mask, which the batch's cut cannot disturb."""
    hit = targets[:, :1, None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)
    return jnp.sum(jnp.where(hit, logits, 0), axis=-1)
