"""The tables of `shardwise explain`, in words and units that a terminal can hold.

Not here: the numbers (explain.py, audit.py).
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from shardwise.models.flops import parameter_count
from shardwise.partition.plan import Decision, Plan
from shardwise.planner.audit import ALLOWED_SHARE, Audit
from shardwise.planner.collectives import Collective, Op, Phase, Total, totals
from shardwise.planner.explain import Explanation, TensorReport
from shardwise.planner.head_choice import HeadChoice
from shardwise.planner.predict import not_modelled
from shardwise.planner.reasons import role
from shardwise.steps.workload import Workload

_SHORT: dict[Op, str] = {
    "all-gather": "AG",
    "all-reduce": "AR",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "P",
}
_MOST_CELLS = 16
_MOST_LEFT_OVER = 8
_WIDE = 130
"""Columns of a terminal from which on a tensor fits a line."""


def console() -> Console:
    """A console as wide as the terminal, 165 columns elsewhere."""
    return Console(width=None if Console().is_terminal else 165, highlight=False, markup=False)


def overview(out: Console, name: str, e: Explanation, choice: HeadChoice | None) -> None:
    """One screen: every kind of tensor, why, totals, memory, fallbacks."""
    plan = e.plan
    out.print(f"{name} on mesh {plan.mesh}: {_plural(plan.mesh.num_devices, 'device')}, rules"
              f" {plan.rules.name}; {describe(e.workload)}")  # fmt: skip
    phases: tuple[Phase, ...] = ("forward", "backward") if e.workload.task == "train" else ("forward",)
    narrow = out.width < _WIDE
    table = _table(*(("tensor", "shape/cut") if narrow else ("tensor", "shape", "cut")), ">MB each", *phases)
    for t in e.tensors:
        table.add_row(*_row(t, plan, phases, narrow))
    out.print(table)
    seen = {c.op for t in e.tensors for c in t.collectives}
    legend = ", ".join(f"{short} {op}" for op, short in _SHORT.items() if op in seen)
    if seen:
        out.print(f"{', '.join(phases)}: MB that a device sends in a step ({legend}); – is under 0.001")
    out.print()
    for why, paths in _grouped((role(plan, t.decision), _short(t.decision)) for t in e.tensors):
        out.print(textwrap.fill(f"{', '.join(paths)}: {why}", out.width, subsequent_indent="    "))
    if plan.mesh.fsdp > 1 and any("fsdp" in axes for d in plan.decisions for axes in d.spec):
        back = " and its gradient scattered back" if e.workload.task == "train" else ""
        out.print(
            f"fsdp: each weight is gathered just before use{back}; which dim it cuts makes no difference"
        )
    out.print()
    if plan.head_path is None:
        what = "a classifier's" if plan.config.labels else "none"
        given = f"head: {what}; there is no layout to choose"
    else:
        given = f"head layout {plan.head_layout}, by {plan[plan.head_path].decided_by}"
    if plan.head_path is not None and plan.mesh.tp == 1:
        given = "head layout: none to choose, since tp is 1"
    for line in choice.lines() if choice is not None else [given]:
        out.print(line)
    _totals(out, e)
    _memory(out, e)
    for line in not_modelled(plan):
        text = f"not in this prediction (--audit compiles it): {line}"
        out.print(textwrap.fill(text, out.width, subsequent_indent="    "))
    for line in plan.fallbacks:
        out.print(textwrap.fill(f"note: {line}", out.width, subsequent_indent="    "))


def describe(w: Workload) -> str:
    """A workload in words."""
    tokens = f"{w.batch} × {w.capacity if w.task == 'decode' else w.length} tokens"
    what = f"one {w.task} step of {tokens}"
    if w.task == "decode":
        what = f"one new token for {_plural(w.batch, 'sequence')}, caches of {w.capacity} tokens"
    extra = [f"remat {w.remat}"] if w.remat != "none" else []
    extra += [f"{w.grad_accum_steps} micro-batches"] if w.grad_accum_steps > 1 else []
    return ", ".join([what, f"{w.param_dtype} parameters, {w.compute_dtype} compute", *extra])


def tensors(out: Console, e: Explanation, paths: Sequence[str]) -> None:
    """Some tensors in full, each with a drawing."""
    for t in e.tensors:
        if t.decision.path in paths:
            _tensor(out, t, e.plan)


def swap(out: Console, before: Explanation, after: Explanation, text: str) -> None:
    """Both sides of a what-if: cut, collectives by axis and op, FLOPs."""
    changed = [
        (a, b)
        for a, b in zip(before.tensors, after.tensors, strict=True)
        if a.decision.spec != b.decision.spec
    ]
    for a, b in changed:
        cuts = f"{_cut(a.decision, before.plan)} → {_cut(b.decision, after.plan)}"
        out.print(f"--swap {text}: {a.decision.path} cut {cuts}")
        for label, t in (("before", a), ("after", b)):
            out.print(textwrap.fill(f"{label}: {t.reason}", out.width, subsequent_indent="    "))
    mesh = before.plan.mesh
    sums = [totals(e.collectives, mesh) for e in (before, after)]
    table = _table(
        "axes", "collective", ">runs", ">MB moved", ">runs after", ">MB moved after", ">difference"
    )
    for key in dict.fromkeys((*sums[0], *sums[1])):
        found = [s.get(key, Total(0, 0, 0.0)) for s in sums]
        moved, runs = [x.moved for x in found], [x.count for x in found]
        change = _change(*moved)
        table.add_row(
            "+".join(key[0]), key[1], str(runs[0]), _mb(moved[0]), str(runs[1]), _mb(moved[1]), change
        )
    out.print(table)
    if before.workload.task == "train":
        out.print("differences of some bytes are single numbers, of which the gradients' norm is made")
    flops = [e.total_flops for e in (before, after)]
    change = "same" if flops[0] == flops[1] else f"{flops[1] / flops[0] - 1:+.2%}"
    out.print(f"GFLOP a device: {flops[0] / 1e9:,.4g} → {flops[1] / 1e9:,.4g} ({change})")
    moved = [sum(c.moved(mesh) for c in e.collectives) for e in (before, after)]
    out.print(f"MB moved by a device: {_mb(moved[0])} → {_mb(moved[1])} ({_change(*moved)})")


def audited(out: Console, a: Audit, title: str) -> None:
    """Predicted beside compiled, and what neither explains."""
    mesh = a.plan.mesh
    out.print()
    out.print(f"{title}, for one device of {mesh.num_devices} (simulated, after the partitioning pass):")
    table = _table(
        "axes",
        "collective",
        ">runs predicted",
        ">compiled",
        ">MB moved predicted",
        ">compiled",
        "in the layer loop",
    )
    for row in a.rows:
        inside = sum(c.count for c in a.compiled if (c.axes, c.op) == (row.axes, row.op) and c.in_loop)
        where = "all" if inside == row.compiled.count else f"{inside} of {row.compiled.count}"
        table.add_row(
            "+".join(row.axes) or "(no mesh axis)", row.op, str(row.predicted.count), str(row.compiled.count),
            _mb(row.predicted.moved), _mb(row.compiled.moved), where if row.compiled.count else "",
        )  # fmt: skip
    out.print(table)
    as_scatter = sum(c.count for c in a.compiled if c.op == "reduce-scatter" and "all-reduce" in c.note)
    if as_scatter:
        out.print(f"{as_scatter} of the reduce-scatters were compiled as an all-reduce of which a slice is"
                  " kept, which sends twice the bytes: the CPU compiler has no other form")  # fmt: skip
    out.print(
        f"GFLOP of products: predicted {a.predicted_flops / 1e9:,.6g}, compiled {a.compiled_flops / 1e9:,.6g}"
    )
    share = a.unexplained_share
    out.print(
        f"bytes unexplained: {share:.2%}" + ("" if share <= ALLOWED_SHARE else ", more than the 1 % allowed")
    )
    for label, group in (("compiled, not predicted", a.unexplained), ("predicted, not compiled", a.absent)):
        _left_over(out, label, group, a)


def _left_over(out: Console, label: str, group: Iterable[Collective], a: Audit) -> None:
    """Those that move most, alike ones in one line."""
    alike: dict[Collective, int] = {}
    for c in group:
        alike[replace(c, count=1)] = alike.get(replace(c, count=1), 0) + c.count
    mesh = a.plan.mesh
    found = sorted((replace(c, count=n) for c, n in alike.items()), key=lambda c: -c.moved(mesh))
    for c in found[:_MOST_LEFT_OVER]:
        out.print(textwrap.fill(f"{label}: {_one(c)}  {c.cause}", out.width, subsequent_indent="    "))
    if more := found[_MOST_LEFT_OVER:]:
        out.print(f"{label}: {len(more)} more kinds, {_mb(sum(c.moved(mesh) for c in more))} MB together")


def _row(t: TensorReport, plan: Plan, phases: Sequence[Phase], narrow: bool) -> list[str]:
    d = t.decision
    skip = int(d.stacked)
    layers = f"{d.true_shape[0]} × " if skip else ""
    sizes = [
        str(true) + (f"→{size}" if size != true else "")
        for true, size in zip(d.true_shape[skip:], d.shape[skip:], strict=True)
    ]
    cut = [layers + _with_axes(sizes, d, plan)]
    if not narrow:
        cut = [layers + " ".join(sizes), _with_axes(d.axes[skip:], d, plan)]
    sent = [_sent(t.collectives, phase, plan, "\n" if narrow else ", ") for phase in phases]
    return [_short(d), *cut, _mb(t.bytes_per_device), *sent]


def _sent(collectives: Iterable[Collective], phase: Phase, plan: Plan, between: str) -> str:
    """`AG fsdp 12.3` for each op and axes: megabytes that a device sends; without what is under 1 kB."""
    of_phase = [c for c in collectives if c.phase == phase]
    sums = {key: t for key, t in totals(of_phase, plan.mesh).items() if t.moved >= 1000}
    found = [f"{_SHORT[op]} {'+'.join(axes)} {_mb(t.moved)}" for (axes, op), t in sums.items()]
    return between.join(found) or "–"


def _tensor(out: Console, t: TensorReport, plan: Plan) -> None:
    d = t.decision
    dims = ", ".join(
        f"{axis} {true}" + (f" stored as {size}" if size != true else "")
        for axis, true, size in zip(d.axes, d.true_shape, d.shape, strict=True)
    )
    out.print(f"{d.path}  [{dims}]  {t.dtype}")
    out.print(
        f"  cut {_cut(d, plan)} by {d.decided_by}; {_mb(t.bytes)} MB in all, {_mb(t.bytes_per_device)} on a"
        " device"
    )
    out.print(textwrap.fill(t.reason, out.width, initial_indent="  why: ", subsequent_indent="    "))
    for c in t.collectives:
        out.print(f"  {_one(c)}: {c.note}")
    if t.flops:
        out.print(f"  {t.flops / 1e9:,.4g} GFLOP a device in one step")
    for note in d.notes:
        out.print(f"  note: {note}")
    for line in drawing(d, plan):
        out.print(f"  {line}")
    out.print()


def drawing(d: Decision, plan: Plan) -> list[str]:
    """How the tensor lies on the devices: a cell for each part, with the devices that hold it.

    Rows are the parts of the first dim that is cut, columns those of the second; a device is told by its
    place on the axes of more than one device, in the order dp, fsdp, tp.
    """
    mesh = plan.mesh
    cut = [i for i, axes in enumerate(d.spec) if mesh.size(axes) > 1]
    long_axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    if not cut or not long_axes:
        return [f"all of it on each of {_plural(mesh.num_devices, 'device')}"]
    rows, columns = cut[0], cut[1] if len(cut) > 1 else None
    places = [dict(zip(long_axes, at, strict=True)) for at in
              itertools.product(*(range(mesh.sizes[axis]) for axis in long_axes))]  # fmt: skip

    def part(place: dict[str, int], dim: int | None) -> int:
        index = 0
        for axis in d.spec[dim] if dim is not None else ():
            index = index * mesh.sizes[axis] + place.get(axis, 0)
        return index

    def label(dim: int, index: int) -> str:
        size = d.shape[dim] // mesh.size(d.spec[dim])
        return f"{d.axes[dim]}[{index * size}:{(index + 1) * size}]"

    cells: dict[tuple[int, int], list[str]] = {}
    for place in places:
        name = (
            "".join(map(str, place.values()))
            if max(mesh.sizes.values()) < 10
            else ",".join(map(str, place.values()))
        )
        cells.setdefault((part(place, rows), part(place, columns)), []).append(name)
    height, width = mesh.size(d.spec[rows]), 1 if columns is None else mesh.size(d.spec[columns])
    shown = [min(height, _MOST_CELLS), min(width, 8)]
    texts = [["", *("" if columns is None else label(columns, c) for c in range(shown[1]))]]
    texts += [[label(rows, r), *(_few(cells[r, c]) for c in range(shown[1]))] for r in range(shown[0])]
    widths = [max(len(line[i]) for line in texts) for i in range(len(texts[0]))]
    lines = [" ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in texts]
    more = [f"… {height * width} parts in all"] if (height, width) != tuple(shown) else []
    return [f"device = place on {', '.join(long_axes)}:", *[line for line in lines if line], *more]


def _few(names: Sequence[str]) -> str:
    return "|" + " ".join(names[:4]) + (f" +{len(names) - 4}" if len(names) > 4 else "") + "|"


def _one(c: Collective) -> str:
    times = f" × {c.count}" if c.count > 1 else ""
    loop = ", in the loop" if c.in_loop else ""
    return f"{c.phase}: {c.op} over {'+'.join(c.axes) or '?'} of {_mb(c.payload)} MB {c.dtype}{times}{loop}"


def _totals(out: Console, e: Explanation) -> None:
    mesh = e.plan.mesh
    table = _table("axes", "collective", ">runs", ">MB moved by a device")
    for (axes, op), total in totals(e.collectives, mesh).items():
        table.add_row("+".join(axes), op, f"{total.count:,}", _mb(total.moved))
    if mesh.num_devices > 1:
        out.print(table)
    out.print(
        f"{parameter_count(e.plan):,} parameters, padding adds {e.padding_share:.2%};"
        f" {e.total_flops / 1e9:,.4g} GFLOP of products a device"
    )


def _memory(out: Console, e: Explanation) -> None:
    m = e.memory
    parts = [("parameters", m.params), ("gradients", m.grads), ("optimizer", m.optimizer),
             ("activations (estimate)", m.activations), ("kv cache", m.kv_cache)]  # fmt: skip
    text = ", ".join(f"{name} {_mb(size)}" for name, size in parts if size)
    out.print(f"memory of a device in MB: {text}; {_mb(m.total)} together")


def _table(*columns: str) -> Table:
    """Columns; `>` in front of a name sets it to the right."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return list(groups.items())


def _short(d: Decision) -> str:
    return d.path.removeprefix("layers/").removesuffix("/kernel")


def _with_axes(dims: Sequence[str], d: Decision, plan: Plan) -> str:
    """Each dim but the layers, with the mesh axes that cut it: `mlp/tp embed/fsdp`."""
    pairs = zip(dims, _parts(d, plan), strict=True)
    return " ".join("/".join(filter(None, (dim, "+".join(axes)))) for dim, axes in pairs)


def _cut(d: Decision, plan: Plan) -> str:
    """Mesh axes of each dim, the layers left out; `·` is a dim that is not cut."""
    return "(" + ", ".join("+".join(axes) or "·" for axes in _parts(d, plan)) + ")"


def _parts(d: Decision, plan: Plan) -> list[tuple[str, ...]]:
    """The spec without the layers and without axes of one device, which cut nothing."""
    sizes = plan.mesh.sizes
    return [tuple(axis for axis in axes if sizes[axis] > 1) for axes in d.spec[d.stacked :]]


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _change(before: float, after: float) -> str:
    """A difference in MB, or in bytes where it is next to nothing (single numbers of the gradients' norm)."""
    if before == after:
        return "same"
    change = after - before
    return f"{change / 1e6:+,.3f} MB" if abs(change) >= 1000 else f"{change:+.0f} bytes"


def _mb(amount: float) -> str:
    megabytes = amount / 1e6
    return f"{megabytes:,.0f}" if megabytes >= 1000 else f"{megabytes:.3g}" if megabytes >= 0.001 else (
        "0" if not amount else f"{megabytes:.1g}"
    )  # fmt: skip
