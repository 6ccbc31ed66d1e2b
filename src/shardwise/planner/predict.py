"""What a step moves between devices and computes on each, predicted from the Plan and the workload alone.

Every product with a kernel is followed through operand, reduction and result exactly as ProductSpecs lays
them out, forward and backward; the compiled program is compared with this (audit.py). Not here: both ends of
the vocabulary (predict_head.py) and what a chip makes of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwise.models.attention import query_block
from shardwise.partition.constraints import GradientSpecs, ProductSpecs, summed_together
from shardwise.partition.plan import Decision, Plan
from shardwise.partition.rules import ACTIVATIONS, Spec
from shardwise.planner.collectives import Collective, Op, Phase
from shardwise.steps.loss import chunks_of
from shardwise.steps.workload import Workload

_SIZES = {"bool": 1, "bfloat16": 2, "int32": 4, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of matrix products on one device in one step."""

    cause: str
    """Parameter path, or the activation's name."""
    phase: Phase
    amount: int
    on_cpu: int | None = None
    """What XLA's form of it on a CPU computes, where that is more."""

    @property
    def compiled(self) -> int:
        """What the audit, which compiles for CPUs, finds."""
        return self.amount if self.on_cpu is None else self.on_cpu


@dataclass
class Ledger:
    """A prediction in the making: the step's sizes, and the records so far."""

    plan: Plan
    """As the step follows it."""
    workload: Workload
    collectives: list[Collective] = field(default_factory=list)
    flops: list[Flops] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = self.workload.followed(self.plan)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.workload.task == "train"

    @property
    def rows(self) -> int:
        """Sequences in one micro-batch on one device."""
        micro = self.workload.batch // (self.workload.grad_accum_steps if self.trains else 1)
        return micro // self.plan.batch_multiple()

    @property
    def compute(self) -> str:
        """Compute dtype."""
        return self.workload.compute_dtype

    @property
    def wide(self) -> str:
        """Dtype of sums of products: float32 at least."""
        return "float64" if self.compute == "float64" else "float32"

    def spread(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one device, in mesh order."""
        return tuple(axis for axis, size in self.plan.mesh.sizes.items() if axis in axes and size > 1)

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a named activation in one micro-batch."""
        rows = self.rows * self.plan.batch_multiple()
        sizes = self.plan.padding.physical | {"batch": rows, "length": self.workload.length, "one": 1}
        return tuple(sizes[axis] for axis in ACTIVATIONS[name])

    def local(self, shape: Sequence[int], spec: Spec) -> int:
        """Elements on one device of an array cut as `spec` says."""
        return math.prod(size // self.plan.mesh.size(axes) for size, axes in zip(shape, spec, strict=True))

    def chunks(self, vocab: int) -> tuple[int, int]:
        """Positions per chunk of a loss or of scores, and number of chunks; `vocab` is a device's ids."""
        return chunks_of(self.rows, self.workload.length, vocab, itemsize(self.compute))

    def add(
        self, op: Op, axes: Sequence[str], dtype: str, elements: int, count: int, phase: Phase, cause: str,
        note: str = "", in_loop: bool = False,
    ) -> None:  # fmt: skip
        """Record a collective, unless its groups have one device each."""
        spread = self.spread(axes)
        if spread and elements and count:
            payload = elements * itemsize(dtype)
            self.collectives.append(
                Collective(op, spread, dtype, payload, count, in_loop, phase, cause, note)
            )

    def reshard(
        self, shape: Sequence[int], before: Spec, after: Spec, dtype: str, count: int, phase: Phase,
        cause: str, note: str = "", in_loop: bool = False,
    ) -> None:  # fmt: skip
        """Record what it takes to lay an array out anew: parts are dropped freely, moved, then gathered."""
        kept_somewhere = {axis for axes in after for axis in axes}
        moving = [a for b, c in zip(before, after, strict=True) for a in b if a not in c]
        fresh = {a for b, c in zip(before, after, strict=True) for a in c if a not in b}
        cut = [
            (*b, *(a for a in c if a in fresh and a not in moving))
            for b, c in zip(before, after, strict=True)
        ]
        for axis in moving:
            if axis in kept_somewhere:
                elements = self.local(shape, tuple(cut))
                self.add("all-to-all", (axis,), dtype, elements, count, phase, cause, note, in_loop)
        held = [tuple(a for a in axes if a not in moving or a in kept_somewhere) for axes in before]
        whole = list(cut)
        for dim in reversed(range(len(cut))):  # one gather a dim, the last first
            gathered = tuple(axis for axis in before[dim] if axis not in held[dim])
            whole[dim] = tuple(axis for axis in cut[dim] if axis not in gathered)
            elements = self.local(shape, tuple(whole))
            self.add("all-gather", gathered, dtype, elements, count, phase, cause, note, in_loop)

    def reduce(
        self, shape: Sequence[int], axes: Sequence[str], before: Spec, after: Spec, count: int, phase: Phase,
        cause: str, what: str, in_loop: bool,
    ) -> None:  # fmt: skip
        """Record partial sums over `axes` being added, and the result laid out as `after`.

        Where each device then keeps a slice along `axes`, that is a reduce-scatter.
        """
        spread = self.spread(axes)
        held = {axis for cut in before for axis in cut}
        kept = {axis for cut in after for axis in cut} - held
        scattered = bool(spread) and set(spread) <= kept
        op: Op = "reduce-scatter" if scattered else "all-reduce"
        self.add(op, spread, self.wide, self.local(shape, before), count, phase, cause,
                 f"{what}: partial sums added", in_loop)  # fmt: skip
        self.reshard(
            shape, before, after, self.compute, count, phase, cause, f"{what}: laid out anew", in_loop
        )


def predict(plan: Plan, workload: Workload) -> Ledger:
    """Collectives and products of one step on one device.

    Raises:
        ConfigError: sizes that do not fit the plan's mesh.
    """
    from shardwise.planner.predict_head import predict_ends
    from shardwise.planner.predict_moe import predict_experts

    ledger = Ledger(plan, workload)
    plan = ledger.plan
    together = _summed_together(plan)
    unused = ("head_transform/", "classifier/") if workload.task == "hidden" else ()
    for decision in plan.decisions:
        if decision.path.startswith(unused):
            continue
        if decision.use.kind == "kernel":
            _kernel(ledger, decision, together.get(decision.path, ()))
        elif decision.use.kind in ("scale", "bias") and not decision.path.startswith("lm_head"):
            _vector(ledger, decision)
    if plan.config.num_experts:
        predict_experts(ledger)
    _attention(ledger)
    predict_ends(ledger)
    if ledger.trains:
        _update(ledger)
    return ledger


def not_modelled(plan: Plan) -> tuple[str, ...]:
    """What rules ask of a plan that its prediction leaves out, a sentence each; the audit shows it.

    The model's numbers do not depend on any of it.
    """
    spread = {a.name: _spread(plan, a.name) for a in plan.activations}
    found = []
    inner = [name for name in ("query", "key", "value", "attention_out", "kv_cache") if any(spread[name][3:])]
    if inner:
        found.append(f"{', '.join(inner)} cut within a head: rotary embedding and scores exchange parts")
    heads = {name: spread[name][2] for name in ("query", "key", "value", "attention_out")}
    if len(set(heads.values())) > 1:
        found.append("query, key, value and attention_out cut differently over heads: attention gathers some")
    if spread["kv_cache"] != spread["key"]:
        found.append("kv_cache cut otherwise than key: new keys and values are moved into it")
    if spread["residual"][2]:
        found.append("residual cut over embed: norms exchange sums, and their scales' gradients are cut")
    if spread["mlp_hidden"][1] or spread["query"][1]:
        found.append("mlp_hidden or query cut over the length: the products around them move more")
    if any("tp" in spread[name][0] for name in spread):
        found.append("the batch cut over tp: products that tp cuts gather rows")
    if any(d.use.kind == "scale" and any(d.at_use()) for d in plan.decisions):
        found.append("norm scales cut at use: the residual follows them")
    return tuple(found)


def _spread(plan: Plan, name: str) -> Spec:
    """An activation's cut without axes of one device."""
    return tuple(tuple(a for a in axes if plan.mesh.sizes[a] > 1) for axes in plan.activation(name))


def layer_runs(ledger: Ledger, decision: Decision) -> tuple[int, bool]:
    """How often what a parameter causes happens in a pass, and whether that is in a loop."""
    micro = ledger.workload.grad_accum_steps if ledger.trains else 1
    if not decision.stacked:
        return micro, micro > 1
    looped = ledger.workload.task in ("train", "score", "logits", "hidden")
    return micro * ledger.plan.config.num_layers, looped or micro > 1


def _summed_together(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Kernel → all kernels of its module that take the same operand, if they sum its gradient together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for d in plan.decisions:
        if d.use.kind == "kernel":
            module = d.path.rsplit("/", 2)[0]
            groups.setdefault((module, d.use.takes), []).append(d.path)
    found = {}
    for paths in groups.values():
        if summed_together(plan, paths, [_repeated(plan, plan[path]) for path in paths]):
            found.update(dict.fromkeys(paths, tuple(paths)))
    return found


def _repeated(plan: Plan, d: Decision) -> bool:
    return "kv_heads" in d.axes and plan.padding.heads.repeat > 1


def _kernel(ledger: Ledger, d: Decision, together: tuple[str, ...]) -> None:
    """A product with a kernel: x [B, T, inputs…] · kernel [outputs…, inputs…].

    Args:
        together: kernels, this one among them, that take their operand once and sum its gradient once; the
            first of them is charged with it.
    """
    first = not together or together[0] == d.path
    plan, workload, use = ledger.plan, ledger.workload, d.use
    count, in_loop = layer_runs(ledger, d)
    heads = plan.padding.heads
    repeated = _repeated(plan, d)
    specs = ProductSpecs.of(plan, d.path, repeated)
    stored, spec = d.shape[d.stacked :], d.spec[d.stacked :]
    held = d.use_shape[d.stacked :]
    used = (heads.slots, *held[1:]) if repeated else held
    split = len(used) - use.num_inputs
    takes, gives = plan.activation(use.takes), plan.activation(use.gives)
    x_shape = ledger.shape(use.takes)
    y_shape = (*ledger.shape(use.gives)[:2], *used[:split])
    outputs = tuple(a for axes in specs.kernel[:split] for a in axes)
    inputs = tuple(a for axes in specs.kernel[split:] for a in axes)
    rows = ledger.local(x_shape[:2], specs.operand[:2])
    amount = 2 * rows * ledger.local(used, specs.kernel) * count
    c, path = ledger.compute, d.path

    def gather(phase: Phase) -> None:
        ledger.reshard(stored, spec, d.at_use()[d.stacked :], c, count, phase, path,
                       "weights gathered just before use", in_loop)  # fmt: skip

    def operand(phase: Phase, note: str) -> None:
        if first:
            ledger.reshard(x_shape, takes, specs.operand, c, count, phase, path, note, in_loop)

    def forward(phase: Phase, note: str = "") -> None:
        gather(phase)
        operand(phase, f"{use.takes} laid out for the kernel{note}")
        ledger.reduce(
            y_shape, inputs, specs.product, gives, count, phase, path, f"{use.gives}{note}", in_loop
        )
        ledger.flops.append(Flops(path, phase, amount))

    forward("forward")
    if not ledger.trains:
        return
    again = workload.remat == "full" and d.stacked and made_again(plan, path)
    if again:
        forward("backward", " (computed again: remat full)")
    gather("backward")
    if not (again and together):  # else what was laid out for the products computed again serves for both
        operand("backward", f"{use.takes} laid out for the kernel again")
    ledger.reshard(y_shape, gives, specs.product, c, count, "backward", path,
                   f"gradient of {use.gives} laid out for the kernel", in_loop)  # fmt: skip
    if first:
        names = ", ".join(name.rsplit("/", 2)[1] for name in together)
        what = f"gradient of {use.takes}" + (f" from {names}" if together else "")
        ledger.reduce(
            x_shape, outputs, specs.operand, takes, count, "backward", path, what, in_loop
        )  # fmt: skip
    ledger.flops.append(Flops(path, "backward", 2 * amount))
    _weight_gradient(ledger, d, repeated, count, in_loop)


def made_again(plan: Plan, path: str) -> bool:
    """Whether remat `full` computes a layer's product again: not where the backward pass needs its operand
    only, since it closes the layer and no norm follows."""
    if plan.config.norm_order != "pre":
        return True
    ends = [
        k.path
        for k in plan.decisions
        if k.stacked and k.use.kind in ("kernel", "expert") and k.use.gives == "residual"
    ]
    return path not in (ends if plan.config.parallel != "no" else ends[-1:])


def _weight_gradient(ledger: Ledger, d: Decision, repeated: bool, count: int, in_loop: bool) -> None:
    """The kernel's gradient, summed over devices: scattered over what was gathered, then reduced."""
    to = GradientSpecs.of(ledger.plan, d.path, repeated)
    elements = ledger.local(to.shape, to.part)
    for _, axes in to.scattered:
        ledger.add("reduce-scatter", axes, ledger.wide, elements, count, "backward", d.path,
                   "gradient summed and scattered", in_loop)  # fmt: skip
        elements //= ledger.plan.mesh.size(axes)
    copies = " and over the copies of kv heads" if repeated else ""
    ledger.add("all-reduce", to.rest, ledger.wide, elements, count, "backward", d.path,
               f"gradient summed over the batch{copies}", in_loop)  # fmt: skip


def _vector(ledger: Ledger, d: Decision) -> None:
    """A norm's scale or a bias: gathered where it lies cut and its activation does not; its gradient is made
    as the activation lies and summed over the batch."""
    count, in_loop = layer_runs(ledger, d)
    gives = ledger.plan.activation(d.use.gives or "residual")
    skip = d.stacked + (d.path == "embed/token_types")  # of which the first row alone is used
    stored, held, shape = d.spec[skip:], d.at_use()[skip:], d.use_shape[skip:]
    rows, own = gives[: len(gives) - len(shape)], gives[len(gives) - len(shape) :]
    repeated, c, path = _repeated(ledger.plan, d), ledger.compute, d.path
    ledger.reshard(
        d.shape[skip:], stored, held, c, count, "forward", path, "gathered just before use", in_loop
    )
    made = (ledger.plan.padding.heads.slots, *shape[1:]) if repeated else shape
    if not repeated:
        ledger.reshard(shape, held, own, c, count, "forward", path, f"laid out as {d.use.gives}", in_loop)
    if not ledger.trains:
        return
    elements = ledger.local(made, own)
    for axes in rows:
        ledger.add("all-reduce", axes, c, elements, count, "backward", path,
                   "gradient summed over the batch", in_loop)  # fmt: skip
    if repeated:
        ledger.add("all-reduce", own[0], c, math.prod(shape), count, "backward", path,
                   "gradients of a kv head's copies added", in_loop)  # fmt: skip
    else:
        ledger.reshard(shape, own, stored, c, count, "backward", path, "gradient laid out as stored", in_loop)


def _attention(ledger: Ledger) -> None:
    """The two products of attention; nothing moves as long as heads alone are cut."""
    plan, workload = ledger.plan, ledger.workload
    length = workload.length
    reach = workload.capacity if workload.task in ("prefill", "decode") else length
    block = query_block(length)
    starts = range(0, length, block)
    skips = reach == length and plan.config.causal  # keys behind a block's last query are left out
    pairs = sum(min(block, length - s) * (min(s + block, length) if skips else reach) for s in starts)
    cut = plan.mesh.size([a for axes in plan.activation("query")[2:] for a in axes])
    heads = plan.padding.heads.padded_heads // cut
    runs = plan.config.num_layers * (workload.grad_accum_steps if ledger.trains else 1)
    amount = 4 * ledger.rows * heads * plan.config.head_dim * pairs * runs
    ledger.flops.append(Flops("attention", "forward", amount))
    if ledger.trains:
        again = amount // 2 if len(starts) > 1 else 0
        again += amount if workload.remat != "none" else 0
        ledger.flops.append(Flops("attention", "backward", 2 * amount + again))


def _update(ledger: Ledger) -> None:
    """Sums of single numbers: trained tokens, and the gradients' global norm."""
    plan = ledger.plan
    ledger.add("all-reduce", plan.batch_axes(), "float32", 1, 1, "update", "tokens", "trained tokens counted")
    dtype = "float64" if ledger.workload.param_dtype == "float64" else "float32"
    for d in plan.decisions:
        for axes in d.spec:
            ledger.add("all-reduce", axes, dtype, 1, 1, "update", d.path,
                       "its part of the global norm")  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return _SIZES.get(dtype) or np.dtype(dtype).itemsize
