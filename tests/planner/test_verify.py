"""What a compilation says is read, kept and told rightly; simulated devices give the audit's own answer.

The TPU compiler itself: test_verify_tpu.py.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from shardwise.errors import ShardwiseError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan_file import to_json
from shardwise.planner import verify
from shardwise.planner.audit import audit
from shardwise.planner.collectives import Collective
from shardwise.planner.tpu_memory import LiveBuffer, Overrun, overrun, read_allocations
from shardwise.planner.verify import (
    CompiledStep,
    CompileTimeoutError,
    NoTpuCompilerError,
    compile_for_tpu,
    compile_on_fake_devices,
    record_key,
)
from shardwise.runtime.records import to_values
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

CONFIG = ModelConfig(
    vocab_size=104, embed_dim=24, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=64,
    max_position=64, windows=(0, 8),
)  # fmt: skip
MESH = MeshSpec(1, 2, 2)
PLAN = plan_model(CONFIG, MESH)
TRAIN = Workload("train", 4, 12, optimizer=OptimizerConfig(learning_rate=1e-3))

GIB = 1 << 30
REFUSED = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.56G) "
    "exceeds available HBM (15.75G)."
)
USED = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. Used \
20.25M of 16.00M vmem. Exceeded vmem capacity by 4.25M.

Program vmem requirement 20.25M
"""


def test_a_refusal_s_sizes_are_read_from_either_form_of_the_message() -> None:
    found = overrun(REFUSED)
    assert found == Overrun("HBM", round(19.56 * GIB), round(15.75 * GIB), REFUSED)
    assert found.over_bytes == found.needed_bytes - found.available_bytes
    on_chip = overrun(USED)
    assert on_chip is not None
    assert (on_chip.space, on_chip.needed_bytes, on_chip.available_bytes) == (
        "VMEM", round(20.25 * 2**20), 16 << 20,
    )  # fmt: skip
    assert overrun("INTERNAL: RET_CHECK failure") is None


def test_a_refusal_is_told_in_one_sentence_with_the_overrun() -> None:
    step = CompiledStep("v5e:8x8", overrun=Overrun("HBM", 20 * GIB, 16 * GIB, REFUSED))
    assert step.out_of_memory == (
        "on v5e:8x8 the step needs 20.00 GiB of HBM, 4.00 GiB more than the 16.00 GiB that there are"
    )
    assert CompiledStep("v5e:8x8").out_of_memory is None


ASSIGNED = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <5 reduce_sum.1 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 1000000, parameter 0, shape |f32[250000]| at ShapeIndex {}, maybe-live-out:
 value: <7 param.1 @0> (size=1000000,offset=0): f32[250000]{0:T(1024)}
allocation 2: size 4096, parameter 1, shape |s32[1024]| at ShapeIndex {}:
 value: <8 param.2 @0> (size=4096,offset=0): s32[1024]{0:T(1024)}
allocation 3: size 2048, maybe-live-out:
 value: <9 add.1 @0> (size=2048,offset=0): f32[512]{0:T(512)}
allocation 4: size 900000, preallocated-temp:
 value: <10 early.1 @0> (size=500000,offset=0): f32[125000]{0:T(1024)}
 value: <11 late.1{0} @0> (size=300000,offset=0): f32[75000]{0:T(1024)}
 value: <12 while.2{1} (phi) @0> (size=400000,offset=500000): bf16[200000]{0:T(1024)(128)(2,1)}
allocation 5: size 117440512, color 1, preallocated-temp:
 value: <13 fusion.1 @1> (size=8388608,offset=0): f32[2097152]{0:T(1024)S(1)}
"""
RANGES = """HloLiveRange (max 9):
  BufferLiveRange:
    early.1{}:1-3
    late.1{0}:6-9
    while.2{1}:2-8
    fusion.1{}:0-9
"""
PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[250000]) -> f32[250000] {
  %param.1 = f32[250000]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %early.1 = f32[125000]{0} custom-call(%param.1), custom_call_target="x"
  ROOT %while.2 = bf16[200000]{0} convert(%param.1), metadata={op_name="jit(step)/jvp()/while"}
}
"""


def _written(folder: Path) -> Path:
    for end, text in (("buffer-assignment", ASSIGNED), ("live-range", RANGES)):
        (folder / f"m.after_optimizations-{end}.txt").write_text(text)
    (folder / "m.after_optimizations.txt").write_text(PROGRAM)
    return folder


def test_the_compiler_s_buffers_in_hbm_are_summed_and_those_at_the_fullest_listed(tmp_path: Path) -> None:
    found = read_allocations(_written(tmp_path))
    assert found is not None
    assert (found.arguments, found.aliased, found.outputs) == (1_004_096, 1_000_000, 1_002_048)
    assert found.temporaries == 900_512  # not those on the chip
    assert found.total == 1_004_096 + 2048 + 900_512
    assert found.live == (
        LiveBuffer(500_000, "f32[125000]", "state.params['w']"),
        LiveBuffer(400_000, "bf16[200000]", "jvp()/while"),
    )


def test_without_the_compiler_s_files_nothing_is_made_up(tmp_path: Path) -> None:
    assert read_allocations(tmp_path) is None
    (tmp_path / "m.after_optimizations-buffer-assignment.txt").write_text("another form")
    assert read_allocations(tmp_path) is None


def test_a_record_survives_json() -> None:
    record = CompiledStep(
        "v5e:2x2", 5, 4, 4, 3, 8, None, 16 * GIB, Overrun("HBM", 9, 8, "two\nlines"),
        (LiveBuffer(3, "f32[3]", "add"),),
        (Collective("all-gather", ("fsdp",), "bfloat16", 8, 2, True, "forward", "w"),), "", 2, 77, 1.5,
        "0.10.2", "0.0.42",
    )  # fmt: skip
    assert CompiledStep.from_json(json.loads(json.dumps(record.to_json()))) == record
    with pytest.raises(ValueError, match="format"):
        CompiledStep.from_json({"format": "other"})


def _key(plan: Any = PLAN, workload: Workload = TRAIN, flags: str = "", **target: Any) -> str:
    job = {"platform": "tpu", "topology": "v5e:2x2", "num_slices": 1, "target": "said to the user"}
    return record_key(
        {**job, "plan": to_json(plan), "workload": to_values(workload), **target}, {"LIBTPU_INIT_ARGS": flags}
    )


def test_the_key_of_a_record_changes_with_all_that_makes_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    key = _key()
    others = [
        _key(plan_model(replace(CONFIG, mlp_dim=80), MESH)),
        _key(plan_model(CONFIG, MeshSpec(1, 4, 1))),
        _key(plan_model(CONFIG, replace(MESH, split_physical=True))),
        _key(plan_model(CONFIG, MESH, head_layout="hidden")),
        _key(workload=replace(TRAIN, remat="full")),
        _key(workload=replace(TRAIN, optimizer=OptimizerConfig(learning_rate=2e-3))),
        _key(topology="v5e:4x4"),
        _key(num_slices=2),
        _key(flags="--xla_tpu_x=true"),
    ]
    monkeypatch.setattr(verify, "installed", lambda library: f"9.9 of {library}")
    others.append(_key())
    monkeypatch.setattr(verify, "_code_digest", lambda: "other code")
    others.append(_key())
    assert len({key, *others}) == len(others) + 1


def test_the_key_stays_where_nothing_that_makes_the_program_changes() -> None:
    assert _key() == _key(target="said otherwise", machine_code=False)


def test_without_libtpu_the_error_is_its_own_and_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoTpuCompilerError, match=r"pip install 'shardwise\[tpu-compiler\]'") as raised:
        compile_for_tpu(PLAN, TRAIN, "v5e:2x2")
    assert "\n" not in str(raised.value)


def test_simulated_devices_give_the_audit_s_collectives_and_no_memory(tmp_path: Path) -> None:
    said: list[str] = []
    record = compile_on_fake_devices(PLAN, TRAIN, cache=tmp_path, progress=said.append)
    expected = audit(PLAN, TRAIN, jax.devices()[:4])
    assert record.collectives == expected.compiled
    assert record.product_flops == expected.compiled_flops
    assert not record.memory_verified
    assert record.out_of_memory is None
    assert any(line.startswith("compiling for 4 simulated devices (") for line in said)
    start = time.monotonic()
    again = compile_on_fake_devices(PLAN, TRAIN, cache=tmp_path)
    assert time.monotonic() - start < 1  # no process is started
    assert again == record
    assert again.cached
    assert not record.cached


def test_a_broken_record_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"collectives": [], "product_flops": 7, "seconds": 0.1}
    monkeypatch.setattr(verify, "_in_a_process", lambda *_: result)
    compile_on_fake_devices(PLAN, TRAIN, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:100])
    assert not compile_on_fake_devices(PLAN, TRAIN, cache=tmp_path).cached
    assert compile_on_fake_devices(PLAN, TRAIN, cache=tmp_path).cached


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that are started."""
    processes: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(verify.subprocess, "Popen", Popen)
    return processes


def test_a_compilation_that_takes_too_long_is_ended(started: list[subprocess.Popen[str]]) -> None:
    with pytest.raises(CompileTimeoutError, match="given up after 0 s, while starting"):
        compile_on_fake_devices(PLAN, TRAIN, timeout=0.2)
    assert started[0].poll() is not None


def test_ctrl_c_ends_the_process_too(started: list[subprocess.Popen[str]]) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_on_fake_devices(PLAN, TRAIN, progress=interrupt)
    assert started[0].poll() is not None


def test_the_last_words_of_a_process_that_dies_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {**verify._environment(), "JAX_PLATFORMS": "nonsense"}
    monkeypatch.setattr(verify, "_environment", lambda: broken)
    with pytest.raises(ShardwiseError, match=r"ended with code 1 while .*nonsense") as raised:
        compile_on_fake_devices(PLAN, TRAIN)
    assert "\n" not in str(raised.value)
