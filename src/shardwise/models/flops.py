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


def active_parameter_count(plan: Plan) -> int:
    """True parameters that one token meets: of the experts those that it takes."""
    config = plan.config
    left_out = sum(
        math.prod(d.true_shape) * (config.num_experts - config.experts_per_token) // config.num_experts
        for d in plan.decisions
        if d.use.kind == "expert"
    )
    return parameter_count(plan) - left_out


def matmul_parameters(plan: Plan) -> int:
    """Parameters that every token is multiplied with: all kernels, of experts those that it takes, and the
    head once (tied or not), but not what is looked up, nor a classifier, which reads one token."""
    config, total = plan.config, 0
    for d in plan.decisions:
        size = math.prod(d.true_shape)
        if d.path == plan.head_path or (d.use.kind == "kernel" and d.use.takes not in ("first", "pooled")):
            total += size
        elif d.use.kind == "expert":
            total += size * config.experts_per_token // config.num_experts
    return total


def keys_seen(config: ModelConfig, length: int) -> float:
    """Keys that a query of a sequence of `length` tokens meets on average, summed over all layers."""
    if not config.causal:
        return float(config.num_layers * length)
    total = 0.0
    for window in config.windows or (0,) * config.num_layers:
        reach = min(window or length, length)
        total += (reach * (reach + 1) / 2 + (length - reach) * reach) / length
    return total


def forward_flops_per_token(plan: Plan, length: int) -> float:
    """FLOPs of one token's forward pass in sequences of `length` tokens.

    2 per matmul parameter, and for attention 2 · 2 · H · E for each key that a query sees: in causal layers
    (T + 1)/2 on average, less under a window (PaLM, arXiv:2204.02311, appendix B, of seen keys alone).
    """
    config = plan.config
    attention = 4 * config.num_heads * config.head_dim * keys_seen(config, length)
    return 2 * matmul_parameters(plan) + attention


def train_flops_per_token(plan: Plan, length: int) -> float:
    """Three times the forward pass; what rematerialisation repeats is not counted (model FLOPs)."""
    return 3 * forward_flops_per_token(plan, length)
