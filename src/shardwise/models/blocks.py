"""One layer of the transformer: attention, feed-forward layer, and the norms around them.

Shapes: B batch, T query length, S key length, D embed, K kv heads (slots after padding), G query heads per
kv head, E head_dim. Not here: what runs the layers (transformer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.models.attention import Kernel, Scores, Visibility, alibi_slopes, attention
from shardwise.models.cache import write_rows
from shardwise.models.config import ModelConfig
from shardwise.models.linear import Declare, Linear, project
from shardwise.models.mlp import GatedMLP, PlainMLP
from shardwise.models.moe import MoE
from shardwise.models.norms import Norm
from shardwise.models.positions import rotate
from shardwise.partition.constraints import Placement

Turn = tuple[jax.Array, jax.Array]
"""Cosines and sines of positions."""
Cached = tuple[jax.Array, jax.Array, jax.Array]
"""A layer's keys and values [B, S, K, E], and the place [B] of each row's next token."""


@dataclass(frozen=True)
class Around:
    """What a layer needs beside its input."""

    visible: Visibility
    turn: Turn | None
    """Of the new tokens; None where positions are not rotary."""
    kernel: Kernel
    key_turn: Turn | None = None
    """Of the cache's slots, where keys are cached as they are before turning and turned at every use, because
    what turns them changes while a row grows; None where keys are cached turned."""


class Attention(nnx.Module):
    """Self-attention with grouped query heads."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.config, self.heads = config, declare.padding.heads
        query, key = ("heads", "q_per_kv", "head_dim"), ("kv_heads", "head_dim")
        bias = config.qkv_bias
        self.q_proj = Linear(declare.below("q_proj"), ("embed",), query, bias, "residual", "query")
        self.k_proj = Linear(declare.below("k_proj"), ("embed",), key, bias, "residual", "key")
        self.v_proj = Linear(declare.below("v_proj"), ("embed",), key, bias, "residual", "value")
        self.o_proj = Linear(
            declare.below("o_proj"), query, ("embed",), config.attention_out_bias, "attention_out", "residual"
        )

        def head_norm(name: str, gives: str) -> Norm | None:
            return Norm(declare.below(name), config, "head_dim", gives, "rms") if config.qk_norm else None

        self.q_norm, self.k_norm = head_norm("q_norm", "query"), head_norm("k_norm", "key")

    def __call__(
        self, place: Placement, x: jax.Array, around: Around, cached: Cached | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attend; the cache takes the new keys and values first."""
        repeat = jnp.asarray(self.heads.kv_of_slot) if self.heads.repeat > 1 else None
        q, k, v = project(place, x, (self.q_proj, None), (self.k_proj, repeat), (self.v_proj, repeat))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(place, q), self.k_norm(place, k)
        if around.turn is not None:
            q = rotate(q, around.turn)
            k = k if around.key_turn is not None else rotate(k, around.turn)
        updated = None
        if cached is not None:
            keys, values, starts = cached
            k = place.activation("kv_cache", write_rows(keys, k, starts))
            v = place.activation("kv_cache", write_rows(values, v, starts))
            updated = (k, v)
            k = k if around.key_turn is None else rotate(k, around.key_turn)
        out = attention(place, q, k, v, around.visible, self._scores(place), around.kernel)
        if not self.heads.valid.all():  # a padded head would else move its (zero) rows of o_proj in training
            out = out * jnp.asarray(self.heads.valid, out.dtype)[:, :, None]
        return self.o_proj(place, place.activation("attention_out", out)), updated

    def _scores(self, place: Placement) -> Scores:
        config, slopes = self.config, None
        if config.positions == "alibi":
            of_heads = alibi_slopes(config.num_heads).reshape(config.num_kv_heads, config.q_per_kv)
            slopes = place.plan.padding.pad(of_heads, ("heads", "q_per_kv"))
        return Scores(config.score_scale, config.attention_softcap, slopes)


class Block(nnx.Module):
    """One layer; where its norms stand and whether its halves run side by side, the config says."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.order, self.parallel = config.norm_order, config.parallel

        def norm(name: str, wanted: bool = True) -> Norm | None:
            return Norm(declare.below(name), config) if wanted else None

        sandwich = self.order == "sandwich"
        self.attn_norm = Norm(declare.below("attn_norm"), config)
        self.attn = Attention(declare.below("attn"), config)
        self.attn_post_norm = norm("attn_post_norm", sandwich)
        self.mlp_norm = norm("mlp_norm", self.parallel != "one_norm")
        feed_forward = MoE if config.num_experts else GatedMLP if config.gated_mlp else PlainMLP
        self.mlp = feed_forward(declare.below("mlp"), config)
        self.mlp_post_norm = norm("mlp_post_norm", sandwich)

    def __call__(
        self, place: Placement, x: jax.Array, around: Around, cached: Cached | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """The residual stream after this layer, and its cache's new keys and values."""
        if self.parallel != "no":
            normed = self.attn_norm(place, x)
            attended, updated = self.attn(place, normed, around, cached)
            normed = normed if self.mlp_norm is None else self.mlp_norm(place, x)
            x = x + attended + self.mlp(place, normed)
            return place.activation("residual", x), updated
        assert self.mlp_norm is not None
        if self.order == "post":
            attended, updated = self.attn(place, x, around, cached)
            x = self.attn_norm(place, place.activation("residual", x + attended))
            x = self.mlp_norm(place, place.activation("residual", x + self.mlp(place, x)))
            return x, updated
        attended, updated = self.attn(place, self.attn_norm(place, x), around, cached)
        if self.attn_post_norm is not None:
            attended = self.attn_post_norm(place, attended)
        x = place.activation("residual", x + attended)
        added = self.mlp(place, self.mlp_norm(place, x))
        if self.mlp_post_norm is not None:
            added = self.mlp_post_norm(place, added)
        return place.activation("residual", x + added), updated
