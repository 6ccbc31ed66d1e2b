"""The compiled step is what was predicted: bytes, runs and FLOPs of every kind; and what an audit tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.planner.audits import (
    ALL,
    BIASED,
    BOTH,
    FSDP,
    LAYERS,
    LLAMA,
    REPEATED,
    SEQUENCE,
    TIED,
    TP,
    UNEVEN,
    Case,
    as_expected,
)

from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Decision
from shardwise.partition.presets import PRESETS
from shardwise.planner.audit import Audit, _left_over
from shardwise.planner.collectives import Collective
from shardwise.planner.predict import predict

TWO = MeshSpec(1, 1, 2)
MATRIX = [Case(task, mesh) for task in ("train", "prefill", "decode") for mesh in (FSDP, TP, BOTH)]
# without a layout asked for, the rules cut the vocabulary
HEADS = [Case(head="hidden"), Case(head="replicated")]
HEADS += [Case(config=TIED), Case(head="hidden", config=TIED)]
FEW = [
    Case(mesh=TWO, config=UNEVEN), Case(config=REPEATED), Case(config=BIASED, head="hidden"),
    Case(more=(("remat", "full"), ("compute_dtype", "bfloat16"))),
    Case(more=(("remat", "dots"), ("grad_accum_steps", 2))),
    Case(rules=SEQUENCE), Case("decode", rules=SEQUENCE), Case(rules=PRESETS["fsdp"]),
    Case("score"), Case("logits"), *(Case("decode", head=head, more=(("choose", choose),))
                                     for head, choose in (("vocab", "sample"), ("hidden", "logits"))),
]  # fmt: skip
KERNELS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("case", [*MATRIX, *HEADS, *FEW], ids=str)
def test_the_compiled_step_moves_and_computes_what_was_predicted(case: Case) -> None:
    assert as_expected(case.audit) == []


# --- proofs on compiled steps alone


def moved(a: Audit) -> Counter[tuple[str, ...]]:
    """(op, axes…) → compiled bytes that a device sends, without single numbers of losses and norms."""
    sums: Counter[tuple[str, ...]] = Counter()
    for c in a.compiled:
        if c.payload > 8:
            sums[c.op, *c.axes] += round(c.moved(a.plan.mesh))
    return sums


def test_swapping_an_fsdp_dim_changes_nothing_but_single_numbers() -> None:
    before, after = Case().audit, Case(swap="o_proj:fsdp").audit
    assert moved(before) == moved(after)
    assert before.compiled_flops == after.compiled_flops


def test_swapping_a_tp_dim_adds_what_the_two_predictions_differ_by() -> None:
    before, after = Case(), Case(swap="o_proj:tp")
    predicted = [predict(case.plan, case.workload).collectives for case in (before, after)]
    foreseen = [sum(c.moved(BOTH) for c in collectives) for collectives in predicted]
    assert after.audit.moved - before.audit.moved == foreseen[1] - foreseen[0] > 0
    assert moved(before.audit) != moved(after.audit)


def is_weight(c: Collective, d: Decision) -> bool:
    """Whether a compiled collective sends this parameter; its layers may have names of their own."""
    name, colon, _ = c.cause.partition(": ")
    parts = [part for part in name.split("/") if not part.isdigit()]
    return bool(colon) and "/".join(parts) == d.path


@pytest.mark.parametrize("mesh", [FSDP, BOTH], ids=str)
def test_fsdp_gathers_each_layers_weights_inside_the_layer_loop(mesh: MeshSpec) -> None:
    found = Case(mesh=mesh).audit
    cut = [d for d in found.plan.decisions if d.stacked and any("fsdp" in axes for axes in d.spec)]
    assert len(cut) == len(KERNELS)
    for d in cut:
        gathers = [c for c in found.compiled if c.op == "all-gather" and is_weight(c, d)]
        assert [(c.axes, c.count, c.in_loop) for c in gathers] == [(("fsdp",), LAYERS, True)] * 2, d.path


@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
@pytest.mark.parametrize("mesh", [TP, BOTH], ids=str)
def test_no_weight_that_tp_cuts_is_gathered_over_tp(mesh: MeshSpec, task: str) -> None:
    found = Case(task, mesh).audit  # type: ignore[arg-type]
    cut = [d for d in found.plan.decisions if any("tp" in axes for axes in d.spec)]
    over_tp = [c for c in found.compiled if "tp" in c.axes and c.op != "all-reduce"]
    assert len(cut) == len(KERNELS) + 2
    assert [c for c in over_tp if any(is_weight(c, d) for d in cut)] == []
    assert not any(c.op == "all-gather" for c in over_tp)


@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
def test_four_devices_of_tp_share_the_products_of_one(task: str) -> None:
    one, four = (Case(task, mesh).audit.compiled_flops for mesh in (MeshSpec(), TP))  # type: ignore[arg-type]
    assert one == 4 * four


# --- what an audit tells


def wrong(a: Audit) -> Audit:
    """The audit, had o_proj's all-reduce not been foreseen, and a gather that is not there been."""
    extra = Collective("all-gather", ("tp",), "float32", 12345, 3, False, "forward", "made up")
    predicted = (*(c for c in a.predicted if "o_proj" not in c.cause or "tp" not in c.axes), extra)
    unexplained, absent = _left_over(predicted, a.compiled)
    return replace(a, predicted=predicted, unexplained=unexplained, absent=absent)


def test_a_wrong_prediction_leaves_what_is_unexplained_with_its_source_line() -> None:
    found = wrong(Case(mesh=TP).audit)
    big = [c for c in found.unexplained if c.payload > 8]
    assert [(c.op, c.axes, c.count, c.in_loop) for c in big] == [("all-reduce", ("tp",), LAYERS, True)]
    assert all(".py:" in c.cause for c in found.unexplained)
    assert "models/transformer.py:" in big[0].cause


def test_a_wrong_prediction_leaves_what_is_absent() -> None:
    found = wrong(Case(mesh=TP).audit)
    assert [(c.cause, c.payload, c.count) for c in found.absent] == [("made up", 12345, 3)]


def test_the_unexplained_share_counts_both_over_all_bytes_compiled() -> None:
    found = wrong(Case(mesh=TP).audit)
    odd = sum(c.moved(TP) for c in (*found.unexplained, *found.absent))
    assert found.unexplained_share == odd / sum(c.moved(TP) for c in found.compiled) > 0.01
    assert Case(mesh=TP).audit.unexplained_share == 0


def test_rows_put_both_sides_of_each_kind_next_to_each_other() -> None:
    rows = {(row.op, row.axes): row for row in wrong(Case(mesh=TP).audit).rows}
    reduced, gathered = rows["all-reduce", ("tp",)], rows["all-gather", ("tp",)]
    assert reduced.compiled.count - reduced.predicted.count > 0
    assert (gathered.predicted.count, gathered.compiled.count) == (3, 0)


def test_more_runs_than_foreseen_leave_only_the_excess() -> None:
    one = Collective("all-gather", ("tp",), "float32", 100, 5, True, "forward", "x")
    unexplained, absent = _left_over([replace(one, count=3)], [one])
    assert unexplained == (replace(one, count=2),) and absent == ()


# --- the full matrix

PRESET_HEADS = [
    Case(rules=rules, head=head) for rules in PRESETS.values() for head in ("vocab", "hidden", "replicated")
]
SWAPS = [
    Case(task, swap=f"{name}:{axis}")
    for task in ("train", "prefill", "decode")
    for name in (*KERNELS, "embed/table", "lm_head")
    for axis in ("tp", "fsdp")
]  # fmt: skip
SLOW = [
    *(Case(task, ALL) for task in ("train", "prefill", "decode", "score", "logits")),
    *(Case(task, mesh) for task in ("score", "logits") for mesh in (FSDP, TP)),
    *PRESET_HEADS, *SWAPS,
    *(Case("decode", head=head, config=config, more=(("choose", choose),))
      for head in ("vocab", "hidden", "replicated") for config in (LLAMA, TIED)
      for choose in ("greedy", "sample", "logits")),
    *(Case(mesh=mesh, config=config) for mesh in (TP, ALL, MeshSpec(1, 1, 3), MeshSpec(1, 1, 5))
      for config in (UNEVEN, REPEATED, BIASED)),
    *(Case(swap=f"{name}:tp", more=(("remat", remat),)) for name in KERNELS for remat in ("full", "dots")),
    *(Case(swap=f"{name}:tp", rules=SEQUENCE) for name in KERNELS),
    *(Case(head=head, rules=SEQUENCE, more=more) for head in ("hidden", "replicated")
      for more in ((), (("remat", "full"),))),
    Case(more=(("grad_accum_steps", 2), ("compute_dtype", "bfloat16"), ("z_loss", 0.1))),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_every_step_moves_and_computes_what_was_predicted(case: Case) -> None:
    assert as_expected(case.audit) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNELS, "embed/table", "lm_head"])
def test_swapping_any_fsdp_dim_changes_nothing_but_single_numbers(name: str) -> None:
    assert moved(Case().audit) == moved(Case(swap=f"{name}:fsdp").audit)
