"""Memory by class: what is called exact is the arrays', what is called an estimate is near the compiler's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import pytest

from shardwise.models.cache import cache_shape
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.planner.memory import kept_bytes, memory
from shardwise.planner.predict import Ledger
from shardwise.steps.build import build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import abstract_state
from shardwise.steps.workload import Workload

ODD = ModelConfig(
    vocab_size=101, embed_dim=36, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=4, mlp_dim=50,
    max_position=64,
)  # fmt: skip
LAYERS = 6
SMALL = ModelConfig(
    vocab_size=2048, embed_dim=128, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=352,
    max_position=1024,
)  # fmt: skip
MESHES = [MeshSpec(), MeshSpec(1, 4, 1), MeshSpec(1, 1, 4), MeshSpec(1, 2, 2), MeshSpec(2, 1, 3)]
REMATS = ("none", "dots", "full")


def on_a_device(tree: Any) -> int:
    """Bytes of one device's shards of arrays, numbers of training's bookkeeping left out."""
    leaves = [x for x in jax.tree.leaves(tree) if x.ndim]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parameters_gradients_and_optimizer_are_exactly_their_shards(mesh: MeshSpec, dtype: str) -> None:
    plan = plan_model(ODD, mesh)
    workload = Workload("train", 8, 8, param_dtype=dtype, optimizer=OptimizerConfig())
    state = abstract_state(plan, build_mesh(mesh, jax.devices()[: mesh.num_devices]), workload)
    found = memory(plan, workload)
    assert found.params == found.grads == on_a_device(state.params)
    assert found.optimizer == on_a_device(state.optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_cache_is_exactly_its_shards(mesh: MeshSpec, dtype: str) -> None:
    plan = plan_model(ODD, mesh)
    place = Placement(plan, build_mesh(mesh, jax.devices()[: mesh.num_devices]), jax.numpy.dtype(dtype))
    cache = cache_shape(place, 8, 16)
    workload = Workload("decode", 8, 1, capacity=16, compute_dtype=dtype)
    assert memory(plan, workload).kv_cache == on_a_device((cache.keys, cache.values))


@pytest.mark.parametrize("task", ["score", "prefill", "decode"])
def test_only_training_holds_gradients_and_an_optimizer(task: Any) -> None:
    workload = Workload(task, 8, 1 if task == "decode" else 8, capacity=8)
    found = memory(plan_model(ODD, MeshSpec()), workload)
    assert found.grads == found.optimizer == 0 < found.params < found.total


def training(remat: Any, length: int, dtype: str = "float32", mesh: MeshSpec = MeshSpec()) -> Ledger:  # noqa: B008
    workload = Workload(
        "train", 4, length, remat=remat, compute_dtype=dtype, optimizer=OptimizerConfig()
    )  # fmt: skip
    return Ledger(plan_model(SMALL, mesh), workload)


@lru_cache
def step(ledger_key: tuple[Any, ...]) -> Any:
    ledger = training(*ledger_key)
    return build_step(ledger.plan, ledger.workload, jax.devices()[: ledger.plan.mesh.num_devices])


# 64: one block of queries; 200: several, the last one short
@pytest.mark.parametrize("length", [64, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", REMATS)
def test_a_layer_keeps_exactly_what_its_loop_hands_to_the_backward_pass(
    remat: str, dtype: str, length: int
) -> None:
    built = step((remat, length, dtype))
    loops = [
        e
        for e in scans(jax.make_jaxpr(built.fn)(*built.abstract_args).jaxpr)
        if e.params["length"] == LAYERS and not e.params["reverse"]
    ]
    (layers,) = loops
    kept = [v.aval for v in layers.outvars[layers.params["num_carry"] :]]
    assert LAYERS * kept_bytes(training(remat, length, dtype), remat) == sum(
        x.size * x.dtype.itemsize for x in kept
    )


def scans(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from scans(inner)


# The CPU compiler holds bfloat16 as float32, so that only float32 can be compared.
@pytest.mark.parametrize("remat", REMATS)
def test_the_estimate_of_activations_is_within_a_factor_of_two_of_the_compiled_step(remat: str) -> None:
    built = step((remat, 200, "float32"))
    found = memory(built.plan, built.workload)
    compiled = built.lower().compile().memory_analysis().temp_size_in_bytes - found.grads
    assert 0.5 < found.activations / compiled < 2


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("mesh", [MeshSpec(1, 4, 1), MeshSpec(1, 2, 2), MeshSpec(1, 1, 4)], ids=str)
@pytest.mark.parametrize("remat", REMATS)
def test_so_it_is_on_a_mesh(remat: str, mesh: MeshSpec, length: int) -> None:
    built = step((remat, length, "float32", mesh))
    found = memory(built.plan, built.workload)
    compiled = built.lower().compile().memory_analysis().temp_size_in_bytes - found.grads
    assert 0.5 < found.activations / compiled < 2


def test_more_rematerialisation_takes_less() -> None:
    sizes = []
    for remat in REMATS:
        ledger = training(remat, 200)
        sizes.append(memory(ledger.plan, ledger.workload).activations)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


def test_tp_and_fsdp_divide_what_the_layers_keep() -> None:
    one = kept_bytes(training("full", 200), "full")
    assert kept_bytes(training("full", 200, mesh=MeshSpec(1, 4, 1)), "full") == one / 4
    whole, cut = (kept_bytes(training("none", 200, mesh=MeshSpec(1, 1, n)), "none") for n in (1, 2))
    residual = 6 * 4 * 200 * SMALL.embed_dim * 4 + 2 * SMALL.embed_dim * 4  # whole on each tp device
    assert cut - residual == (whole - residual) / 2
