"""Memory of one device by class, from shapes alone: parameters, gradients, optimizer, activations, cache.

Parameters, gradients, optimizer and cache are exact. Activations are an estimate, after the sizes that
models/transformer.py saves for the backward pass. Not here: what a compiler adds for its own buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.models.attention import query_block
from shardwise.partition.padding import round_up
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
    """Kept for the backward pass, or the widest part of a forward pass; an estimate."""
    kv_cache: int
    """Keys and values (prefill, decode)."""

    @property
    def total(self) -> int:
        """All classes."""
        return self.params + self.grads + self.optimizer + self.activations + self.kv_cache


LANES = 128
"""A TPU keeps arrays in tiles of so many elements in the last dim: narrower ones take as much."""


def memory(plan: Plan, workload: Workload, lanes: int = 1) -> Memory:
    """Memory by class for one step.

    Args:
        lanes: elements to which the last dim of activations is rounded up: LANES on a TPU.
    """
    ledger = Ledger(plan, workload)
    plan = ledger.plan
    held = parameter_bytes(plan, workload.param_dtype)
    trains = workload.task == "train"
    cache = 0
    if workload.task in ("prefill", "decode"):
        config, heads = plan.config, plan.padding.heads
        shape = (ledger.rows * plan.batch_multiple(), workload.capacity, heads.slots, config.head_dim)
        elements = ledger.local(shape, plan.activation("kv_cache"))
        cache = 2 * config.num_layers * elements * itemsize(workload.compute_dtype)
    return Memory(
        held, held if trains else 0, 2 * held if trains else 0, activation_bytes(ledger, lanes), cache
    )  # fmt: skip


def parameter_bytes(plan: Plan, dtype: str) -> int:
    """Stored parameters on one device."""
    return sum(
        math.prod(size // plan.mesh.size(axes) for size, axes in zip(d.shape, d.spec, strict=True))
        for d in plan.decisions
    ) * itemsize(dtype)


def activation_bytes(ledger: Ledger, lanes: int = 1) -> int:
    """What one micro-batch takes on one device beside parameters, gradients and optimizer; an estimate.

    Training keeps some of every layer (kept_bytes) until the backward pass comes by. To that is added what is
    at hand at one time, which is the larger of two: in a layer what it makes again, the gradients that flow
    through it, its gathered weights and their gradients; at the loss the head as it is used, its gradient in
    float32 and that cast, and a chunk of logits with its gradient. Which arrays share memory is the
    compiler's choice. A step without a backward pass has one half of a layer at a time, or the logits.
    """
    plan, workload = ledger.plan, ledger.workload
    part, size = _parts(ledger, lanes), itemsize(ledger.compute)
    logits = _logits(ledger)
    weights = max_layer_weights(ledger) * size
    if not ledger.trains:
        queries = part["query"] + part["key"] + part["value"] + part["attention_out"]
        half_layers = (queries + _scores(ledger), 3 * part["mlp_hidden"])
        return max((2 * part["residual"] + max(half_layers)) * size + weights, logits)
    kept, whole = kept_bytes(ledger, workload.remat, lanes), kept_bytes(ledger, "none", lanes)
    flowing = (2 * part["residual"] + 3 * part["mlp_hidden"]) * size
    in_a_layer = (whole - kept) + flowing + 2 * weights
    at_the_loss = 2 * logits + _head_bytes(ledger)
    return plan.config.num_layers * kept + max(in_a_layer, at_the_loss)


def _head_bytes(ledger: Ledger) -> int:
    """The head's weight as it is made for use, if it is, its gradient's sum and that in the compute dtype."""
    plan = ledger.plan
    if plan.head_path is None:
        return 0
    head, size = plan[plan.head_path], itemsize(ledger.compute)
    used = ledger.local(head.use_shape, head.at_use())
    made = ledger.workload.param_dtype != ledger.compute or ledger.local(head.shape, head.spec) < used
    return used * (itemsize(ledger.wide) + size + made * size)


def _logits(ledger: Ledger) -> int:
    """Bytes of the logits that one device holds at once."""
    plan, workload = ledger.plan, ledger.workload
    if workload.task == "hidden" or plan.head_path is None:
        labels = len(plan.config.labels) if workload.task != "hidden" else 0
        return ledger.rows * labels * itemsize(ledger.wide)
    head = plan[plan.head_path]
    vocab = head.use_shape[0] // plan.mesh.size(head.at_use()[0])
    positions = workload.length if workload.task in ("train", "score", "logits") else 1
    logits = ledger.rows * positions * vocab * itemsize(ledger.wide)
    return min(logits, CHUNK_BYTES) if workload.task in ("train", "score") else logits


def kept_bytes(ledger: Ledger, remat: str, lanes: int = 1) -> int:
    """What one layer keeps for the backward pass, exactly, with XLA's attention (a fused kernel keeps less).

    `none`: around each norm what goes in, comes out, and that scaled; q, k, v as attention's blocks of
    queries take them, each block with the keys before it (of a single block the scores twice over, but
    for several they are made again); its result; gate, up and their product. `dots`: what enters, and the
    products but the last. `full`: what enters.
    """
    part, size, wide = _parts(ledger, lanes), itemsize(ledger.compute), itemsize(ledger.wide)
    keys, length = part["key"] + part["value"], ledger.workload.length
    block = query_block(length)
    if remat == "full":
        return part["residual"] * size
    if remat == "dots":
        again = part["key"] if block < length else 0
        products = part["query"] + keys + part["residual"] + 2 * part["mlp_hidden"]
        return (part["residual"] + products + again) * size
    scores = 0
    if block == length:
        rows_and_heads = _scores(ledger) // length
        scores = _scores(ledger) * (size + wide) + 2 * rows_and_heads * wide
    elif ledger.plan.config.causal:
        keys = keys * sum(min(start + block, length) for start in range(0, length, block)) // length
    scales = 2 * ledger.plan.config.embed_dim
    others = 6 * part["residual"] + part["query"] + part["attention_out"] + 3 * part["mlp_hidden"] + scales
    return (others + keys) * size + scores


def _parts(ledger: Ledger, lanes: int) -> dict[str, int]:
    """Elements of each named activation on one device, its last dim filled up to a multiple of `lanes`."""
    parts = {}
    for name in ("residual", "query", "key", "value", "attention_out", "mlp_hidden"):
        shape, spec = ledger.shape(name), ledger.plan.activation(name)
        last = shape[-1] // ledger.plan.mesh.size(spec[-1])
        parts[name] = ledger.local(shape, spec) // last * round_up(last, lanes)
    parts["mlp_hidden"] *= max(1, ledger.plan.config.experts_per_token)
    return parts


def _scores(ledger: Ledger) -> int:
    """Elements of one block's attention scores on one device."""
    workload, length = ledger.workload, ledger.workload.length
    reach = workload.capacity if workload.task in ("prefill", "decode") else length
    elements = ledger.local(ledger.shape("query"), ledger.plan.activation("query"))
    rows_and_heads = elements // ledger.plan.config.head_dim // length
    return rows_and_heads * query_block(length) * reach


def max_layer_weights(ledger: Ledger) -> int:
    """Elements of one layer's kernels as they are made for use on one device: gathered or cast."""
    cast = ledger.workload.param_dtype != ledger.compute
    kernels = [d for d in ledger.plan.decisions if d.use.kind in ("kernel", "expert") and d.stacked]
    made = [d for d in kernels if cast or ledger.local(d.shape, d.spec) < ledger.local(d.shape, d.at_use())]
    return sum(ledger.local(d.use_shape[d.stacked :], d.at_use()[d.stacked :]) for d in made)
