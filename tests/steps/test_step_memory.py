"""What a compiled training step keeps in memory on each device. Not here: whole processes (benchmarks)."""

from __future__ import annotations

import math

import jax
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.steps.build import build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

LAYERS = 12
CONFIG = ModelConfig(
    vocab_size=64, embed_dim=128, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=512,
    max_position=64, initializer_range=0.3,
)  # fmt: skip


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_whole_weights_are_not_kept_for_every_layer(compute_dtype: str) -> None:
    plan = plan_model(CONFIG, MeshSpec(1, 8, 1))
    workload = Workload("train", 8, 4, compute_dtype=compute_dtype, optimizer=OptimizerConfig())
    step = build_step(plan, workload, jax.devices()[:8])
    memory = step.lower().compile().memory_analysis()
    layers = sum(4 * math.prod(plan[path].shape) for path in plan.paths if plan[path].stacked)
    a_layer = layers // LAYERS
    # Gradients are one device's eighth. Whole weights and gradients may live for two layers at a time, in
    # each form that they pass through; were they kept for all, the twelve layers' would be here.
    assert memory.temp_size_in_bytes < layers // 8 + 8 * a_layer < layers
