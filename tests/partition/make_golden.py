"""Golden plans: how real models are cut on real meshes, a line a tensor, kept under version control.

`python -m tests.partition.make_golden` writes them anew; read what git then shows as changed, since every
checkpoint, step and prediction follows it. Not here: the comparison (test_golden.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.families import config_from_hf
from shardwise.families.presets import PRESETS as MODELS
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Decision, Plan
from shardwise.partition.presets import load_rules
from shardwise.partition.rules import HeadLayout, Rules, spec_text

FOLDER = Path(__file__).parent / "golden"

# file → model, mesh, rules, head layout
CASES: dict[str, tuple[str, str, str, HeadLayout | None]] = {
    "smollm2-135m_fsdp2_tp2": ("smollm2-135m", "fsdp:2,tp:2", "fsdp+tp", None),
    "smollm2-135m_tp4": ("smollm2-135m", "tp:4", "fsdp+tp", None),
    "smollm2-135m_tp4_hidden": ("smollm2-135m", "tp:4", "fsdp+tp", "hidden"),
    "smollm2-135m_fsdp2_tp2_easylm": ("smollm2-135m", "fsdp:2,tp:2", "easylm", None),
    "llama3-8b_fsdp8_tp4": ("llama3-8b", "fsdp:8,tp:4", "fsdp+tp", None),
    "llama3-70b_fsdp64_tp8": ("llama3-70b", "fsdp:64,tp:8", "fsdp+tp", None),
}


def golden(name: str, rules: Rules | None = None) -> dict[str, Any]:
    """The compact form of a case's plan, by the case's rules or by others."""
    model, mesh, preset, head_layout = CASES[name]
    config = config_from_hf(MODELS[model])
    plan = plan_model(config, MeshSpec.parse(mesh), rules or load_rules(preset), head_layout=head_layout)
    return {"model": model, **compact(plan)}


def compact(plan: Plan) -> dict[str, Any]:
    """A plan as text, one entry for each tensor, activation, policy and fallback."""
    return {
        "mesh": str(plan.mesh),
        "rules": plan.rules.name,
        "head_layout": plan.head_layout,
        "policy": dict(plan.rules.policy),
        "parameters": {d.path: _line(d) for d in plan.decisions},
        "activations": {a.name: f"{spec_text(a.spec)}  by {a.decided_by}" for a in plan.activations},
        "fallbacks": list(plan.fallbacks),
    }


def text(content: dict[str, Any]) -> str:
    """As it stands in the file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _line(d: Decision) -> str:
    """Spec, true shape, stored shape where it is another, and who decided."""
    shape = "×".join(map(str, d.true_shape))
    if d.shape != d.true_shape:
        shape += " as " + "×".join(map(str, d.shape))
    return f"{spec_text(d.spec)}  {shape}  by {d.decided_by}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name in CASES:
        (FOLDER / f"{name}.json").write_text(text(golden(name)), encoding="utf-8")
