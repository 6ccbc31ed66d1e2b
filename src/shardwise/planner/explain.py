"""Everything that can be said of a plan and a workload before anything runs, as one value and as JSON.

Not here: how it is printed (explain_view.py) and what the compiler says (audit.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.models.flops import parameter_count
from shardwise.partition.plan import Decision, Plan
from shardwise.partition.rules import Spec
from shardwise.planner.collectives import Collective, totals
from shardwise.planner.memory import Memory, memory
from shardwise.planner.predict import Flops, Ledger, itemsize, not_modelled, predict
from shardwise.planner.reasons import reason
from shardwise.steps.workload import Workload


@dataclass(frozen=True)
class TensorReport:
    """One parameter."""

    decision: Decision
    dtype: str
    bytes: int
    """Of all devices' parts together, each part counted once, with padding; all layers."""
    bytes_per_device: int
    collectives: tuple[Collective, ...]
    """What its cut causes in one step."""
    flops: int
    """Of its products on one device in one step."""
    reason: str


@dataclass(frozen=True)
class ActivationReport:
    """One named activation."""

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    """Of one micro-batch, with padding."""
    spec: Spec
    dtype: str
    bytes_per_device: int
    decided_by: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """A plan, explained for one workload."""

    plan: Plan
    workload: Workload
    tensors: tuple[TensorReport, ...]
    activations: tuple[ActivationReport, ...]
    others: tuple[Collective, ...]
    """Collectives that no parameter causes."""
    flops: tuple[Flops, ...]
    memory: Memory

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All of one step."""
        return tuple(c for t in self.tensors for c in t.collectives) + self.others

    @property
    def total_flops(self) -> int:
        """Of matrix products on one device in one step."""
        return sum(f.amount for f in self.flops)

    @property
    def padding_share(self) -> float:
        """Stored elements beyond the true ones, over the true ones."""
        stored = sum(math.prod(t.decision.shape) for t in self.tensors)
        return stored / parameter_count(self.plan) - 1

    def to_json(self, model: str) -> dict[str, Any]:
        """With the keys model, mesh, workload, tensors, activations, totals, memory, fallbacks; see
        docs/partitioning.md."""
        mesh = self.plan.mesh
        workload = asdict(self.workload)
        return {
            "model": {"name": model, **asdict(self.plan.config)},
            "mesh": {**mesh.sizes, "devices": mesh.num_devices},
            "workload": workload,
            "tensors": [_tensor_json(t, self.plan) for t in self.tensors],
            "activations": [
                {
                    "name": a.name,
                    "axes": list(a.axes),
                    "shape": list(a.shape),
                    "dtype": a.dtype,
                    "spec": [list(axes) for axes in a.spec],
                    "bytes_per_device": a.bytes_per_device,
                    "decided_by": a.decided_by,
                    "notes": list(a.notes),
                }
                for a in self.activations
            ],
            "totals": {
                "parameters": parameter_count(self.plan),
                "padding_share": self.padding_share,
                "flops_per_device": self.total_flops,
                "attention_flops_per_device": sum(f.amount for f in self.flops if f.cause == "attention"),
                "head_layout": self.plan.head_layout,
                "rules": self.plan.rules.name,
                "not_predicted": list(not_modelled(self.plan)),
                "collectives": [
                    {"axes": list(axes), "op": op, **asdict(total)}
                    for (axes, op), total in totals(self.collectives, mesh).items()
                ],
                "of_no_tensor": [_collective_json(c, self.plan) for c in self.others],
            },
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "fallbacks": list(self.plan.fallbacks),
        }


def explain(plan: Plan, workload: Workload) -> Explanation:
    """Explain a plan for a workload; needs neither weights nor devices.

    Raises:
        ConfigError: sizes of the workload that do not fit the plan's mesh.
    """
    ledger = predict(plan, workload)
    plan = ledger.plan
    tensors = tuple(_tensor(ledger, d) for d in plan.decisions)
    owned = {id(c) for t in tensors for c in t.collectives}
    others = tuple(c for c in ledger.collectives if id(c) not in owned)
    return Explanation(
        plan, workload, tensors, tuple(_activations(ledger)), others, tuple(ledger.flops),
        memory(plan, workload),
    )  # fmt: skip


def _tensor(ledger: Ledger, d: Decision) -> TensorReport:
    dtype = ledger.workload.param_dtype
    local = ledger.local(d.shape, d.spec)
    mine = {d.path, f"{d.path} as head"}
    return TensorReport(
        d,
        dtype,
        math.prod(d.shape) * itemsize(dtype),
        local * itemsize(dtype),
        tuple(c for c in ledger.collectives if c.cause in mine),
        sum(f.amount for f in ledger.flops if f.cause in mine),
        reason(ledger.plan, d),
    )


def _activations(ledger: Ledger) -> Iterable[ActivationReport]:
    plan, workload = ledger.plan, ledger.workload
    for a in plan.activations:
        if a.name == "kv_cache" and workload.task not in ("prefill", "decode"):
            continue
        shape = ledger.shape(a.name)
        if a.name == "kv_cache":
            shape = (shape[0], workload.capacity, *shape[2:])
        dtype = "int32" if a.name == "tokens" else workload.compute_dtype
        size = ledger.local(shape, a.spec) * itemsize(dtype)
        yield ActivationReport(a.name, a.axes, shape, a.spec, dtype, size, a.decided_by, a.notes)
    if plan.head_path is not None:
        yield _logits(ledger, plan[plan.head_path])


def _logits(ledger: Ledger, head: Decision) -> ActivationReport:
    """Logits as the head makes them; in training and scoring those of a chunk of positions."""
    plan, workload = ledger.plan, ledger.workload
    spec = (plan.batch_axes(), (), head.at_use()[0])
    length = workload.length if workload.task in ("train", "score", "logits") else 1
    notes: tuple[str, ...] = ()
    if workload.task in ("train", "score"):
        here = head.use_shape[0] // plan.mesh.size(spec[2])
        length, _ = ledger.chunks(here)
        notes = (f"a chunk of {length} of {workload.length} positions at a time",)
    shape = (ledger.rows * plan.batch_multiple(), length, head.use_shape[0])
    size = ledger.local(shape, spec) * itemsize(ledger.wide)
    by = f"head layout {plan.head_layout}"
    return ActivationReport("logits", ("batch", "length", "vocab"), shape, spec, ledger.wide, size, by, notes)


def _tensor_json(t: TensorReport, plan: Plan) -> dict[str, Any]:
    d = t.decision
    return {
        "path": d.path,
        "axes": list(d.axes),
        "true_shape": list(d.true_shape),
        "shape": list(d.shape),
        "dtype": t.dtype,
        "spec": [list(axes) for axes in d.spec],
        "decided_by": d.decided_by,
        "bytes": t.bytes,
        "bytes_per_device": t.bytes_per_device,
        "flops_per_device": t.flops,
        "collectives": [_collective_json(c, plan) for c in t.collectives],
        "reason": t.reason,
        "notes": list(d.notes),
    }


def _collective_json(c: Collective, plan: Plan) -> dict[str, Any]:
    return asdict(c) | {"axes": list(c.axes), "moved": c.moved(plan.mesh)}
