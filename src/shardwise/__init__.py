"""shardwise: plan, pre-train, fine-tune, evaluate and serve large language models on any device mesh.

The names below are the public API; they are imported on first use, so that `import shardwise` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardwise.api import Model, load, open_model, plan
    from shardwise.planner.audit import audit
    from shardwise.planner.explain import explain
    from shardwise.serving.generate import generate
    from shardwise.steps.build import build_step
    from shardwise.steps.optimizer import OptimizerConfig
    from shardwise.steps.workload import Workload

_HOMES = {
    "Model": "shardwise.api",
    "load": "shardwise.api",
    "open_model": "shardwise.api",
    "plan": "shardwise.api",
    "explain": "shardwise.planner.explain",
    "audit": "shardwise.planner.audit",
    "generate": "shardwise.serving.generate",
    "build_step": "shardwise.steps.build",
    "OptimizerConfig": "shardwise.steps.optimizer",
    "Workload": "shardwise.steps.workload",
}

__all__ = [
    "Model",
    "OptimizerConfig",
    "Workload",
    "audit",
    "build_step",
    "explain",
    "generate",
    "load",
    "open_model",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
