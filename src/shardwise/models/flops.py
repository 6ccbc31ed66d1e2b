"""Floating-point operations of the model, next to the shapes that they follow from.

Not here: what a mesh or a chip makes of them (planner/).
"""

from __future__ import annotations

import math

from shardwise.models.config import ModelConfig
from shardwise.partition.plan import Plan


def parameter_count(plan: Plan) -> int:
    """True parameters, padding left out; a tied head counts once."""
    return sum(math.prod(d.true_shape) for d in plan.decisions)


def matmul_parameters(plan: Plan) -> int:
    """Parameters that every token is multiplied with: all matrices, and the head once (tied or not), but not
    the embedding look-ups, nor a classifier, which reads one token of a sequence."""
    return sum(
        math.prod(d.true_shape)
        for d in plan.decisions
        if d.path == plan.head_path or (d.use.kind == "kernel" and d.use.takes not in ("first", "pooled"))
    )


def forward_flops_per_token(plan: Plan, length: int) -> float:
    """FLOPs of one token's forward pass in sequences of `length` tokens.

    2 per matmul parameter, and for attention 2 · 2 · L · H · E · (T + 1)/2: each of the two products (q·k and
    weights·v) meets on average half the sequence (PaLM, arXiv:2204.02311, appendix B, halved for causality);
    in an encoder all T.
    """
    config: ModelConfig = plan.config
    seen = (length + 1) / 2 if config.causal else length
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
    return 2 * matmul_parameters(plan) + attention


def train_flops_per_token(plan: Plan, length: int) -> float:
    """Three times the forward pass; what rematerialisation repeats is not counted (model FLOPs)."""
    return 3 * forward_flops_per_token(plan, length)
