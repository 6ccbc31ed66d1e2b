"""Steps compiled by the TPU compiler, which needs no TPU: memory to the byte, refusals, a TPU's own path."""

from __future__ import annotations

import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from shardwise.errors import ConfigError, MeshError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.planner.memory import parameter_bytes
from shardwise.planner.verify import CompiledStep, compile_for_tpu, compile_on_fake_devices
from shardwise.steps.build import build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install 'shardwise[tpu-compiler]'",
    ),
]

# Sizes of whole tiles on two devices, so that nothing is padded.
CONFIG = ModelConfig(
    vocab_size=2048, embed_dim=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=512,
    max_position=1024,
)  # fmt: skip
MESH = MeshSpec(1, 2, 2)
PLAN = plan_model(CONFIG, MESH)
# In micro-batches, with a head of its own: at moving that head's gradient out of the loop the compiler fails.
TRAIN = Workload(
    "train", 8, 512, compute_dtype="bfloat16", remat="full", optimizer=OptimizerConfig(), grad_accum_steps=2
)


@pytest.fixture(scope="module")
def compiled() -> CompiledStep:
    return compile_for_tpu(PLAN, TRAIN, "v5e:2x2")


def test_arguments_are_the_state_and_the_batch_and_all_of_the_state_is_donated(
    compiled: CompiledStep,
) -> None:
    mesh = build_mesh(MESH, jax.devices()[:4])
    state, batch = build_step(PLAN, TRAIN, list(mesh.devices.flat)).abstract_args

    def held(tree: object) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
        )

    # Scalars and short vectors lie in tiles of their own, of 512 bytes up to a few thousand.
    slack = 4096 * len(jax.tree.leaves((state, batch)))
    assert compiled.argument_bytes is not None
    assert compiled.alias_bytes is not None
    assert 0 <= compiled.argument_bytes - held((state, batch)) <= slack
    assert 0 <= compiled.alias_bytes - held(state) <= slack
    assert compiled.alias_bytes >= 3 * parameter_bytes(PLAN, "float32")


def test_the_sums_and_the_machine_code_are_there_and_nothing_is_refused(compiled: CompiledStep) -> None:
    c = compiled
    sizes = (c.argument_bytes, c.output_bytes, c.alias_bytes, c.temp_bytes, c.peak_bytes, c.available_bytes)
    arguments, outputs, aliased, temporaries, peak, available = (size or 0 for size in sizes)
    assert peak == arguments + outputs - aliased + temporaries
    assert 0 < peak < available
    assert c.code_bytes
    assert c.out_of_memory is None
    live = [buffer.bytes for buffer in c.live]
    assert live == sorted(live, reverse=True)
    assert 0 < sum(live) <= temporaries


def test_attention_is_the_tpu_s_fused_kernel_and_not_the_processor_s_products(compiled: CompiledStep) -> None:
    xla = compile_for_tpu(PLAN, replace(TRAIN, kernel="xla"), "v5e:2x2", machine_code=False)
    assert compiled.product_flops is not None
    assert xla.product_flops is not None
    assert compiled.product_flops < xla.product_flops  # those inside a kernel are not seen


def test_collectives_that_split_the_gradients_are_those_of_simulated_devices(compiled: CompiledStep) -> None:
    assert compiled.collectives is not None
    simulated = compile_on_fake_devices(PLAN, TRAIN)
    assert simulated.collectives is not None

    def scattered(step: CompiledStep) -> list[tuple[tuple[str, ...], int]]:
        found = step.collectives or ()
        return sorted((c.axes, c.payload) for c in found if c.op == "reduce-scatter" for _ in range(c.count))

    assert scattered(compiled) == scattered(simulated)


def test_a_step_that_does_not_fit_is_a_record_with_the_overrun_to_the_byte(tmp_path: Path) -> None:
    large = plan_model(replace(CONFIG, embed_dim=8192, mlp_dim=28672, num_layers=16), MESH)
    record = compile_for_tpu(large, TRAIN, "v5e:2x2", cache=tmp_path)
    assert record.overrun is not None
    assert record.overrun.needed_bytes == record.peak_bytes
    assert record.overrun.available_bytes == pytest.approx(15.75 * 2**30, rel=1e-6)
    assert record.out_of_memory is not None
    assert "GiB more than the 15.75 GiB that there are" in record.out_of_memory
    # The compiler's own figure has two decimals.
    said = float(record.overrun.message.split("(")[1].split("G)")[0])
    assert record.overrun.needed_bytes / 2**30 == pytest.approx(said, abs=0.006)
    again = compile_for_tpu(large, TRAIN, "v5e:2x2", cache=tmp_path)
    assert again.cached
    assert again == record


def test_memory_alone_is_the_same_and_a_record_of_it_does_not_pass_for_machine_code(
    compiled: CompiledStep, tmp_path: Path
) -> None:
    quick = compile_for_tpu(PLAN, TRAIN, "v5e:2x2", machine_code=False, cache=tmp_path)
    assert quick.code_bytes is None
    assert (quick.peak_bytes, quick.temp_bytes) == (compiled.peak_bytes, compiled.temp_bytes)
    assert compile_for_tpu(PLAN, TRAIN, "v5e:2x2", machine_code=False, cache=tmp_path).cached
    full = compile_for_tpu(PLAN, TRAIN, "v5e:2x2", cache=tmp_path)
    assert not full.cached
    assert full.code_bytes == compiled.code_bytes


def test_two_compilations_run_at_once() -> None:
    topologies = ("v5p:2x2x1", "v6e:2x2")
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda t: compile_for_tpu(PLAN, TRAIN, t, machine_code=False), topologies))
    assert [record.target for record in made] == list(topologies)
    assert all(record.memory_verified for record in made)


@pytest.mark.parametrize(
    ("topology", "num_slices", "mesh"),
    [
        ("v4:2x2x1", 1, MESH),  # one device a chip
        ("tpu7x:2x2x1", 1, MeshSpec(1, 4, 2)),  # two devices a chip
        ("v5e:1x2", 1, MeshSpec(1, 1, 2)),  # part of a host
        ("v5e:2x2", 2, MeshSpec(2, 2, 2)),
        ("v5e:4x4", 1, MeshSpec(1, 8, 2, split_physical=True)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
def test_every_kind_of_topology_hosts_every_task(
    task: str, topology: str, num_slices: int, mesh: MeshSpec
) -> None:
    cached = Workload("prefill", 8, 512, capacity=512, compute_dtype="bfloat16", param_dtype="bfloat16")
    workload = {"train": replace(TRAIN, batch=16), "prefill": cached, "decode": replace(
        cached, task="decode", length=1)}[task]  # fmt: skip
    record = compile_for_tpu(
        plan_model(CONFIG, mesh), workload, topology, num_slices=num_slices, machine_code=False
    )
    assert record.memory_verified
    assert record.collectives is not None


def test_a_topology_that_is_none_or_cannot_host_the_mesh_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"topology 'v9:2x2': the TPU compiler does not know it"):
        compile_for_tpu(PLAN, TRAIN, "v9:2x2")
    with pytest.raises(MeshError, match=r"needs 4 devices, but there are 16 tpu devices; meshes that fit"):
        compile_for_tpu(PLAN, TRAIN, "v5e:4x4")
    with pytest.raises(MeshError, match=r"cannot host mesh dp:1,fsdp:8,tp:2: .*!dp:1,fsdp:8,tp:2"):
        compile_for_tpu(plan_model(CONFIG, MeshSpec(1, 8, 2)), replace(TRAIN, batch=16), "v5e:4x4")
