"""The one decoder transformer, in Flax NNX: parameters, names, logical axes and the forward pass.

Shapes: B batch, T query length, S key length, D embed, K kv heads (slots after padding), G query heads per
kv head, E head_dim, F mlp, V vocab, L layers. Not here: steps, losses, sampling (steps/), and what a family's
files call these tensors (families/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardwise.models.attention import Kernel, Visibility, attention
from shardwise.models.cache import KVCache, write_rows
from shardwise.models.config import ModelConfig
from shardwise.models.head import Head, head_logits
from shardwise.models.linear import PRODUCT, Declare, Linear, project
from shardwise.models.positions import document_lengths, rotate, rotation
from shardwise.models.vocabulary import VocabMatrix, look_up
from shardwise.partition.constraints import Placement
from shardwise.partition.padding import Padding
from shardwise.partition.plan import Use

Remat = Literal["none", "dots", "full"]
"""What the backward pass recomputes: nothing; all but matrix products; everything within a layer."""

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "relu": jax.nn.relu}


@partial(jax.checkpoint, static_argnums=0)
def _gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) · up; the backward pass keeps only the two, not what lies between."""
    return _ACTIVATIONS[activation](gate) * up


@partial(jax.checkpoint, static_argnums=1)
def _normed(x: jax.Array, eps: float) -> jax.Array:
    """x over its root mean square, computed in float32 at least; the backward pass keeps x alone."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def __init__(self, declare: Declare, eps: float):
        self.path, self.eps = declare.prefix, eps
        self.scale = declare.param("vector", init="ones", use=Use("scale"))

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        return _normed(x, self.eps) * place.weight(self.path + "scale", self.scale[...])


class Attention(nnx.Module):
    """Causal self-attention with grouped query heads and rotary positions."""

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

    def __call__(
        self,
        place: Placement,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        visible: Visibility,
        cached: tuple[jax.Array, jax.Array, jax.Array] | None,
        kernel: Kernel,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Attend; `cached` (keys, values [B, S, K, E], starts [B]) takes the new keys and values first."""
        repeat = jnp.asarray(self.heads.kv_of_slot) if self.heads.repeat > 1 else None
        q, k, v = project(place, x, (self.q_proj, None), (self.k_proj, repeat), (self.v_proj, repeat))
        q, k = rotate(q, turn), rotate(k, turn)
        updated = None
        if cached is not None:
            keys, values, starts = cached
            k = place.activation("kv_cache", write_rows(keys, k, starts))
            v = place.activation("kv_cache", write_rows(values, v, starts))
            updated = (k, v)
        out = attention(place, q, k, v, visible, kernel)
        if not self.heads.valid.all():  # a padded head would else move its (zero) rows of o_proj in training
            out = out * jnp.asarray(self.heads.valid, out.dtype)[:, :, None]
        return self.o_proj(place, place.activation("attention_out", out)), updated


class GatedMLP(nnx.Module):
    """Gated feed-forward layer (Shazeer 2020, arXiv:2002.05202): down(act(gate(x)) · up(x))."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.activation = config.activation
        wide, narrow, bias = ("residual", "mlp_hidden"), ("mlp_hidden", "residual"), config.mlp_bias
        self.gate_proj = Linear(declare.below("gate_proj"), ("embed",), ("mlp",), bias, *wide)
        self.up_proj = Linear(declare.below("up_proj"), ("embed",), ("mlp",), bias, *wide)
        self.down_proj = Linear(declare.below("down_proj"), ("mlp",), ("embed",), bias, *narrow)

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        gate, up = project(place, x, (self.gate_proj, None), (self.up_proj, None))
        return self.down_proj(place, _gated(self.activation, gate, up))


class Block(nnx.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, declare: Declare, config: ModelConfig):
        self.attn_norm = RMSNorm(declare.below("attn_norm"), config.norm_eps)
        self.attn = Attention(declare.below("attn"), config)
        self.mlp_norm = RMSNorm(declare.below("mlp_norm"), config.norm_eps)
        self.mlp = GatedMLP(declare.below("mlp"), config)

    def __call__(
        self,
        place: Placement,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        visible: Visibility,
        cached: tuple[jax.Array, jax.Array, jax.Array] | None,
        kernel: Kernel,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        attended, updated = self.attn(place, self.attn_norm(place, x), turn, visible, cached, kernel)
        x = place.activation("residual", x + attended)
        x = x + self.mlp(place, self.mlp_norm(place, x))
        return place.activation("residual", x), updated


class Transformer(nnx.Module):
    """Embedding, L blocks, final norm and head.

    Layers are one stacked block, run by a scan (training), or a list of blocks (decoding, where slicing a
    stack costs more than the layer itself on a CPU).
    """

    def __init__(self, config: ModelConfig, padding: Padding, stacked: bool):
        declare = Declare(padding)
        self.config, self.stacked = config, stacked
        self.embed = nnx.Dict(table=declare.param("vocab", "embed", use=Use("embedding", "", "residual")))
        if stacked:
            self.layers = Block(declare.below("layers", stacked=True), config)
        else:
            # every block asks the Plan under the stacked path: one decision holds for all layers
            self.layers = nnx.List([Block(declare.below("layers"), config) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(declare.below("final_norm"), config.norm_eps)
        head = {}
        if not config.tie_embeddings:
            head["kernel"] = declare.param("vocab", "embed", use=Use("head", "residual"))
        if config.head_bias:
            head["bias"] = declare.param("vocab", init="zeros", use=Use("bias"))
        self.lm_head = nnx.Dict(head) if head else None

    def hidden(
        self,
        place: Placement,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        remat: Remat = "none",
        kernel: Kernel = "auto",
    ) -> jax.Array:
        """Final hidden states of whole sequences, without a cache.

        Args:
            tokens: int32 [B, T].
            positions: int32 [B, T], counted within each document.
            segments: int32 [B, T]: documents of a row; 0 is padding. Nothing is attended across segments.
            remat: what the backward pass recomputes.

        Returns:
            [B, T, D] in the compute dtype, after the final norm.
        """
        lengths = document_lengths(positions, segments) if self.config.rope.depends_on_length else None
        x, turn = self._enter(place, tokens, positions, lengths)
        visible = Visibility(positions, segments, positions, segments, ordered=True)

        def step(block: Block, x: jax.Array) -> jax.Array:
            return block(place, x, turn, visible, None, kernel)[0]

        if self.stacked:
            graph, stack = nnx.split(self.layers)

            def body(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
                return step(nnx.merge(graph, layer), x), None

            x, _ = jax.lax.scan(_remat(body, remat), x, stack)
        else:
            for block in self.layers:
                x = step(block, x)
        return self.final_norm(place, x)

    def hidden_cached(
        self, place: Placement, tokens: jax.Array, counts: jax.Array, cache: KVCache, kernel: Kernel = "auto"
    ) -> tuple[jax.Array, KVCache]:
        """Final hidden states of the next T tokens of every row, which are added to the cache.

        Args:
            tokens: int32 [B, T], right-padded.
            counts: int32 [B]: how many of the T are real; the row grows by that many. What padding writes
                past it is overwritten by the next call and never visible.
            cache: has room for T more tokens in every row (the caller checks on the host).
        """
        assert not self.stacked, "decoding needs per-layer weights"
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = cache.lengths[:, None] + offset
        x, turn = self._enter(place, tokens, positions)
        slots = jnp.broadcast_to(
            jnp.arange(cache.capacity, dtype=jnp.int32), (tokens.shape[0], cache.capacity)
        )
        visible = Visibility(positions, jnp.ones_like(positions), slots, jnp.ones_like(slots))
        keys, values = [], []
        for block, k, v in zip(self.layers, cache.keys, cache.values, strict=True):
            x, (k, v) = block(place, x, turn, visible, (k, v, cache.lengths), kernel)
            keys.append(k)
            values.append(v)
        grown = replace(cache, keys=tuple(keys), values=tuple(values), lengths=cache.lengths + counts)
        return self.final_norm(place, x), grown

    def head(self, place: Placement) -> Head:
        """The output head: the embedding table where it is tied."""
        own = self.lm_head or {}
        path = "lm_head/kernel" if "kernel" in own else "embed/table"
        weight = own["kernel"] if "kernel" in own else self.embed["table"]
        if "bias" in own:
            return Head.of(place, path, weight[...], "lm_head/bias", own["bias"][...])
        return Head.of(place, path, weight[...])

    def logits(self, place: Placement, hidden: jax.Array) -> jax.Array:
        """float32 [B, T, V padded] from hidden states [B, T, D]; cut over the head's `vocab_axes`."""
        return head_logits(place, self.head(place), hidden)

    def _enter(
        self, place: Placement, tokens: jax.Array, positions: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        table = VocabMatrix.of(place, "embed/table", self.embed["table"][...])
        x = place.activation("residual", look_up(place, table, tokens))
        rope, head_dim = self.config.rope, self.config.head_dim
        return x, rotation(rope, head_dim, positions, place.compute_dtype, lengths)


def _remat(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    # By name: a policy on primitives does not reach into the checkpoint around each product.
    policy = {"dots": policies.save_only_these_names(PRODUCT), "full": policies.nothing_saveable}[remat]
    return jax.checkpoint(
        body, policy=policy, prevent_cse=False
    )  # inside a scan nothing can be merged anyway
