"""Why a tensor's cut is as it is and what follows from it, in a sentence or two.

Not here: the numbers (predict.py) and where they are shown (explain_view.py).
"""

from __future__ import annotations

from shardwise.partition.constraints import ProductSpecs
from shardwise.partition.plan import DATA_AXES, Decision, Plan
from shardwise.partition.rules import Spec


def reason(plan: Plan, d: Decision) -> str:
    """The reason of a decision, for a reader who knows what a matrix product is."""
    return role(plan, d) + _data_axes(plan, d)


def role(plan: Plan, d: Decision) -> str:
    """The part of it that the axes of the computation (tp) have; FSDP's is the same for all."""
    if d.use.kind == "kernel":
        return _kernel(plan, d)
    if d.use.kind in ("embedding", "head"):
        return _vocabulary(plan, d)
    cut = _axes(plan, d.at_use())
    if d.use.kind == "bias" and cut:
        return f"bias: cut over {cut} like the outputs that it is added to, so that nothing moves"
    what = "bias: added once, after any sum over devices" if d.use.kind == "bias" else "a vector of the norm"
    return f"{what}; whole on each device, in training its gradient is summed over the batch"


def _kernel(plan: Plan, d: Decision) -> str:
    repeated = "kv_heads" in d.axes and plan.padding.heads.repeat > 1
    specs = ProductSpecs.of(plan, d.path, repeated)
    split = len(specs.kernel) - d.use.num_inputs
    outputs, inputs = _axes(plan, specs.kernel[:split]), _axes(plan, specs.kernel[split:])
    takes, gives = plan.activation(d.use.takes), plan.activation(d.use.gives)
    fits_input = _axes(plan, takes[2:]) == _axes(plan, specs.operand[2:])
    fits_output = _axes(plan, gives[2:]) == _axes(plan, specs.product[2:])
    if inputs:
        words = f"row-parallel: input cut over {inputs}"
        words += "" if fits_input else f", so that each device takes its slice of {d.use.takes}"
        if not outputs and fits_output:
            block = {"attention_out": "attention block", "mlp_hidden": "mlp block"}.get(d.use.takes)
            closes = f" and closes the {block}" if block and fits_input else ""
            return f"{words}; the all-reduce of its partial sums is the only communication{closes}"
        return f"{words}; partial sums are added, and {d.use.gives} is then cut anew: a cut against the grain"
    if outputs:
        words = f"column-parallel: output cut over {outputs}"
        if fits_input and fits_output:
            closing = [k.path.rsplit("/", 2)[1] for k in plan.decisions if k.use.takes and _follows(d, k)]
            pair = f"; pairs with {closing[-1]}, whose all-reduce closes the block" if closing else ""
            shared = ", its kv heads repeated to the slots" if repeated else ""
            return f"{words}{shared}, no communication forward{pair}"
        gathers = [name for name, fits in ((d.use.takes, fits_input), (d.use.gives, fits_output)) if not fits]
        return f"{words}, but {' and '.join(gathers)} must be gathered for it: a cut against the grain"
    idle = _axes(plan, ((axis for axis, size in plan.mesh.sizes.items() if axis not in DATA_AXES),))
    return "not cut at use: every device computes all of it" + (
        f", and the {idle} devices repeat each other's work" if idle else ""
    )


def _follows(d: Decision, other: Decision) -> bool:
    """Whether `other` is the row-parallel kernel that the outputs of `d` end in."""
    ends = {"query": "attention_out", "key": "attention_out", "value": "attention_out"}
    return other.use.takes == ends.get(d.use.gives, d.use.gives)


def _vocabulary(plan: Plan, d: Decision) -> str:
    vocab, embed = (_axes(plan, (axes,)) for axes in d.at_use())
    is_head = d.path == plan.head_path
    uses = "look-up and head" if is_head and d.use.kind == "embedding" else "head" if is_head else "look-up"
    if vocab:
        head = "logits stay cut: a loss or a choice exchanges a few numbers a token"
        table = "each device looks up its own ids, and one all-reduce joins the rows"
        what = f"vocabulary cut over {vocab}"
    elif embed:
        head = "each device has a part of every logit, and an all-reduce adds them"
        table = "each device has its part of every row, and an all-gather joins them"
        what = f"hidden dim cut over {embed}"
    else:
        head, table = "every device computes all logits", "every device looks up alone"
        what = "not cut over tp"
    words = {"head": head, "look-up": table, "look-up and head": f"{table}; {head}"}[uses]
    return f"{uses}, {what}: {words}"


def _data_axes(plan: Plan, d: Decision) -> str:
    """What FSDP does to it."""
    cut = [
        (axis, logical)
        for logical, axes in zip(d.axes, d.spec, strict=True)
        for axis in axes
        if axis in DATA_AXES and plan.mesh.sizes[axis] > 1
    ]
    if not cut:
        return ""
    where = " and ".join(f"{axis} cuts {logical}" for axis, logical in cut)
    words = "gathered just before use, in training the gradient scattered back; any dim costs the same"
    return f"; {where}: {words}"


def _axes(plan: Plan, spec: Spec | tuple[object, ...]) -> str:
    """The mesh axes of more than one device in a spec, in order, as text."""
    found = [a for axes in spec for a in axes if plan.mesh.sizes[a] > 1 and a not in DATA_AXES]  # type: ignore[attr-defined]
    return "+".join(dict.fromkeys(found))
