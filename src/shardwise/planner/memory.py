"""Memory of one device by class, from shapes alone: parameters, gradients, optimizer, activations, cache.

Parameters, optimizer and cache are exact. Activations are an estimate of what the backward pass keeps, after
the sizes that models/transformer.py saves. Not here: what a compiler adds for its own buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.partition.plan import Plan
from shardwise.planner.predict import Ledger, itemsize
from shardwise.steps.loss import CHUNK_BYTES
from shardwise.steps.workload import Workload


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    params: int
    """Parameters as held."""
    grads: int
    """Gradients, in the parameters' dtype (training)."""
    optimizer: int
    """AdamW's two moments, in the parameters' dtype (training)."""
    activations: int
    """Kept for the backward pass, or the widest layer of a forward pass; an estimate."""
    kv_cache: int
    """Keys and values (prefill, decode)."""

    @property
    def total(self) -> int:
        """All classes."""
        return self.params + self.grads + self.optimizer + self.activations + self.kv_cache


def memory(plan: Plan, workload: Workload) -> Memory:
    """Memory by class for one step."""
    ledger = Ledger(plan, workload)
    held = parameter_bytes(plan, workload.param_dtype)
    trains = workload.task == "train"
    cache = 0
    if workload.task in ("prefill", "decode"):
        config, heads = plan.config, plan.padding.heads
        shape = (ledger.rows * plan.batch_multiple(), workload.capacity, heads.slots, config.head_dim)
        elements = ledger.local(shape, plan.activation("kv_cache"))
        cache = 2 * config.num_layers * elements * itemsize(workload.compute_dtype)
    return Memory(
        held, held if trains else 0, 2 * held if trains else 0, activation_bytes(ledger), cache
    )  # fmt: skip


def parameter_bytes(plan: Plan, dtype: str) -> int:
    """Stored parameters on one device."""
    return sum(
        math.prod(size // plan.mesh.size(axes) for size, axes in zip(d.shape, d.spec, strict=True))
        for d in plan.decisions
    ) * itemsize(dtype)


def activation_bytes(ledger: Ledger) -> int:
    """What one micro-batch keeps on one device, in the compute dtype.

    A layer without remat keeps, each once: the residual before each norm and the normed operand (4 D a
    token), q, k, v and the attention's result, gate and up and their product; `dots` keeps the residual and
    the products; `full` the residual that enters the layer. The softmax is made again. One layer's gathered
    weights and a chunk of logits come on top. A step without a backward pass has one layer's at a time.
    """
    plan, workload = ledger.plan, ledger.workload
    size = itemsize(ledger.compute)
    part = {
        name: ledger.local(ledger.shape(name), plan.activation(name))
        for name in ("residual", "query", "key", "value", "attention_out", "mlp_hidden")
    }
    attention = part["query"] + part["key"] + part["value"]
    everything = 4 * part["residual"] + attention + part["attention_out"] + 3 * part["mlp_hidden"]
    kept = {
        "none": everything,
        "dots": 3 * part["residual"] + attention + 2 * part["mlp_hidden"],
        "full": part["residual"],
    }[workload.remat]
    weights = max_layer_weights(ledger)
    layers = plan.config.num_layers if ledger.trains else 1
    rows = ledger.rows * (workload.length if workload.task in ("train", "score", "logits") else 1)
    vocab = plan[plan.head_path].use_shape[0]
    vocab //= plan.mesh.size(plan[plan.head_path].at_use()[0])
    logits = rows * vocab * itemsize(ledger.wide)
    if workload.task in ("train", "score"):
        logits = min(logits, CHUNK_BYTES)
    one_layer = everything if workload.remat == "full" and ledger.trains else 0
    return (kept * layers + one_layer + weights) * size + logits


def max_layer_weights(ledger: Ledger) -> int:
    """Elements of one layer's kernels as gathered for use on one device."""
    kernels = [d for d in ledger.plan.decisions if d.use.kind == "kernel"]
    return sum(ledger.local(d.use_shape[d.stacked :], d.at_use()[d.stacked :]) for d in kernels)
