"""The tables of `shardwise plan`, and its JSON.

Not here: the search (search.py) and the plot (plan_plot.py).
"""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from shardwise.models.flops import parameter_count
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.cost import time_text
from shardwise.planner.search import USABLE, Candidate, Ranking, Request

if TYPE_CHECKING:
    from shardwise.planner.prove import Measured, Verified

_GIB = 2**30


def console() -> Console:
    """A console as wide as the terminal, 165 columns elsewhere."""
    return Console(width=None if Console().is_terminal else 165, highlight=False, markup=False)


def ranked(out: Console, model: str, ranking: Ranking, top: int, smallest: Ranking | None) -> None:
    """The best meshes, why the first is the best, and what became of the others."""
    request, system = ranking.request, ranking.system
    size = parameter_count(plan_model(request.config, MeshSpec(1, 1, 1)))
    out.print(f"{model}: {size:,} parameters")
    out.print(f"on {system}; {system.hbm / _GIB:.1f} GiB a device, of which {USABLE:.0%} is planned with")
    out.print(describe(request))
    if ranking.fitting:
        out.print(_table(ranking.fitting[:top], request))
        left = len(ranking.fitting) - top
        if left > 0:
            out.print(f"… and {left} more that fit (--top, --json)")
        out.print(textwrap.fill(why(ranking), out.width, subsequent_indent="    "))
        out.print(f"GiB of the first on a device: {_memory(ranking.fitting[0])}")
    _others(out, ranking)
    if not ranking.fitting:
        _nothing(out, ranking, smallest)


def describe(request: Request) -> str:
    """The job in words."""
    dtypes = f"{request.compute_dtype} products, {request.param_dtype} parameters"
    if request.task == "decode":
        return f"decode: {request.batch:,} sequences, caches of {request.length:,} tokens; {dtypes}"
    tokens = request.batch * request.length
    return (
        f"{request.task}: {tokens:,} tokens a step = {request.batch:,} sequences of {request.length:,};"
        f" {dtypes}" + ("; AdamW" if request.task == "train" else "")
    )


def _table(candidates: tuple[Candidate, ...], request: Request) -> Table:
    trains = request.task == "train"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    columns = ["mesh", "head", *(["remat", "micro × seqs"] if trains else [">seqs a device"])]
    columns += [">step", ">tokens/s/device", *([">MFU"] if request.task != "decode" else []), ">GiB"]
    columns += ["bound by", "the step's time"]
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name[0] == ">" else "left")
    for c in candidates:
        cells = [str(c.mesh), _head(c)]
        if trains:
            cells += [c.workload.remat, f"{c.workload.grad_accum_steps} × {c.micro_batch}"]
        else:
            cells.append(str(c.micro_batch))
        cells += [time_text(c.cost.total), f"{c.tokens_per_second:,.4g}"]
        cells += [f"{c.mfu:.1%}"] if request.task != "decode" else []
        cells += [f"{c.memory.total / _GIB:.1f}", c.cost.bound, _parts(c)]
        table.add_row(*cells)
    return table


def _head(c: Candidate) -> str:
    return "–" if c.plan.head_path is None or c.mesh.tp == 1 else str(c.plan.head_layout)


def _memory(c: Candidate) -> str:
    m = c.memory
    parts = {
        "weights": m.params, "grads": m.grads, "AdamW": m.optimizer, "activations": m.activations,
        "cache": m.kv_cache,
    }  # fmt: skip
    return ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items() if size)


def _parts(c: Candidate) -> str:
    """Shares of the step's time, the largest first."""
    t = c.cost
    again = f" ({t.recomputed / t.total:.0%} again)" if t.recomputed > 0.005 * t.total else ""
    parts = {
        f"products{again}": t.products, "attention": t.attention, "memory": t.traffic,
        "optimizer": t.optimizer, **{f"{axes} messages": s for axes, s in t.exposed.items()},
    }  # fmt: skip
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {s / t.total:.0%}" for name, s in ordered if s >= 0.005 * t.total)


def why(ranking: Ranking) -> str:
    """A sentence on the first, beside the best of another kind."""
    best = ranking.fitting[0]
    objective = ranking.request.objective
    what = {"throughput": "fastest", "latency": "quickest", "memory": "smallest", "devices": "fastest"}
    sentence = f"{best.mesh} is the {what[objective]} of {len(ranking.fitting)} that fit: "
    sentence += _story(best)
    kind = best.mesh.tp == 1
    other = next((c for c in ranking.fitting if (c.mesh.tp == 1) != kind), None)
    if other is None:
        return sentence
    slower = other.cost.total / best.cost.total - 1
    word = "without tp" if other.mesh.tp == 1 else "with tp"
    change = f"{abs(slower):.0%} {'slower' if slower >= 0 else 'quicker'}"
    return f"{sentence} The best {word}, {other.mesh}, is {change}: {_story(other)}"


def _story(c: Candidate) -> str:
    t = c.cost
    hidden, shown = sum(t.hidden.values()), t.communication
    parts = [f"{time_text(t.products + t.attention)} of products and attention"]
    if t.traffic > 0.02 * t.total:
        parts.append(f"{time_text(t.traffic)} of reading and writing memory")
    if hidden > 0.005 * t.total:
        parts.append(f"{time_text(hidden)} of messages go on behind them")
    if shown > 0.005 * t.total:
        longest = max(t.exposed, key=lambda axes: t.exposed[axes])
        link = c.hosting.link(longest.split("+"))
        over = f", over {link.where}" if link is not None else ""
        parts.append(f"{time_text(shown)} of messages are waited for, most of {longest}{over}")
    return ", ".join(parts) + "."


def _others(out: Console, ranking: Ranking) -> None:
    for c in ranking.refused[:3]:
        out.print(f"not {c.mesh}: {c.refused} ({_memory(c)})")
    if len(ranking.refused) > 3:
        out.print(f"… and {len(ranking.refused) - 3} more do not do (--json has each reason)")
    reasons = Counter(_short(reason, ranking) for _, reason in ranking.impossible)
    example = {_short(reason, ranking): mesh for mesh, reason in reversed(ranking.impossible)}
    for reason, n in reasons.most_common(3):
        more = f" and {n - 1} more" if n > 1 else ""
        out.print(f"not {example[reason]}{more}: {reason}")
    if len(reasons) > 3:
        out.print(f"… and {sum(n for _, n in reasons.most_common()[3:])} more are impossible (--json)")


def _short(reason: str, ranking: Ranking) -> str:
    """A reason without the machine and the mesh, which stand around it."""
    _, _, rest = reason.partition(" cannot host mesh ")
    return rest.partition(": ")[2].partition(";")[0] if rest else reason


def _nothing(out: Console, ranking: Ranking, smallest: Ranking | None) -> None:
    late = [c for c in ranking.refused if c.refused.startswith("a step takes")]
    if late:
        quickest = min(late, key=lambda c: c.cost.total)
        out.print(
            f"nothing is quick enough; the quickest is {quickest.mesh}: {time_text(quickest.cost.total)}"
        )
    elif ranking.refused:
        out.print("nothing fits this machine")
    else:
        out.print("no mesh of this machine can run this step, for the reasons above")
    if smallest is not None:
        best = smallest.fitting[0]
        out.print(
            f"the smallest {ranking.system.chip.name} machine for this job: {smallest.system}, mesh"
            f" {best.mesh}, {time_text(best.cost.total)} a step"
        )
    else:
        micro = ", other --grad-accum-steps" if ranking.request.grad_accum_steps else ""
        out.print(f"no machine of this chip that was tried does; try another batch{micro} or another chip")


def verified(out: Console, found: list[Verified]) -> None:
    """What a compiler made of each, beside the prediction."""
    out.print()
    for v in found:
        c, m = v.compiled, v.candidate.memory
        kept = "compiled by an earlier call" if c.cached else f"compiled in {c.seconds:.1f} s"
        out.print(f"{v.candidate.mesh} for {c.target}, {kept}:")
        if v.note:
            out.print(f"  {v.note}")
        if c.out_of_memory is not None:
            out.print(f"  does not fit: {c.out_of_memory}")
        if c.peak_bytes is not None and c.argument_bytes is not None and c.temp_bytes is not None:
            state = m.params + m.optimizer + m.kv_cache
            pairs = {
                "arguments": (state, c.argument_bytes), "the rest": (m.total - state, c.temp_bytes),
                "peak": (m.total, c.peak_bytes),
            }  # fmt: skip
            told = [f"{k} predicted {a / _GIB:.2f}, compiled {b / _GIB:.2f}" for k, (a, b) in pairs.items()]
            of = f" of {c.available_bytes / _GIB:.2f}" if c.available_bytes else ""
            out.print(f"  HBM, GiB: {'; '.join(told)} ({m.total / c.peak_bytes - 1:+.0%}){of}")
        else:
            out.print("  memory: unverified")
        if v.audit is None:
            out.print(f"  messages: unverified; {c.no_collectives}")
            continue
        for row in v.audit.rows:
            out.print(
                f"  {'+'.join(row.axes) or '(no mesh axis)'} {row.op}: predicted {row.predicted.count} of"
                f" {row.predicted.moved / 1e9:.4g} GB, compiled {row.compiled.count} of"
                f" {row.compiled.moved / 1e9:.4g} GB"
            )
        out.print(f"  bytes unexplained: {v.audit.unexplained_share:.2%}")
        if v.candidate.workload.remat == "full" and v.compiled.libtpu_version:
            out.print(
                "  (under remat full the TPU compiler gathers a layer's weights once for making it again and"
                " for its gradients; the prediction counts both)"
            )


def measured(out: Console, found: list[Measured]) -> None:
    """What each took, beside the prediction."""
    out.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in (
        "mesh",
        ">step predicted",
        ">measured",
        ">predicted/measured",
        ">tokens/s measured",
        ">compile",
    ):
        table.add_column(name.lstrip(">"), justify="right" if name[0] == ">" else "left")
    for m in found:
        predicted = m.candidate.cost.total
        table.add_row(
            str(m.candidate.mesh), time_text(predicted), time_text(m.seconds), f"{predicted / m.seconds:.2f}",
            f"{m.candidate.cost.tokens / m.seconds:,.4g}", time_text(m.compile_seconds),
        )  # fmt: skip
    out.print(table)
    if len(found) > 1:
        quickest = min(found, key=lambda m: m.seconds)
        word = "as predicted" if quickest is found[0] else f"not {found[0].candidate.mesh}, as predicted"
        out.print(f"measured fastest: {quickest.candidate.mesh}, {word}")


def to_json(model: str, ranking: Ranking) -> dict[str, Any]:
    """Everything, for programs; see docs/planning.md."""
    request, system = ranking.request, ranking.system
    return {
        "model": model,
        "machine": {
            "name": str(system), "chip": system.chip.name, "shape": list(system.shape),
            "slices": system.slices, "devices": system.num_devices, "hbm_bytes": system.hbm,
            "usable_share": USABLE,
        },
        "request": {
            key: value for key, value in vars(request).items() if key != "config"
        },
        "candidates": [_candidate_json(c) for c in (*ranking.fitting, *ranking.refused)],
        "impossible": [{"mesh": mesh.sizes, "reason": reason} for mesh, reason in ranking.impossible],
    }  # fmt: skip


def _candidate_json(c: Candidate) -> dict[str, Any]:
    return {
        "mesh": c.mesh.sizes,
        "fits": not c.refused,
        "refused": c.refused,
        "head_layout": c.plan.head_layout,
        "remat": c.workload.remat,
        "grad_accum_steps": c.workload.grad_accum_steps,
        "micro_batch": c.micro_batch,
        "step_seconds": c.cost.total,
        "tokens_per_second_per_device": c.tokens_per_second,
        "mfu": c.mfu,
        "bound": c.cost.bound,
        "seconds": asdict(c.cost),
        "memory": asdict(c.memory) | {"total": c.memory.total},
        "links": {axis: asdict(link) for axis, link in c.hosting.links.items()},
    }
