"""What is said of a plan before anything runs: figures that agree with each other, reasons, drawings."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import jax
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.flops import parameter_count
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import Override
from shardwise.planner.explain import Explanation, explain
from shardwise.planner.explain_command import swapped
from shardwise.planner.explain_view import drawing
from shardwise.planner.reasons import reason
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Task, Workload

CONFIG = ModelConfig(
    vocab_size=101, embed_dim=24, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=52,
    max_position=64,
)  # fmt: skip
BOTH = MeshSpec(1, 2, 2)
TASKS: list[Task] = ["train", "score", "logits", "prefill", "decode"]


def workload(task: Task, batch: int = 8) -> Workload:
    return Workload(
        task, batch, 1 if task == "decode" else 12, capacity=16 if task in ("prefill", "decode") else 0,
        optimizer=OptimizerConfig() if task == "train" else None,
    )  # fmt: skip


def explained(task: Task, mesh: MeshSpec = BOTH, rules: str = "fsdp+tp") -> Explanation:
    return explain(plan_model(CONFIG, mesh, PRESETS[rules]), workload(task))


@pytest.mark.parametrize("task", TASKS)
def test_the_json_has_its_eight_keys_and_no_other(task: Task) -> None:
    want = ["model", "mesh", "workload", "tensors", "activations", "totals", "memory", "fallbacks"]
    assert list(explained(task).to_json("name")) == want


@pytest.mark.parametrize("rules", PRESETS)
@pytest.mark.parametrize("task", TASKS)
def test_bytes_of_the_tensors_add_up_to_the_memory_of_parameters(task: Task, rules: str) -> None:
    found = explained(task, rules=rules).to_json("")
    assert sum(t["bytes_per_device"] for t in found["tensors"]) == found["memory"]["params"]


@pytest.mark.parametrize("task", TASKS)
def test_totals_are_the_sums_over_all_collectives(task: Task) -> None:
    found = explained(task).to_json("")
    sums: Counter[tuple[str, ...]] = Counter()
    counts: Counter[tuple[str, ...]] = Counter()
    for c in [*found["totals"]["of_no_tensor"], *(c for t in found["tensors"] for c in t["collectives"])]:
        sums[*c["axes"], c["op"]] += c["moved"]
        counts[*c["axes"], c["op"]] += c["count"]
    totals = {(*t["axes"], t["op"]): (t["count"], t["moved"]) for t in found["totals"]["collectives"]}
    assert {key: count for key, (count, _) in totals.items()} == counts
    assert {key: moved for key, (_, moved) in totals.items()} == pytest.approx(sums)


@pytest.mark.parametrize("task", TASKS)
def test_flops_of_tensors_and_attention_are_all_flops(task: Task) -> None:
    found = explained(task).to_json("")
    totals = found["totals"]
    of_tensors = sum(t["flops_per_device"] for t in found["tensors"])
    assert of_tensors + totals["attention_flops_per_device"] == totals["flops_per_device"] > of_tensors > 0


@pytest.mark.parametrize("mesh", [MeshSpec(), BOTH, MeshSpec(1, 1, 8), MeshSpec(1, 5, 3)], ids=str)
def test_parameters_are_counted_without_padding(mesh: MeshSpec) -> None:
    plan = plan_model(CONFIG, mesh)
    found = explain(plan, workload("train", 10)).to_json("")
    D, H, K, E, F, V = 24, 8, 4, 4, 52, 101
    layer = 2 * D * H * E + 2 * D * K * E + 3 * D * F + 2 * D
    assert found["totals"]["parameters"] == parameter_count(plan) == 3 * layer + 2 * V * D + D


def test_padding_is_told_as_a_share_of_the_true_parameters() -> None:
    plan = plan_model(CONFIG, MeshSpec(1, 1, 8))
    stored = sum(math.prod(d.shape) for d in plan.decisions)
    assert explain(plan, workload("train")).padding_share == stored / parameter_count(plan) - 1 > 0


@pytest.mark.parametrize("task", TASKS)
def test_a_tensor_on_one_device_causes_nothing(task: Task) -> None:
    assert explained(task, MeshSpec()).collectives == ()


def test_a_cache_is_among_the_activations_only_where_there_is_one() -> None:
    with_cache = [task for task in TASKS if any(a.name == "kv_cache" for a in explained(task).activations)]
    assert with_cache == ["prefill", "decode"]


def test_logits_of_training_are_those_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.steps.loss.CHUNK_BYTES", 4 * 51 * 5 * 4)
    logits = next(a for a in explained("train").activations if a.name == "logits")
    assert (logits.shape, logits.bytes_per_device) == ((8, 4, 102), 4 * 4 * 51 * 4)


REASONS = {
    "layers/attn/q_proj/kernel": "column-parallel: output cut over tp, no communication forward; pairs with"
    " o_proj, whose all-reduce closes the block",
    "layers/attn/o_proj/kernel": "row-parallel: input cut over tp; the all-reduce of its partial sums is the"
    " only communication and closes the attention block",
    "layers/mlp/up_proj/kernel": "column-parallel: output cut over tp, no communication forward; pairs with"
    " down_proj, whose all-reduce closes the block",
    "layers/mlp/down_proj/kernel": "row-parallel: input cut over tp; the all-reduce of its partial sums is"
    " the only communication and closes the mlp block",
    "embed/table": "look-up, vocabulary cut over tp: each device looks up its own ids",
    "lm_head/kernel": "head, vocabulary cut over tp: logits stay cut",
    "final_norm/scale": "a vector of the norm; whole on each device",
}


@pytest.mark.parametrize("rules", ["fsdp+tp", "tp", "easylm"])
@pytest.mark.parametrize("path", REASONS)
def test_the_reason_of_a_cut_with_the_grain(path: str, rules: str) -> None:
    plan = plan_model(CONFIG, BOTH, PRESETS[rules])
    assert reason(plan, plan[path]).startswith(REASONS[path])


@pytest.mark.parametrize("path", [path for path in REASONS if path.endswith("kernel")])
def test_only_what_fsdp_cuts_is_said_to_be_gathered(path: str) -> None:
    told = {}
    for rules in PRESETS:
        plan = plan_model(CONFIG, BOTH, PRESETS[rules])
        told[rules] = "gathered just before use" in reason(plan, plan[path])
    assert told == {"fsdp+tp": True, "fsdp": True, "tp": False, "easylm": True, "replicated": False}


@pytest.mark.parametrize("rules", ["fsdp", "replicated"])
def test_a_product_that_all_tp_devices_repeat_is_called_that(rules: str) -> None:
    plan = plan_model(CONFIG, BOTH, PRESETS[rules])
    words = reason(plan, plan["layers/mlp/up_proj/kernel"])
    assert words.startswith("not cut at use: every device computes all of it, and the tp devices repeat")


SWAPS = {
    "q_proj": "row-parallel: input cut over tp, so that each device takes its slice of residual; partial",
    "o_proj": "column-parallel: output cut over tp, but attention_out and residual must be gathered for it",
    "up_proj": "row-parallel: input cut over tp, so that each device takes its slice of residual; partial",
    "down_proj": "column-parallel: output cut over tp, but mlp_hidden and residual must be gathered for it",
    "embed/table": "look-up, hidden dim cut over tp: each device has its part of every row",
    "lm_head": "head, hidden dim cut over tp: each device has a part of every logit",
}


@pytest.mark.parametrize("name", SWAPS)
def test_the_reason_of_a_cut_against_the_grain(name: str) -> None:
    plan = swapped(plan_model(CONFIG, MeshSpec(1, 1, 2)), name)
    path = next(path for path in plan.paths if name in path)
    assert reason(plan, plan[path]).startswith(SWAPS[name])
    if path.startswith("layers/"):
        assert reason(plan, plan[path]).endswith("a cut against the grain")


def test_a_tied_table_gives_a_reason_for_both_its_uses() -> None:
    plan = plan_model(ModelConfig(**(vars(CONFIG) | {"tie_embeddings": True})), MeshSpec(1, 1, 2))
    words = reason(plan, plan["embed/table"])
    assert words.startswith("look-up and head") and "joins the rows; logits stay cut" in words


DRAWN = [
    ("fsdp+tp", BOTH), ("fsdp+tp", MeshSpec(2, 2, 2)), ("fsdp", BOTH), ("tp", MeshSpec(2, 1, 4)),
    ("replicated", BOTH), ("fsdp+tp", MeshSpec(1, 1, 8)), ("q_proj=None,None,None,(tp,fsdp)", BOTH),
    ("up_proj=(fsdp,tp),None", BOTH), ("up_proj=fsdp,tp", MeshSpec(2, 2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("path", ["embed/table", "layers/attn/q_proj/kernel", "layers/mlp/up_proj/kernel"])
@pytest.mark.parametrize(("rules", "mesh"), DRAWN, ids=lambda value: str(value))
def test_a_drawing_shows_each_device_in_the_parts_that_jax_gives_it(
    rules: str, mesh: MeshSpec, path: str
) -> None:
    overrides = [Override.parse(rules)] if "=" in rules else []
    plan = plan_model(CONFIG, mesh, PRESETS.get(rules), overrides)
    assert drawn(plan, path) == held(plan, path)


def held(plan: Plan, path: str) -> dict[str, list[str]]:
    """Device, by its place on the axes that have several → parts of the cut dims, as JAX lays them out."""
    d, mesh = plan[path], build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    cut = [dim for dim, axes in enumerate(d.spec) if plan.mesh.size(axes) > 1]
    parts = {}
    shape = mesh.devices.shape
    places = dict(zip(mesh.devices.flat, product(*map(range, shape)), strict=True))
    for device, slices in plan.sharding(mesh, path).devices_indices_map(d.shape).items():
        long = [n for n, size in zip(places[device], shape, strict=True) if size > 1]
        name = "".join(map(str, long))
        parts[name] = [f"{d.axes[dim]}[{slices[dim].start}:{slices[dim].stop}]" for dim in cut]
    return parts


def drawn(plan: Plan, path: str) -> dict[str, list[str]]:
    """The same, read off the drawing."""
    lines = drawing(plan[path], plan)
    if len(lines) == 1:
        assert lines == [f"all of it on each of {plan.mesh.num_devices} devices"]
        sizes = [size for size in plan.mesh.sizes.values() if size > 1]
        return {"".join(map(str, place)): [] for place in product(*map(range, sizes))}
    table = lines[1:]
    columns = table.pop(0).split() if "|" not in table[0] else []
    found = {}
    for line in table:
        row, *cells = [part for part in line.replace("|", "\n").split("\n") if part.strip()]
        for cell, column in zip(cells, columns or [""], strict=True):
            for device in cell.split():
                assert device not in found
                found[device] = [row.strip(), *filter(None, [column])]
    return found


def test_a_large_drawing_says_what_it_leaves_out() -> None:
    lines = drawing(
        plan_model(CONFIG, MeshSpec(1, 1, 52))["layers/mlp/up_proj/kernel"],
        plan_model(CONFIG, MeshSpec(1, 1, 52)),
    )
    assert len(lines) == 18 and lines[-1] == "… 52 parts in all"
