"""`shardwise info`: what a model is made of, from shapes alone.

Not here: how a mesh cuts it and what that costs (explain.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.models.config import ModelConfig
from shardwise.models.flops import forward_flops_per_token, parameter_count
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan

if TYPE_CHECKING:
    from shardwise.cli.info import InfoOptions


def run(options: InfoOptions) -> int:
    """Print the report; returns the exit code."""
    from shardwise.api import open_model, plan
    from shardwise.families import config_from_hf

    checkpoint = open_model(options.model)
    config = config_from_hf(checkpoint.hf_config)
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    single = plan(config, MeshSpec())
    console.print(f"{options.model} ({checkpoint.format if checkpoint.reader else 'shapes only'})")
    for line in describe(config, single):
        console.print(f"  {line}")
    return 0


def describe(config: ModelConfig, plan: Plan) -> list[str]:
    """A few lines on a model: sizes, parameters, FLOPs and cache per token, memory by dtype."""
    count = parameter_count(plan)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    rope = (
        config.rope.kind if config.rope.kind == "default" else f"{config.rope.kind} ×{config.rope.factor:g}"
    )
    return [
        f"{config.family}: {config.num_layers} layers, embed {config.embed_dim}, {config.num_heads} heads"
        f" ({config.num_kv_heads} kv) of {config.head_dim}, mlp {config.mlp_dim}, vocab {config.vocab_size:,}"
        f"{' (tied head)' if config.tie_embeddings else ''}",
        f"context {config.max_position:,} tokens, rotary theta {config.rope.theta:g} ({rope})",
        f"{count:,} parameters: {count * 4 / 2**30:.2f} GiB in float32,"
        f" {count * 2 / 2**30:.2f} GiB in bfloat16",
        f"{forward_flops_per_token(plan, 1) / 1e9:.3g} GFLOP a token forward (short context),"
        f" {cache * 2 / 2**10:.3g} KiB of cache a token in bfloat16",
    ]
