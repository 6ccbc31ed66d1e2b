"""The one transformer, decoder or encoder, in Flax NNX: both ends, and the run through the layers.

Shapes: B batch, T query length, S key length, D embed, V vocab, L layers. Not here: a layer (blocks.py),
steps, losses, sampling (steps/), and what a family's files call these tensors (families/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardwise.models.attention import Kernel, Visibility
from shardwise.models.blocks import Around, Block, Turn
from shardwise.models.cache import KVCache
from shardwise.models.classifier import Classifier
from shardwise.models.config import ModelConfig
from shardwise.models.head import Head, head_logits
from shardwise.models.linear import PRODUCT, Declare, Linear
from shardwise.models.mlp import activated
from shardwise.models.norms import Norm
from shardwise.models.positions import document_lengths, rotation
from shardwise.models.vocabulary import VocabMatrix, look_up
from shardwise.partition.constraints import Placement
from shardwise.partition.padding import Padding
from shardwise.partition.plan import Use

Remat = Literal["none", "dots", "full"]
"""What the backward pass recomputes: nothing; all but matrix products; everything within a layer."""

NO_WINDOW = 1 << 30
"""The window of a layer that sees all keys, where others do not."""


class Transformer(nnx.Module):
    """Embedding, L blocks, final norm and head.

    Layers are one stacked block, run by a scan (training), or a list of blocks (decoding, where slicing a
    stack costs more than the layer itself on a CPU).
    """

    def __init__(self, config: ModelConfig, padding: Padding, stacked: bool):
        declare = Declare(padding)
        self.config, self.stacked = config, stacked
        self.embed = nnx.Dict(_embeddings(declare.below("embed"), config))
        self.project_in = self._projection(declare, "project_in")
        if stacked:
            self.layers = Block(declare.below("layers", stacked=True), config)
        else:
            # every block asks the Plan under the stacked path: one decision holds for all layers
            self.layers = nnx.List([Block(declare.below("layers"), config) for _ in range(config.num_layers)])
        self.final_norm = Norm(declare.below("final_norm"), config) if config.final_norm else None
        self.project_out = self._projection(declare, "project_out")
        transform, head = config.head_transform and config.head == "vocab", _head(declare, config)
        self.head_transform = HeadTransform(declare.below("head_transform"), config) if transform else None
        self.lm_head = nnx.Dict(head) if head else None
        self.classifier = Classifier(declare.below("classifier")) if config.head == "labels" else None

    def _projection(self, declare: Declare, name: Literal["project_in", "project_out"]) -> Linear | None:
        """Between the embedding table's width and D, where they differ."""
        if self.config.word_axis == "embed":
            return None
        # The outputs are vectors, so that `fsdp` has one dim to cut.
        if name == "project_in":
            return Linear(declare.below(name), ("word_embed",), ("vector",), False, "words", "residual")
        return Linear(declare.below(name), ("embed",), ("word_vector",), False, "residual", "words")

    def hidden(
        self,
        place: Placement,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        remat: Remat = "none",
        kernel: Kernel = "auto",
        transform: bool = True,
    ) -> jax.Array:
        """Final hidden states of whole sequences, without a cache.

        Args:
            tokens: int32 [B, T].
            positions: int32 [B, T], counted within each document.
            segments: int32 [B, T]: documents of a row; 0 is padding. Nothing is attended across segments.
            remat: what the backward pass recomputes.
            transform: whether they go through the head's own layer where it has one, as the head takes them.

        Returns:
            [B, T, D] in the compute dtype, after the final norm.
        """
        x = self._enter(place, tokens, positions)
        visible = Visibility(
            positions, segments, positions, segments, ordered=True, causal=self.config.causal
        )
        depends = any(rope.depends_on_length for rope in self.config.ropes)
        lengths = document_lengths(positions, segments) if depends else None
        around = self._around(place, positions, visible, kernel, lengths)

        def step(block: Block, x: jax.Array, kind: Kind) -> jax.Array:
            return block(place, x, around(kind), None)[0]

        if self.stacked:
            graph, stack = nnx.split(self.layers)

            def body(x: jax.Array, layer: tuple[nnx.State, Kind]) -> tuple[jax.Array, None]:
                return step(nnx.merge(graph, layer[0]), x, layer[1]), None

            x, _ = jax.lax.scan(_remat(body, remat), x, (stack, _kinds(self.config)))
        else:
            for i, block in enumerate(self.layers):
                x = step(block, x, jax.tree.map(lambda of_layers, i=i: of_layers[i], _kinds(self.config)))
        return self._leave(place, x, transform)

    def hidden_cached(
        self, place: Placement, tokens: jax.Array, counts: jax.Array, cache: KVCache, kernel: Kernel = "auto"
    ) -> tuple[jax.Array, KVCache]:
        """Final hidden states of the next T tokens of every row, which are added to the cache.

        Args:
            tokens: int32 [B, T], right-padded.
            counts: int32 [B]: how many of the T are real; the row grows by that many. What padding writes
                past it is overwritten by the next call and never visible.
            cache: has room for T more tokens in every row, and none of them outgrows it (cache.outgrown; the
                caller checks both on the host).
        """
        assert not self.stacked, "decoding needs per-layer weights"
        assert self.config.causal, "an encoder has no next token"
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = cache.lengths[:, None] + offset
        x = self._enter(place, tokens, positions)
        slots = jnp.broadcast_to(
            jnp.arange(cache.capacity, dtype=jnp.int32), (tokens.shape[0], cache.capacity)
        )
        visible = Visibility(positions, jnp.ones_like(positions), slots, jnp.ones_like(slots))
        turned_at_use = any(rope.changes_always for rope in self.config.ropes)
        lengths = (cache.lengths + counts)[:, None]
        around = self._around(place, positions, visible, kernel, lengths, slots if turned_at_use else None)
        keys, values = [], []
        for i, (block, k, v) in enumerate(zip(self.layers, cache.keys, cache.values, strict=True)):
            kind = jax.tree.map(lambda of_layers, i=i: of_layers[i], _kinds(self.config))
            x, (k, v) = block(place, x, around(kind), (k, v, cache.lengths))
            keys.append(k)
            values.append(v)
        grown = replace(cache, keys=tuple(keys), values=tuple(values), lengths=cache.lengths + counts)
        return self._leave(place, x), grown

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

    def label_logits(self, place: Placement, hidden: jax.Array) -> jax.Array:
        """float32 (or wider) [B, 1, labels] from hidden states [B, T, D]; see Classifier."""
        assert self.classifier is not None, "no classifier"
        return self.classifier(place, hidden)

    def _enter(self, place: Placement, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """The residual stream before the first layer [B, T, D]."""
        config, embed = self.config, self.embed
        table = VocabMatrix.of(place, "embed/table", embed["table"][...])
        x = look_up(place, table, tokens, place.plan["embed/table"].true_shape[1])
        if config.embed_scale != 1:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
        if self.project_in is not None:
            x = self.project_in(place, place.activation("words", x))
        if config.positions == "learned":
            table = VocabMatrix.of(place, "embed/positions", embed["positions"][...])
            x = x + look_up(place, table, positions + config.position_offset, config.embed_dim)
        if config.token_types:
            x = x + place.weight("embed/token_types", embed["token_types"][...])[0]
        x = place.activation("residual", x)
        return x if not config.embed_norm else place.activation("residual", embed["norm"](place, x))

    def _leave(self, place: Placement, x: jax.Array, transform: bool = True) -> jax.Array:
        """What the head takes, from the residual stream after the last layer; see `hidden`."""
        # What a norm gives is held, so that its bias's gradient is summed as its scale's is: each device sums
        # its own part.
        if self.final_norm is not None:
            x = place.activation("residual", self.final_norm(place, x))
        if self.project_out is not None:
            x = self.project_out(place, x)
        if self.head_transform is not None and transform:
            x = place.activation("residual", self.head_transform(place, x))
        return x

    def _around(
        self, place: Placement, positions: jax.Array, visible: Visibility, kernel: Kernel,
        lengths: jax.Array | None, slots: jax.Array | None = None,
    ) -> Callable[[Kind], Around]:  # fmt: skip
        """For each kind of layer what it needs beside its input; what layers share is made once.

        Args:
            lengths: int32 [B, T] or [B, 1], of each token's document; see `rotation`.
            slots: int32 [B, S]: positions of cached keys that are turned at use; None where none are.
        """
        config = self.config

        def turns(positions: jax.Array) -> list[Turn]:
            """By each of the config's rotary embeddings."""
            return [
                rotation(rope, config.head_dim, positions, place.compute_dtype, lengths)
                for rope in config.ropes
            ]

        new, cached = turns(positions), turns(slots) if slots is not None else []

        def of_kind(turns: list[Turn], kind: Kind) -> Turn | None:
            if len(turns) < 2 or kind.window is None:
                return turns[0] if turns else None
            return jax.tree.map(partial(jnp.where, kind.window < NO_WINDOW), turns[1], turns[0])

        def around(kind: Kind) -> Around:
            seen = visible if kind.window is None else replace(visible, window=kind.window)
            return Around(seen, of_kind(new, kind), kernel, of_kind(cached, kind))

        return around


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kind:
    """In what layers may differ: numbers, or for all layers arrays [L]."""

    window: jax.Array | np.ndarray | None = None
    """int32: the layer's window; None where no layer has one."""


def _kinds(config: ModelConfig) -> Kind:
    """That of all layers."""
    if not any(config.windows):
        return Kind()
    return Kind(np.array([window or NO_WINDOW for window in config.windows], np.int32))


class HeadTransform(nnx.Module):
    """norm(gelu(dense(x))): what RoBERTa's masked-LM head does before its matrix."""

    def __init__(self, declare: Declare, config: ModelConfig):
        # Not cut over tp: the norm behind it wants all of D, and the product is small beside the head's.
        self.dense = Linear(declare.below("dense"), ("embed",), ("vector",), True, "residual", "residual")
        self.norm = Norm(declare.below("norm"), config)

    def __call__(self, place: Placement, x: jax.Array) -> jax.Array:
        return self.norm(place, activated("gelu", self.dense(place, x)))


def _head(declare: Declare, config: ModelConfig) -> dict[str, Any]:
    """What a head over the vocabulary has of its own."""
    found: dict[str, Any] = {}
    if config.head_path == "lm_head/kernel":
        found["kernel"] = declare.param("vocab", config.word_axis, use=Use("head", "residual"))
    if config.head_path is not None and config.head_bias:
        found["bias"] = declare.param("vocab", init="zeros", use=Use("bias"))
    return found


def _embeddings(declare: Declare, config: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "table": declare.param("vocab", config.word_axis, use=Use("embedding", "", "residual"))
    }
    if config.positions == "learned":
        found["positions"] = declare.param("positions", "embed", use=Use("positions", "", "residual"))
    if config.token_types:
        found["token_types"] = declare.param("token_types", "vector", use=Use("bias", gives="residual"))
    if config.embed_norm:
        found["norm"] = Norm(declare.below("norm"), config)
    return found


def _remat(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return body
    policies = jax.checkpoint_policies
    # By name: a policy on primitives does not reach into the checkpoint around each product.
    policy = {"dots": policies.save_only_these_names(PRODUCT), "full": policies.nothing_saveable}[remat]
    return jax.checkpoint(
        body, policy=policy, prevent_cse=False
    )  # inside a scan nothing can be merged anyway
