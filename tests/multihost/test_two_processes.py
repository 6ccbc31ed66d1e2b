"""Two processes with one device each are one process with two: same losses, one output, checkpoints that mix.

Not here: joining and what prevents it (tests/runtime/test_distributed.py).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny import SENTENCES, read_metrics, write_jsonl, write_llama

from .conftest import Ended, run_one, run_two

pytestmark = pytest.mark.slow

STEPS, BATCH = 4, 4
MESHES = {"fsdp": "1,2,1", "tp": "1,1,2"}

# Runs the command and notes which tensor rows and which training rows the process reads.
WATCHED = """
import json, sys
from collections import defaultdict
from shardwise.checkpoints.safetensors_reader import SafetensorsReader
from shardwise.data.packing import PackedDataset

log = sys.argv.pop(1)
tensors, rows = defaultdict(set), set()
read, get = SafetensorsReader.rows, PackedDataset.__getitem__

def rows_of(self, name, start, stop):
    tensors[name] |= set(range(start, stop))
    return read(self, name, start, stop)

def get_row(self, index):
    rows.add(int(index))
    return get(self, index)

SafetensorsReader.rows, PackedDataset.__getitem__ = rows_of, get_row
from shardwise.cli.main import main
code = main()
number = sys.argv[sys.argv.index("--process-id") + 1]
with open(f"{log}.{number}", "w") as file:
    json.dump({"tensors": {name: sorted(read) for name, read in tensors.items()}, "rows": sorted(rows)}, file)
sys.exit(code)
"""


@dataclass(frozen=True)
class Runs:
    """The same command run as one and as two processes on one mesh."""

    folder: Path
    mesh: str
    one: Ended
    two: list[Ended]

    def arguments(self, name: str) -> list[str]:
        return arguments(self.folder, self.mesh, name)

    def metrics(self, name: str, key: str) -> list[float]:
        return [record[key] for record in read_metrics(self.folder / f"{name}.jsonl") if key in record]

    def read_by(self, process: int) -> dict[str, Any]:
        return json.loads((self.folder / f"read.{process}").read_text())


def arguments(folder: Path, mesh: str, name: str, *more: str) -> list[str]:
    data = str(folder / "data.jsonl")
    # adam-eps above the rounding of gradients (1e-8): else near-zero ones move weights by the whole rate.
    return [
        "finetune", str(folder / "model"), "--data", data, "--eval-data", data, "--length", "16",
        "--global-batch", str(BATCH), "--steps", str(STEPS), "--learning-rate", "1e-2", "--adam-eps", "1e-4",
        "--mesh", mesh, *(["--head-layout", "vocab"] if mesh == MESHES["tp"] else []),
        "--checkpoint-dir", str(folder / f"{name}-checkpoints"), "--checkpoint-every", "2",
        "--metrics", str(folder / f"{name}.jsonl"), "--out", str(folder / name),
        "--save-plan", str(folder / f"{name}.plan.json"), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module", params=MESHES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder, mesh = tmp_path_factory.mktemp(request.param), MESHES[request.param]
    write_llama(folder / "model")
    write_jsonl(folder / "data.jsonl")
    one = run_one(arguments(folder, mesh, "one"))
    # fsdp is run as a user would; for tp what is read is noted.
    program = (
        ("-m", "shardwise.cli.main") if request.param == "fsdp" else ("-c", WATCHED, str(folder / "read"))
    )
    two = run_two(arguments(folder, mesh, "two"), program=program)
    assert [one.code, *(ended.code for ended in two)] == [0, 0, 0], (one, two)
    return Runs(folder, mesh, one, two)


def assert_same_model(ours: Path, theirs: Path) -> None:
    """Equal names, configs and tokenizers; weights within what rounding of gradients makes of four steps."""
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    a, b = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert a.keys() == b.keys()
    for name, array in a.items():
        # A gradient's rounding of 1e-7 is divided by adam-eps and multiplied by the rate: 1e-5 a step.
        np.testing.assert_allclose(array, b[name], rtol=0, atol=STEPS * 1e-5, err_msg=name)


def test_the_losses_are_those_of_one_process(runs: Runs) -> None:
    for key, count in (("loss", STEPS), ("grad_norm", STEPS), ("eval_nll", 2)):
        one, two = runs.metrics("one", key), runs.metrics("two", key)
        assert len(one) == len(two) == count
        # The same partitioned program; a sum of two parts has no order. 1e-6: float32 fused another way.
        np.testing.assert_allclose(two, one, rtol=1e-6, err_msg=key)
    assert runs.metrics("two", "step") == runs.metrics("one", "step") == [0, 1, 2, 3, 4, 4]
    assert runs.metrics("two", "learning_rate") == runs.metrics("one", "learning_rate")


def test_one_folder_is_written_equal_to_that_of_one_process(runs: Runs) -> None:
    assert_same_model(runs.folder / "two", runs.folder / "one")
    assert [p.name for p in runs.folder.iterdir() if p.name.startswith(".")] == []


def test_only_the_first_process_speaks(runs: Runs) -> None:
    first, second = runs.two
    assert f"wrote {runs.folder / 'two'}" in first.out
    assert "step 4  loss " in first.err
    said = [line for line in (second.out + second.err).splitlines() if not line.startswith("[Gloo]")]
    assert said == []


def prepare_resume(runs: Runs, saver: str, name: str) -> list[str]:
    """Copy the checkpoint of step 2 of a run; returns the command that goes on from it."""
    checkpoints = shutil.copytree(runs.folder / f"{saver}-checkpoints", runs.folder / f"{name}-checkpoints")
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step_00000002", "step_00000004"]
    shutil.rmtree(checkpoints / "step_00000004")
    return [*runs.arguments(name), "--resume"]


def assert_resumed(runs: Runs, name: str, ended: list[Ended]) -> None:
    assert {end.code for end in ended} == {0}, ended
    assert "resuming from" in ended[0].out
    np.testing.assert_allclose(runs.metrics(name, "loss"), runs.metrics("one", "loss")[2:], rtol=1e-6)
    assert_same_model(runs.folder / name, runs.folder / "one")


def test_a_checkpoint_of_two_processes_is_resumed_by_one(runs: Runs) -> None:
    command = prepare_resume(runs, "two", "by-one")
    assert_resumed(runs, "by-one", [run_one(command)])


@pytest.mark.parametrize("runs", ["fsdp"], indirect=True)
def test_a_checkpoint_of_one_process_is_resumed_by_two_that_prepare_only_their_rows(runs: Runs) -> None:
    command = prepare_resume(runs, "one", "by-two")
    assert_resumed(runs, "by-two", run_two(command, program=("-c", WATCHED, str(runs.folder / "read"))))
    steps = np.array([[2], [3]]) * BATCH  # third and fourth
    for process, mine in enumerate(([0, 1], [2, 3])):
        assert runs.read_by(process)["rows"] == (steps + mine).ravel().tolist()


@pytest.mark.parametrize("runs", ["tp"], indirect=True)
def test_each_process_reads_only_its_part_of_the_weights(runs: Runs) -> None:
    first, second = (runs.read_by(process)["tensors"] for process in range(2))
    assert first.keys() == second.keys()
    # 290 ids, 4 query heads of 8, 2 kv heads of 8, mlp 48: halves of the rows that tp cuts.
    for name, rows in {
        "model.embed_tokens.weight": 290,
        "lm_head.weight": 290,
        "model.layers.0.self_attn.q_proj.weight": 32,
        "model.layers.0.self_attn.k_proj.weight": 16,
        "model.layers.0.self_attn.v_proj.weight": 16,
        "model.layers.0.mlp.gate_proj.weight": 48,
        "model.layers.0.mlp.up_proj.weight": 48,
    }.items():
        assert first[name] == list(range(rows // 2)), name
        assert second[name] == list(range(rows // 2, rows)), name


def test_processes_that_were_not_started_alike_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl")
    other = write_jsonl(tmp_path / "other.jsonl", SENTENCES[:8])
    command = [
        word
        for word in arguments(tmp_path, "1,2,1", "two")
        if word not in ("--data", str(tmp_path / "data.jsonl"))
    ]
    command.remove("--eval-data")
    same = ["--data", str(tmp_path / "data.jsonl")]
    ended = run_two(command, own=(same, ["--data", str(other), "--seed", "1", "--log-every", "2"]))
    for end in ended:
        assert end.code == 2
        message = [line for line in end.err.splitlines() if line.startswith("error: ")]
        (line,) = message
        assert "the processes were not started alike" in line
        assert all(flag in line for flag in ("--data", "--seed", "--log-every"))
        assert "--length" not in line
    assert not (tmp_path / "two").exists()


SAVES_WHERE_IT_CANNOT = """
import sys
from shardwise.cli.parsing import parse_options
from shardwise.cli.finetune import FinetuneOptions
from shardwise.cli.startup import start
options = parse_options(FinetuneOptions, sys.argv[2:], "shardwise finetune")
start(options)
import jax
import numpy as np
from shardwise.api import plan
from shardwise.checkpoints import native
from shardwise.errors import CheckpointError
from shardwise.partition.mesh import build_mesh
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import abstract_state
from shardwise.steps.workload import Workload
the_plan = plan(options.model, options.mesh)
workload = Workload("train", 4, 16, optimizer=OptimizerConfig())
shapes = abstract_state(the_plan, build_mesh(the_plan.mesh), workload)
zeros = lambda s: jax.make_array_from_callback(s.shape, s.sharding, lambda i: np.zeros(s.shape, s.dtype)[i])
try:
    native.save(sys.argv[1], jax.tree.map(zeros, shapes), the_plan, {}, keep_last=1)
except CheckpointError as error:
    print("REFUSED", error)
"""


def test_where_the_first_process_cannot_write_both_say_so_and_none_waits(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", tokenizer=False)
    write_jsonl(tmp_path / "data.jsonl")
    (tmp_path / "file").write_text("")
    options = arguments(tmp_path, "1,2,1", "two")
    program = ("-c", SAVES_WHERE_IT_CANNOT, str(tmp_path / "file" / "checkpoints"))
    ended = run_two(options[1:], program=program)
    assert [end.code for end in ended] == [0, 0], ended
    assert "step 0 could not be written" in ended[0].out
    assert "Not a directory" in ended[0].out
    assert "process 0 could not write it and says why" in ended[1].out
