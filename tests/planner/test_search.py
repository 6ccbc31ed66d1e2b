"""The search: every mesh is looked at, what is said to fit fits, and the order follows the objective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.families import config_from_hf
from shardwise.families.presets import preset
from shardwise.planner.hardware import System, parse_system
from shardwise.planner.memory import memory
from shardwise.planner.search import USABLE, Objective, Request, fewest, meshes, search, sizes

EIGHT = config_from_hf(preset("llama3-8b"))
SMALL = config_from_hf(preset("smollm2-135m"))


def system(on: str) -> System:
    return parse_system(on)[0]


def request(task: Any = "train", batch: int = 64, length: int = 4096, **more: Any) -> Request:
    more.setdefault("param_dtype", "float32" if task == "train" else "bfloat16")
    return Request(EIGHT, task, batch, length, **more)


def test_every_factoring_of_the_devices_is_named_once() -> None:
    found = [tuple(mesh.sizes.values()) for mesh in meshes(12)]
    wanted = {(a, b, c) for a in range(1, 13) for b in range(1, 13) for c in range(1, 13) if a * b * c == 12}
    assert len(found) == len(set(found)) and set(found) == wanted


def test_each_mesh_ends_up_in_one_place_with_a_reason() -> None:
    ranking = search(request(batch=48), system("v5e:4x4"))
    meshes_seen = [
        *(c.mesh for c in ranking.fitting), *(c.mesh for c in ranking.refused),
        *(mesh for mesh, _ in ranking.impossible),
    ]  # fmt: skip
    assert sorted(map(str, meshes_seen)) == sorted(map(str, meshes(16)))
    assert all(c.refused for c in ranking.refused) and all(reason for _, reason in ranking.impossible)
    assert all(not c.refused for c in ranking.fitting)


def test_what_fits_is_predicted_to_fit_and_the_fastest_comes_first() -> None:
    ranking = search(request(), system("h100:8"))
    assert ranking.fitting
    for c in ranking.fitting:
        assert memory(c.plan, c.workload).total == c.memory.total <= system("h100:8").hbm * USABLE
        c.workload.check(c.plan)
    times = [c.cost.total for c in ranking.fitting]
    assert times == sorted(times)


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_the_order_follows_the_objective(objective: Objective) -> None:
    ranking = search(request(objective=objective), system("h100:16"))
    values = [c.memory.total if objective == "memory" else c.cost.total for c in ranking.fitting]
    assert values == sorted(values) and len(values) > 3


def test_remat_and_micro_batches_come_in_only_where_memory_asks_for_them() -> None:
    roomy = search(replace(request(batch=8, length=512), config=SMALL), system("h100:8")).fitting[0]
    assert (roomy.workload.remat, roomy.workload.grad_accum_steps) == ("none", 1)
    tight = search(request(batch=256, length=8192), system("h100:8")).fitting[0]
    assert (tight.workload.remat, tight.workload.grad_accum_steps) != ("none", 1)


def test_what_is_asked_for_is_kept() -> None:
    asked = request(remat="full", grad_accum_steps=4, head_layout="hidden")
    for c in search(asked, system("h100:8")).fitting:
        assert (c.workload.remat, c.workload.grad_accum_steps) == ("full", 4)
        assert c.mesh.tp == 1 or c.plan.head_layout == "hidden"


def test_a_batch_that_a_mesh_does_not_divide_is_a_reason() -> None:
    reasons = {str(mesh): reason for mesh, reason in search(request(batch=6), system("h100:8")).impossible}
    assert reasons["dp:1,fsdp:4,tp:2"] == "6 sequences do not divide over 4; 4 or 8 do"
    assert reasons["dp:8,fsdp:1,tp:1"] == "6 sequences leave 2 of dp 8 × fsdp 1 without one"


def test_a_step_that_is_too_slow_is_no_answer() -> None:
    quick = request("decode", batch=16, length=4096)
    free = search(quick, system("v5e:4x4"))
    limit = free.fitting[0].cost.total * 1.01
    bound = search(replace(quick, max_latency=limit), system("v5e:4x4"))
    assert len(bound.fitting) < len(free.fitting)
    assert all(c.cost.total <= limit for c in bound.fitting)
    assert any("a step takes" in c.refused for c in bound.refused)


def test_the_fewest_devices_are_those_below_which_nothing_fits() -> None:
    asked = request(batch=64, length=4096)
    found = fewest(asked, system("h100"))
    assert found is not None and found.fitting
    for smaller in sizes(system("h100")):
        if smaller.num_devices < found.system.num_devices:
            assert not search(asked, smaller).fitting


def test_the_fewest_devices_need_not_be_a_power_of_two() -> None:
    asked = Request(config_from_hf(preset("llama3-70b")), "train", 63, 4096, objective="devices")
    found = fewest(asked, system("h100:8"))
    assert found is not None and found.system.num_chips == 24


def test_the_fewest_devices_lie_in_nodes_like_those_given() -> None:
    asked = Request(config_from_hf(preset("llama3-8b")), "train", 64, 4096)
    found = fewest(asked, system("h100x8"))
    assert found is not None and found.system.slice_chips == 1


def test_the_least_memory_takes_as_many_micro_batches_as_it_needs() -> None:
    asked = request(batch=1024, length=512, objective="memory")
    least = search(asked, system("v5e:4x4")).fitting[0].memory.total
    for steps in (1, 2, 8, 64):
        found = search(replace(asked, grad_accum_steps=steps), system("v5e:4x4"))
        assert all(c.memory.total >= least for c in found.fitting)


@pytest.mark.parametrize("doubling", [True, False])
def test_machines_rise_in_size(doubling: bool) -> None:
    for on in ("h100", "v5p-8", "v5e-1", "tpu7x-8", "h100x4"):
        counts = [machine.num_chips for machine in sizes(system(on), doubling=doubling)]
        assert counts == sorted(set(counts)) and len(counts) > 4


def test_70b_on_512_devices_takes_full_fsdp_and_leaves_tp_out() -> None:
    config = config_from_hf(preset("llama3-70b"))
    best = search(Request(config, "train", 1024, 4096), system("h100:512")).fitting[0]
    assert best.mesh.tp == 1
    # With a sequence or less a device there is nothing left for fsdp to split: tp must come in.
    few = search(Request(config, "train", 64, 4096), system("h100:512")).fitting[0]
    assert few.mesh.tp > 1
