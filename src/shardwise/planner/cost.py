"""How long a step takes on a machine, predicted from the Plan and the workload; nothing is run.

Products, attention, traffic to memory, the optimizer and the messages of each mesh axis, from the same ledger
that `explain` shows; one formula a function, with its source. Not here: what moves and is computed
(predict.py), memory's size (memory.py), the machine (hardware.py, hosting.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.models.flops import forward_flops_per_token, matmul_parameters, train_flops_per_token
from shardwise.partition.plan import Plan
from shardwise.planner.collectives import Collective
from shardwise.planner.efficiency import Work, efficiency
from shardwise.planner.hosting import Hosting
from shardwise.planner.memory import parameter_bytes
from shardwise.planner.predict import Ledger, itemsize, predict
from shardwise.steps.workload import Workload

ATTENTION_SHARE = 0.5
"""Of the rate of large products that attention's two reach: exponentials and rescaling stand between them, so
that fused kernels reach half to three quarters of it (Shah et al. 2024, arXiv:2407.08608, §4)."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one step on one device, by what they are spent on; a device does one of these at a time."""

    products: float
    """Products with parameters, those computed again included."""
    recomputed: float
    """The part of `products` and `attention` that remat computes a second time."""
    attention: float
    traffic: float
    """Everything between products that only goes through memory: norms, activations, sums; in decoding the
    parameters and the cache are read once a token, and products hide behind that or it behind them."""
    optimizer: float
    """Reading gradients and state, writing state and parameters."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """By mesh axes (`fsdp`, `dp+fsdp`): messages that nothing hides."""
    hidden: Mapping[str, float] = field(default_factory=dict)
    """By mesh axes: messages behind which products go on."""
    tokens: int = 0
    """Tokens that the step trains on or makes, over all devices."""
    model_flops: float = 0.0
    """FLOPs of the step over all devices that the model needs, without padding and recomputation."""

    @property
    def communication(self) -> float:
        """Seconds of exposed messages."""
        return sum(self.exposed.values())

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.products + self.attention + self.traffic + self.optimizer + self.communication

    @property
    def bound(self) -> str:
        """What takes the most of the step: `compute`, `memory` or the axes of the longest messages."""
        parts = {
            "compute": self.products + self.attention,
            "memory": self.traffic + self.optimizer,
            **{f"messages over {axes}": seconds for axes, seconds in self.exposed.items()},
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Assumed:
    """Where a prediction departs from our own step, to be compared with other people's programs."""

    product_dtype: str | None = None
    """Of products with parameters, such as int8; None: the compute dtype."""
    efficiency: float | None = None
    """Instead of the chip's documented constant."""
    message_itemsize: int | None = None
    """Bytes of an element of gradients and partial sums on the wire; None: as our steps send them."""
    weight_itemsize: int | None = None
    """Bytes of a parameter in decoding; None: the workload's."""
    cache_itemsize: int | None = None
    """Bytes of an element of keys and values in decoding; None: the compute dtype's."""
    attention_share: float = 1.0
    """Of attention's products, the part that is computed, where a kernel leaves out what windows hide."""
    recomputed_products: float = 1.0
    """Of the products that the remat policy computes again, the part that is."""
    recomputed_attention: float = 1.0
    """The same of attention's."""


def cost(plan: Plan, workload: Workload, hosting: Hosting, assumed: Assumed = Assumed()) -> Cost:
    """Predict one step.

    Raises:
        ConfigError: sizes that do not fit the plan's mesh, or a dtype that the chip has no rate for.
    """
    ledger = predict(plan, workload)
    if workload.task == "decode":
        return _decode(ledger, hosting, assumed)
    return _sequence(ledger, hosting, assumed)


def _sequence(ledger: Ledger, hosting: Hosting, assumed: Assumed) -> Cost:
    """Training, scoring and prefill: many tokens at once, so that products are bound by the chip's rate."""
    workload, system = ledger.workload, hosting.system
    chip, share = system.chip, system.flops_share
    kind: Work = "train" if ledger.trains else "prefill"
    reached = assumed.efficiency or efficiency(chip, kind)
    dtype = assumed.product_dtype or workload.compute_dtype
    product_flops, attention_flops, again_products, again_attention = _flops(ledger)
    product_flops -= again_products * (1 - assumed.recomputed_products)
    attention_flops -= again_attention * (1 - assumed.recomputed_attention)
    attention_flops *= assumed.attention_share
    product_rate = chip.flops(dtype) * share * reached
    attention_rate = chip.flops(workload.compute_dtype) * share * reached * ATTENTION_SHARE
    products, attention = product_flops / product_rate, attention_flops / attention_rate
    traffic = activation_traffic(ledger) / (chip.memory_bandwidth * share)
    optimizer = optimizer_traffic(ledger) / (chip.memory_bandwidth * share)
    exposed, hidden = _messages(ledger, hosting, products + attention + traffic, assumed)
    return Cost(
        products=products,
        recomputed=again_products / product_rate + again_attention / attention_rate,
        attention=attention,
        traffic=traffic,
        optimizer=optimizer,
        exposed=exposed,
        hidden=hidden,
        tokens=workload.batch * workload.length,
        model_flops=model_flops(ledger.plan, workload),
    )


def _decode(ledger: Ledger, hosting: Hosting, assumed: Assumed) -> Cost:
    """One token a row: parameters and cache are read once, or products take longer; the longer counts
    (roofline, Williams et al. 2009)."""
    workload, system = ledger.workload, hosting.system
    chip, share = system.chip, system.flops_share
    reached = assumed.efficiency or efficiency(chip, "decode")
    dtype = assumed.product_dtype or workload.compute_dtype
    product_flops, attention_flops, _, _ = _flops(ledger)
    products = product_flops / (chip.flops(dtype) * share * efficiency(chip, "prefill"))
    weights = used_bytes(ledger)
    if assumed.weight_itemsize is not None:
        weights *= assumed.weight_itemsize / itemsize(workload.param_dtype)
    cache = cache_bytes(ledger)
    if assumed.cache_itemsize is not None:
        cache *= assumed.cache_itemsize / itemsize(workload.compute_dtype)
    reads = (weights + cache) / (chip.memory_bandwidth * share * reached)
    attention = attention_flops / (chip.flops(workload.compute_dtype) * share * efficiency(chip, "prefill"))
    exposed, hidden = _messages(ledger, hosting, 0.0, assumed)
    return Cost(
        products=products,
        recomputed=0.0,
        attention=attention,
        traffic=max(0.0, reads - products - attention),
        optimizer=0.0,
        exposed=exposed,
        hidden=hidden,
        tokens=workload.batch,
        model_flops=model_flops(ledger.plan, workload),
    )


def _flops(ledger: Ledger) -> tuple[float, float, float, float]:
    """FLOPs on one device: products, attention, and of each the part that is computed again."""
    products = sum(f.amount for f in ledger.flops if f.cause != "attention")
    attention = sum(f.amount for f in ledger.flops if f.cause == "attention")
    if not ledger.trains or ledger.workload.remat == "none":
        return products, attention, 0.0, 0.0
    forward = sum(f.amount for f in ledger.flops if f.phase == "forward" and f.cause != "attention")
    attention_forward = sum(f.amount for f in ledger.flops if f.phase == "forward" and f.cause == "attention")
    # Backward takes twice the forward's products; what is beyond is made again.
    return products, attention, products - 3 * forward, attention - 3 * attention_forward


def model_flops(plan: Plan, workload: Workload) -> float:
    """FLOPs that the model needs for a step over all devices: no padding, nothing computed again (PaLM,
    arXiv:2204.02311, appendix B, with attention over visible keys alone)."""
    if workload.task == "decode":
        config = plan.config
        windows = config.windows or (0,) * config.num_layers
        keys = sum(min(window or workload.capacity, workload.capacity) for window in windows)
        attention = 4 * config.num_heads * config.head_dim * keys
        return workload.batch * (2.0 * matmul_parameters(plan) + attention)
    a_token = train_flops_per_token if workload.task == "train" else forward_flops_per_token
    return workload.batch * workload.length * a_token(plan, workload.length)


def activation_traffic(ledger: Ledger) -> float:
    """Bytes that one device moves to and from memory between products, in one step.

    Each named activation of a layer is written by what makes it and read by what takes it; norms and sums
    read and write the residual stream, six times a layer forward. The backward pass does so for gradients
    and values; remat makes them once more.
    """
    plan, workload = ledger.plan, ledger.workload
    size = itemsize(ledger.compute)
    part = {
        name: ledger.local(ledger.shape(name), plan.activation(name))
        for name in ("residual", "query", "key", "value", "attention_out", "mlp_hidden")
    }
    part["mlp_hidden"] *= max(1, plan.config.experts_per_token)
    hidden = (3 if plan.config.gated_mlp else 2) * part["mlp_hidden"]
    around = part["query"] + part["key"] + part["value"] + part["attention_out"]
    forward = (6 * part["residual"] + 2 * around + 2 * hidden) * size
    passes = 1.0
    if ledger.trains:
        passes = 3 + (workload.remat == "full") + 0.5 * (workload.remat == "dots")
    micro = workload.grad_accum_steps if ledger.trains else 1
    return forward * passes * plan.config.num_layers * micro


def optimizer_traffic(ledger: Ledger) -> float:
    """Bytes of AdamW's update on one device: gradient, parameter and two moments read, the last three
    written."""
    return 7.0 * parameter_bytes(ledger.plan, ledger.workload.param_dtype) if ledger.trains else 0.0


def used_bytes(ledger: Ledger) -> float:
    """Bytes of parameters that one device reads for a token: all that it uses, of experts those that its
    rows choose."""
    plan, size = ledger.plan, itemsize(ledger.workload.param_dtype)
    config, total = plan.config, 0.0
    rows = ledger.rows
    for d in plan.decisions:
        local = float(ledger.local(d.use_shape, d.at_use()))
        if d.use.kind == "embedding" and plan.head_path != d.path:
            local = float(rows * d.use_shape[-1])
        if d.use.kind == "expert" and config.num_experts:
            # Chance that none of the rows' choices is a given expert, if all are as likely.
            missed = (1 - config.experts_per_token / config.num_experts) ** (rows * ledger.workload.length)
            local *= 1 - missed
        total += local * size
    return total


def cache_bytes(ledger: Ledger) -> float:
    """Bytes of keys and values that one device reads for a token a row: as many positions as the rows hold,
    which is the whole capacity at the longest."""
    plan, workload, heads = ledger.plan, ledger.workload, ledger.plan.padding.heads
    total = 0.0
    windows = plan.config.windows or (None,) * plan.config.num_layers
    for window in windows:
        reach = min(workload.capacity, window) if window else workload.capacity
        shape = (ledger.rows * plan.batch_multiple(), reach, heads.slots, plan.config.head_dim)
        spec = tuple(() if i == 1 else axes for i, axes in enumerate(plan.activation("kv_cache")))
        total += 2 * ledger.local(shape, spec) // plan.mesh.size(plan.activation("kv_cache")[1])
    return total * itemsize(ledger.compute)


def _messages(
    ledger: Ledger, hosting: Hosting, compute: float, assumed: Assumed
) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed and hidden seconds by mesh axes.

    Gathering a layer's weights and scattering its gradients goes on beside the products of other layers, so
    only what is longer than these is seen, and the first layer's and the last one's. A sum over tp stands
    between a layer's own products and is waited for.
    """
    beside: dict[str, float] = {}
    waited: dict[str, float] = {}
    for c in ledger.collectives:
        seconds = collective_seconds(c, hosting, assumed)
        group = beside if ledger.trains and set(c.axes) <= {"dp", "fsdp"} else waited
        key = "+".join(c.axes)
        group[key] = group.get(key, 0.0) + seconds
    total = sum(beside.values())
    layers = ledger.plan.config.num_layers
    seen = max(total - compute, total / layers) if total else 0.0
    exposed = dict(waited)
    for key, seconds in beside.items():
        exposed[key] = exposed.get(key, 0.0) + seconds / total * seen
    hidden = {key: seconds * (1 - seen / total) for key, seconds in beside.items()} if total else {}
    return exposed, hidden


def collective_seconds(c: Collective, hosting: Hosting, assumed: Assumed = Assumed()) -> float:
    """Seconds of all runs of a collective.

    A large payload goes round a ring (the scaling book, «Sharded matrices»): bytes sent over the ring's
    bandwidth, and a latency for each hop. A small all-reduce is exchanged whole in ⌈log₂ N⌉ rounds instead
    (Thakur et al. 2005, doi:10.1177/1094342005051521). The faster counts.
    """
    link = hosting.link(c.axes)
    if link is None:
        return 0.0
    scale = 1.0
    if assumed.message_itemsize is not None and c.op in ("all-reduce", "reduce-scatter"):
        scale = assumed.message_itemsize / itemsize(c.dtype)
    moved = c.moved(hosting.mesh) * scale
    twice = 2 if c.op == "all-reduce" else 1
    ring = moved / link.bandwidth + c.count * twice * link.delay
    if c.op != "all-reduce":
        return ring
    rounds = math.ceil(math.log2(link.size))
    return min(ring, c.count * rounds * (link.latency + c.payload * scale / link.bandwidth))


def time_text(seconds: float) -> str:
    """Seconds in three digits and a unit that suits them."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def mfu(cost: Cost, hosting: Hosting, dtype: str) -> float:
    """Model FLOPs a second as a part of the peak of all devices for products of `dtype`."""
    system = hosting.system
    peak = system.chip.flops(dtype) * system.flops_share * system.num_devices
    return cost.model_flops / cost.total / peak
