"""`shardwise info`: what a model is made of, from shapes alone, and what its tokenizer does.

Not here: how a mesh cuts it and what that costs (explain.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shardwise.checkpoints.reader import Checkpoint
from shardwise.models.config import ModelConfig, RopeConfig
from shardwise.models.flops import active_parameter_count, forward_flops_per_token, parameter_count
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Decision, Plan

if TYPE_CHECKING:
    from shardwise.cli.info import InfoOptions

_PARTS = ("embeddings", "attention", "feed-forward", "norms", "output head", "other")
_BYTES = {"float32": 4, "bfloat16": 2}


def run(options: InfoOptions) -> int:
    """Print the report; returns the exit code."""
    from shardwise.api import open_model, plan
    from shardwise.families import config_from_hf

    checkpoint = open_model(options.model)
    config = config_from_hf(checkpoint.hf_config)
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    single = plan(config, MeshSpec())
    console.print(f"{options.model} ({checkpoint.format if checkpoint.reader else 'shapes only'})")
    for line in describe(config):
        console.print(f"  {line}", markup=False)
    console.print(parameters(single))
    for line in (*costs(single), *tokenizer_facts(checkpoint)):
        console.print(f"  {line}", markup=False)
    return 0


def describe(config: ModelConfig) -> Iterator[str]:
    """Sizes and options of a model, a line for each subject."""
    kind = "a decoder" if config.causal else "an encoder"
    yield (
        f"{config.family}, {kind}: {config.num_layers} layers, embed {config.embed_dim}, {config.num_heads}"
        f" heads ({config.num_kv_heads} kv) of {config.head_dim}, mlp {config.mlp_dim}, vocab"
        f" {config.vocab_size:,}"
    )
    yield f"context {config.max_position:,} tokens; positions: {_positions(config)}"
    windows = sorted({window for window in config.windows if window})
    if windows:
        local = sum(1 for window in config.windows if window)
        yield f"{local} of {config.num_layers} layers see {' or '.join(map(str, windows))} keys at most"
    if config.num_experts:
        yield f"{config.num_experts} experts a layer, of which a token takes {config.experts_per_token}"
    gate = "gated " if config.gated_mlp else ""
    order = {"pre": "before", "post": "after", "sandwich": "before and after"}[config.norm_order]
    side = "" if config.parallel == "no" else "; attention and mlp side by side"
    where = f"{config.norm} norms {order} each half"
    if config.parallel == "one_norm":
        where = f"one {config.norm} norm before both halves"
    yield f"{gate}{config.activation}; {where}{side}"
    head = "the embedding table" if config.tie_embeddings else "a matrix of its own"
    yield f"output head: {head}{', with a bias' if config.head_bias else ''}"


def _positions(config: ModelConfig) -> str:
    if config.positions != "rotary":
        return {"learned": "a learned table", "alibi": "ALiBi"}[config.positions]
    words = _rope(config.rope, config.head_dim)
    if config.local_rope is not None:
        words += f"; in layers with a window {_rope(config.local_rope, config.head_dim)}"
    return f"rotary, {words}"


def _rope(rope: RopeConfig, head_dim: int) -> str:
    turning = rope.features(head_dim)
    part = f", {turning} of {head_dim} features" if turning != head_dim else ""
    factor = f" ×{rope.factor:g}" if rope.kind != "default" else ""
    return f"theta {rope.theta:g} ({rope.kind}{factor}{part})"


def part_of(d: Decision) -> str:
    """The part of the model that a parameter belongs to."""
    if d.path.startswith(("lm_head/", "head_transform/")):
        return "output head"
    if d.path.startswith("embed/") and "norm" not in d.path:
        return "embeddings"
    if "norm" in d.path.split("/")[-2]:
        return "norms"
    for name, part in (("/attn/", "attention"), ("/mlp/", "feed-forward")):
        if name in d.path:
            return part
    return "other"


def parameters(plan: Plan) -> Table:
    """Parameters by part, and their memory by dtype."""
    table = Table("part", "parameters", "share", *_BYTES, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    total = parameter_count(plan)
    sums = dict.fromkeys(_PARTS, 0)
    for d in plan.decisions:
        sums[part_of(d)] += math.prod(d.true_shape)
    rows = [(part, count) for part, count in sums.items() if count] + [("all", total)]
    for part, count in rows:
        memory = [_size(count * size) for size in _BYTES.values()]
        table.add_row(f"  {part}", f"{count:,}", f"{count / total:.1%}", *memory)
    active = active_parameter_count(plan)
    if active != total:
        memory = [_size(active * size) for size in _BYTES.values()]
        table.add_row("  met by a token", f"{active:,}", f"{active / total:.1%}", *memory)
    return table


def costs(plan: Plan) -> Iterator[str]:
    """FLOPs, cache and training state."""
    config = plan.config
    short, full = (forward_flops_per_token(plan, n) / 1e9 for n in (1, config.max_position))
    yield (
        f"GFLOP a token forward: {short:.4g} in a short text, {full:.4g} on average over a full context"
        " (training: 3×)"
    )
    if config.causal:
        cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        sizes = ", ".join(
            f"{_size(cache * size)} in {dtype} ({_size(cache * size * config.max_position)} a full context)"
            for dtype, size in _BYTES.items()
        )
        yield f"cache a token: {sizes}"
    yield (
        "training with AdamW in float32, before activations:"
        f" {_size(16 * parameter_count(plan))} (parameters, gradients, two moments)"
    )


def tokenizer_facts(checkpoint: Checkpoint) -> Iterator[str]:
    """What the tokenizer puts before and after texts, which ids end one, whether there is a chat template."""
    from shardwise.checkpoints.tokenizer import has_tokenizer, load_tokenizer

    if not has_tokenizer(checkpoint):
        yield "tokenizer: none here"
        return
    tokenizer = load_tokenizer(checkpoint)
    added = _added(tokenizer)
    special = [
        f"{name} {token!r} = {tokenizer.convert_tokens_to_ids(token)}"
        for name, token in (
            ("BOS", tokenizer.bos_token), ("EOS", tokenizer.eos_token), ("PAD", tokenizer.pad_token),
            ("MASK", tokenizer.mask_token),
        )
        if token is not None
    ]  # fmt: skip
    yield f"tokenizer: {len(tokenizer):,} tokens; {', '.join(special) or 'no special tokens'}"
    yield f"  a text gets {added[0] or 'nothing'} in front and {added[1] or 'nothing'} behind"
    ends = (checkpoint.generation_config or {}).get("eos_token_id", tokenizer.eos_token_id)
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if listed:
        names = [f"{tokenizer.convert_ids_to_tokens(end)!r} = {end}" for end in listed]
        yield f"  generation ends at {', '.join(names)}"
    yield f"  chat template: {'yes' if tokenizer.chat_template else 'none'}"


def _added(tokenizer: Any) -> tuple[str, str]:
    """Tokens that the tokenizer puts before and behind a text."""
    with_, without = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
    for start in range(len(with_) - len(without) + 1):
        if with_[start : start + len(without)] == without:
            front, behind = with_[:start], with_[start + len(without) :]
            return tuple(" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (front, behind))  # type: ignore[return-value]
    return "", ""


def _size(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
