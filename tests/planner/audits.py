"""Audited steps of a tiny Llama for tests, each compiled once: plan, workload, audit.

Not here: what is expected of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import HeadLayout, Rules
from shardwise.planner.audit import Audit, audit
from shardwise.planner.explain_command import swapped
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Task, Workload

LAYERS, ROWS, LENGTH = 2, 8, 12
LLAMA = ModelConfig(
    vocab_size=104, embed_dim=24, num_layers=LAYERS, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64,
    max_position=64,
)  # fmt: skip
TIED = replace(LLAMA, tie_embeddings=True)
UNEVEN = replace(LLAMA, embed_dim=36, num_heads=9, num_kv_heads=3, vocab_size=101)
REPEATED = replace(LLAMA, num_heads=5, num_kv_heads=1)
BIASED = replace(LLAMA, qkv_bias=True, attention_out_bias=True, mlp_bias=True, head_bias=True)
FSDP, TP, BOTH, ALL = MeshSpec(1, 4, 1), MeshSpec(1, 1, 4), MeshSpec(1, 2, 2), MeshSpec(2, 2, 2)
# a sequence-parallel residual stream, as a rules file may ask for
SEQUENCE = PRESETS["fsdp+tp"].changed(
    activations={"residual": (("dp", "fsdp"), ("tp",), ())}, name="sequence.yaml"
)


@dataclass(frozen=True)
class Case:
    """A step to be audited."""

    task: Task = "train"
    mesh: MeshSpec = BOTH
    config: ModelConfig = LLAMA
    rules: Rules = PRESETS["fsdp+tp"]
    head: HeadLayout | None = None
    swap: str = ""
    more: tuple[tuple[str, Any], ...] = ()
    """Other fields of the workload."""

    @property
    def plan(self) -> Plan:
        made = plan_model(self.config, self.mesh, self.rules, head_layout=self.head)
        return swapped(made, self.swap) if self.swap else made

    @property
    def workload(self) -> Workload:
        made = Workload(
            self.task, ROWS, 1 if self.task == "decode" else LENGTH,
            capacity=16 if self.task in ("prefill", "decode") else 0,
            optimizer=OptimizerConfig() if self.task == "train" else None,
        )  # fmt: skip
        return replace(made, **dict(self.more))

    @property
    def audit(self) -> Audit:
        return _audit(self)

    def __str__(self) -> str:
        names = {LLAMA: "", TIED: "tied", UNEVEN: "uneven", REPEATED: "repeated", BIASED: "biased"}
        words = [
            self.task,
            str(self.mesh),
            names.get(self.config, self.config.family),
            self.head or "",
            self.swap,
        ]
        words += [self.rules.name if self.rules.name != "fsdp+tp" else ""]
        words += [f"{name} {value}" for name, value in self.more]
        return " ".join(filter(None, words))


@lru_cache
def _audit(case: Case) -> Audit:
    return audit(case.plan, case.workload, jax.devices()[: case.mesh.num_devices])


def as_expected(a: Audit) -> list[str]:
    """What is not exactly as predicted, a line each; empty if bytes, runs and FLOPs of each kind are."""
    wrong = [
        f"{'+'.join(row.axes)} {row.op}: {row.predicted} predicted, {row.compiled} compiled"
        for row in a.rows
        if (row.predicted.count, row.predicted.payload) != (row.compiled.count, row.compiled.payload)
    ]
    wrong += [f"unexplained: {c}" for c in a.unexplained] + [f"absent: {c}" for c in a.absent]
    if a.predicted_flops != a.compiled_flops:
        wrong.append(f"FLOPs: {a.predicted_flops} predicted, {a.compiled_flops} compiled")
    return wrong
