"""What the compiler makes of real steps: FSDP gathers a layer at a time, tp-cut tensors stay cut."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Decision, Plan
from shardwise.planner.collectives import Collective
from shardwise.planner.partitioned import PartitionedModule, partitioned_module
from shardwise.steps import loss
from shardwise.steps.build import build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Task, Workload

LAYERS, ROWS, LENGTH = 3, 8, 12
# Sizes that differ from one another, so that a buffer's dims tell what it is.
CONFIG = ModelConfig(
    vocab_size=509, embed_dim=24, num_layers=LAYERS, num_heads=8, num_kv_heads=4, head_dim=10, mlp_dim=52,
    max_position=64, initializer_range=0.3,
)  # fmt: skip
MESHES = [MeshSpec(1, 4, 1), MeshSpec(1, 1, 4), MeshSpec(1, 2, 2)]
CACHED: list[Task] = ["prefill", "decode"]


def plan(mesh: MeshSpec) -> Plan:
    return plan_model(CONFIG, mesh)


@lru_cache
def audited(task: Task, mesh: MeshSpec, dtype: str = "float32", accum: int = 1) -> PartitionedModule:
    length = 1 if task == "decode" else LENGTH
    workload = Workload(
        task, ROWS, length, capacity=16, compute_dtype=dtype, grad_accum_steps=accum,
        optimizer=OptimizerConfig() if task == "train" else None,
    )  # fmt: skip
    return partitioned_module(build_step(plan(mesh), workload, jax.devices()[: mesh.num_devices]))


def collectives(task: Task, mesh: MeshSpec, dtype: str = "float32", accum: int = 1) -> list[Collective]:
    return audited(task, mesh, dtype, accum).collectives(mesh)


def path(c: Collective) -> str:
    """The parameter that is sent, "" if none is; layers of decoding under the stacked name."""
    name, colon, _ = c.cause.partition(": ")
    parts = [part for part in name.split("/") if not part.isdigit()]
    return "/".join(parts) if colon and not name.startswith("gradient of ") else ""


def gradient(c: Collective) -> str:
    """The parameter whose gradient is summed, "" if it is no gradient."""
    name, colon, _ = c.cause.partition(": ")
    return name.removeprefix("gradient of ") if colon and name.startswith("gradient of ") else ""


def fsdp_cut(mesh: MeshSpec) -> list[Decision]:
    return [d for d in plan(mesh).decisions if any("fsdp" in axes for axes in d.spec) and mesh.fsdp > 1]


def gathered_bytes(d: Decision, mesh: MeshSpec, itemsize: int) -> int:
    """Of one layer's weight, whole over fsdp and cut over tp."""
    tp = math.prod(mesh.size([axis for axis in axes if axis != "fsdp"]) for axes in d.spec)
    return itemsize * math.prod(d.shape[d.stacked :]) // tp


def check_gathers_of_training(mesh: MeshSpec, dtype: str, accum: int = 1) -> None:
    found = [c for c in collectives("train", mesh, dtype, accum) if c.op == "all-gather"]
    itemsize = 2 if dtype == "bfloat16" else 4
    want = []
    for d in fsdp_cut(mesh):
        # a layer's weights are gathered again for its backward pass, those at both ends only once
        phases, runs = (("forward", "backward"), LAYERS) if d.stacked else (("forward",), 1)
        loop = d.stacked or accum > 1
        want += [(d.path, p, gathered_bytes(d, mesh, itemsize), runs * accum, loop, dtype) for p in phases]
    got = [(path(c), c.phase, c.payload, c.count, c.in_loop, c.dtype) for c in found]
    assert sorted(got) == sorted(want)
    assert all(c.axes == ("fsdp",) for c in found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_training_gathers_each_weight_in_the_layer_loop_and_only_over_fsdp(mesh: MeshSpec) -> None:
    check_gathers_of_training(mesh, "float32")


def test_weights_travel_in_the_compute_dtype() -> None:
    check_gathers_of_training(MeshSpec(1, 2, 2), "bfloat16")


@pytest.mark.slow
def test_micro_batches_gather_again() -> None:
    check_gathers_of_training(MeshSpec(1, 2, 2), "float32", accum=2)


@pytest.mark.parametrize("mesh", [m for m in MESHES if m.fsdp > 1], ids=str)
def test_gradients_of_cut_weights_are_reduce_scattered_a_layer_at_a_time(mesh: MeshSpec) -> None:
    scattered = [c for c in collectives("train", mesh) if c.op == "reduce-scatter"]
    want = [(d.path, gathered_bytes(d, mesh, 4), LAYERS if d.stacked else 1) for d in fsdp_cut(mesh)]
    assert sorted((gradient(c), c.payload, c.count) for c in scattered) == sorted(want)
    assert all(c.axes == ("fsdp",) for c in scattered)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_gradient_is_summed_over_the_batch_axes_once(mesh: MeshSpec) -> None:
    summed = [c for c in collectives("train", mesh) if gradient(c)]
    want = plan(mesh).paths if mesh.fsdp > 1 else ()
    assert sorted(gradient(c) for c in summed) == sorted(want)
    assert all(c.axes == ("fsdp",) for c in summed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_kinds_of_data_parallelism_scatter_over_one_and_reduce_over_the_other(dtype: str) -> None:
    mesh = MeshSpec(2, 2, 2)
    check_gathers_of_training(mesh, dtype)
    found = collectives("train", mesh, dtype)
    scattered = {gradient(c): c for c in found if c.op == "reduce-scatter"}
    reduced = {gradient(c): c for c in found if c.axes == ("dp",)}
    assert scattered.keys() == reduced.keys() == {d.path for d in fsdp_cut(mesh)}
    # the embedding's gradient is summed over dp before it is cut, which shard_map's own derivative decides
    cut_first = scattered.keys() - {"embed/table"}
    assert all(scattered[name].payload == mesh.fsdp * reduced[name].payload for name in cut_first)


@pytest.mark.parametrize("task", CACHED)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_serving_gathers_each_weight_once_and_only_over_fsdp(task: Task, mesh: MeshSpec) -> None:
    gathered = [c for c in collectives(task, mesh) if c.op == "all-gather" and path(c)]
    want = [
        (d.path, gathered_bytes(d, mesh, 4)) for d in fsdp_cut(mesh) for _ in range([1, LAYERS][d.stacked])
    ]
    assert sorted((path(c), c.payload) for c in gathered) == sorted(want)
    assert all(c.axes == ("fsdp",) and c.count == 1 for c in gathered)


@pytest.mark.parametrize("task", ["train", *CACHED])
@pytest.mark.parametrize("mesh", [m for m in MESHES if m.tp > 1], ids=str)
def test_a_look_up_sums_the_rows_found_and_does_not_gather_the_table_over_tp(
    task: Task, mesh: MeshSpec
) -> None:
    found = [c for c in collectives(task, mesh) if "look_up" in c.cause and c.phase == "forward"]
    over_tp = [(c.op, c.payload) for c in found if c.axes == ("tp",)]
    length = 1 if task == "decode" else LENGTH
    assert over_tp == [("all-reduce", ROWS // mesh.fsdp * length * CONFIG.embed_dim * 4)]


@pytest.mark.parametrize("task", ["train", *CACHED])
@pytest.mark.parametrize("mesh", [m for m in MESHES if m.tp > 1], ids=str)
def test_nothing_as_wide_as_the_vocabulary_exists_when_tp_cuts_it(task: Task, mesh: MeshSpec) -> None:
    wide = {CONFIG.vocab_size, plan(mesh).padding.vocab}
    assert [b.instruction.name for b in audited(task, mesh).buffers() if wide & set(b.shape)] == []


@pytest.mark.parametrize("mesh", [MeshSpec(1, 1, 4), MeshSpec(1, 2, 2)], ids=str)
def test_logits_of_training_exist_for_one_chunk_and_one_shard(
    mesh: MeshSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = plan(mesh).padding.vocab // mesh.tp
    rows, positions = ROWS // mesh.fsdp, 5
    monkeypatch.setattr(loss, "CHUNK_BYTES", rows * positions * vocab * 4)
    chunk = loss.chunk_length(rows, LENGTH, vocab)
    assert chunk < LENGTH
    # its own workload: steps are kept by workload, and must be built under the small chunk
    workload = Workload("train", ROWS, LENGTH, z_loss=0.125, optimizer=OptimizerConfig())
    module = partitioned_module(build_step(plan(mesh), workload, jax.devices()[: mesh.num_devices]))
    table = {CONFIG.embed_dim, CONFIG.embed_dim // mesh.fsdp}
    logits = [
        b for b in module.buffers() if vocab in b.shape and not table & set(b.shape) and b.dtype != "bool"
    ]
    assert max(b.bytes for b in logits) == rows * chunk * vocab * 4
    over_tp = [c for c in module.collectives(mesh) if "Columns." in c.cause and c.axes == ("tp",)]
    assert {(c.payload, c.count) for c in over_tp} == {(rows * chunk * 4, -(-LENGTH // chunk))}


@pytest.mark.parametrize("mesh", [MeshSpec(1, 4, 1), MeshSpec(1, 2, 2)], ids=str)
def test_devices_share_the_products_of_one(mesh: MeshSpec) -> None:
    padded = plan(mesh).padding.vocab - CONFIG.vocab_size
    one, each = audited("train", MeshSpec()).flops().total, audited("train", mesh).flops().total
    # the head's product and its two gradients also run over padding
    extra = 3 * 2 * ROWS * LENGTH * CONFIG.embed_dim * padded
    assert each * mesh.num_devices == one + extra


def test_a_greedy_step_sends_no_more_than_a_few_numbers_a_row_to_choose() -> None:
    mesh = MeshSpec(1, 1, 4)
    choosing = [c for c in collectives("decode", mesh) if "sampling.py" in c.cause]
    assert [(c.op, c.payload) for c in choosing] == [("all-reduce", ROWS * 4)] * 2
