"""Memory predicted against what the TPU compiler says of the real step: `python hbm_validation.py`.

Needs the extra tpu-compiler, and no TPU. Prints a line a case and the median error. Not here: times
(planner_validation.py).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from shardwise.families import config_from_hf
from shardwise.families.presets import preset
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.memory import LANES, memory
from shardwise.planner.search import USABLE
from shardwise.planner.verify import compile_for_tpu, default_cache
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

_GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One step."""

    model: str
    topology: str
    mesh: str
    batch: int
    length: int
    remat: Literal["none", "dots", "full"] = "full"
    grad_accum_steps: int = 1
    slices: int = 1
    task: Literal["train", "prefill", "decode"] = "train"
    capacity: int = 0

    def workload(self) -> Workload:
        """bfloat16 products; float32 parameters in training, bfloat16 otherwise."""
        trains = self.task == "train"
        return Workload(
            self.task, self.batch, self.length, capacity=self.capacity, compute_dtype="bfloat16",
            param_dtype="float32" if trains else "bfloat16", remat=self.remat,
            grad_accum_steps=self.grad_accum_steps, optimizer=OptimizerConfig() if trains else None,
        )  # fmt: skip


CASES = (
    Case("smollm2-135m", "v5e:2x2", "1,4,1", 8, 2048),
    Case("smollm2-135m", "v5e:2x2", "1,4,1", 8, 2048, "none"),
    Case("smollm2-135m", "v5e:2x2", "1,2,2", 8, 2048, "dots"),
    Case("llama3.2-1b", "v5e:4x4", "1,16,1", 32, 2048),
    Case("llama3.2-1b", "v5e:4x4", "1,16,1", 32, 2048, "dots"),
    Case("llama3.2-1b", "v5e:4x4", "1,16,1", 32, 2048, "none"),
    Case("llama3.2-1b", "v5e:4x4", "1,4,4", 16, 2048),
    Case("llama3.2-1b", "v5e:4x4", "16,1,1", 16, 2048),
    Case("llama3-8b", "v5e:16x16", "1,256,1", 256, 4096),
    Case("llama3-8b", "v5e:16x16", "1,256,1", 256, 4096, "dots"),
    Case("llama3-8b", "v5e:16x16", "16,16,1", 256, 4096),
    Case("llama3-8b", "v5e:16x16", "1,16,16", 16, 4096),
    Case("llama3-8b", "v5p:4x4x4", "1,64,1", 128, 4096),
    Case("llama3-8b", "v5p:4x4x4", "1,64,1", 256, 4096, "full", 4),
    Case("llama3-8b", "v5p:4x4x4", "1,16,4", 64, 4096, "dots"),
    Case("llama3-8b", "v6e:8x8", "1,8,8", 16, 8192),
    Case("llama3-8b", "v5e:16x16", "2,256,1", 512, 4096, slices=2),
    Case("llama3-8b", "tpu7x:4x4x4", "1,128,1", 128, 8192),
    Case("llama3-70b", "v5e:16x16", "1,256,1", 256, 4096),
    Case("llama3-70b", "v5e:8x8", "1,64,1", 64, 4096),
    Case("llama3-70b", "v5p:8x8x8", "1,512,1", 512, 4096),
    Case("llama3-70b", "v5p:8x8x8", "1,64,8", 128, 4096, "dots"),
    Case("gemma2-9b", "v5p:4x4x4", "1,64,1", 64, 4096),
    Case("mixtral-8x7b", "v5p:4x4x4", "1,64,1", 64, 4096),
    Case("bloom-7b1", "v5p:4x4x4", "1,64,1", 64, 2048),
    Case("llama3-8b", "v5e:2x2", "1,1,4", 16, 1, "none", task="decode", capacity=2048),
    Case("llama3-8b", "v5e:2x4", "1,1,8", 32, 1, "none", task="decode", capacity=4096),
    Case("llama3-8b", "v5e:2x4", "1,1,8", 4, 2048, "none", task="prefill", capacity=2048),
    Case("llama3-70b", "v5p:2x2x2", "1,1,8", 64, 1, "none", task="decode", capacity=4096),
    Case("llama3-70b", "v5e:4x4", "1,1,16", 16, 1, "none", task="decode", capacity=2048),
)


def main() -> int:
    """Compile all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="hbm_validation.json", help="JSON file for the numbers")
    options = parser.parse_args()
    table = Table(title="HBM of a device, GiB", title_justify="left")
    for column in ("model", "topology", "mesh", "step", "predicted", "compiled", "ratio", "verdicts"):
        table.add_column(column)
    rows = [_compare(case) for case in CASES]
    for case, row in zip(CASES, rows, strict=True):
        step = f"{case.task} {case.batch}×{case.length}" + (f" {case.remat}" if case.task == "train" else "")
        step += f", {case.grad_accum_steps} micro-batches" if case.grad_accum_steps > 1 else ""
        where = f"{case.slices} × {case.topology}" if case.slices > 1 else case.topology
        table.add_row(
            case.model, where, case.mesh, step,
            f"{row['predicted'] / _GIB:.2f}", f"{row['compiled'] / _GIB:.2f}",
            f"{row['predicted'] / row['compiled']:.2f}",
            f"{'fits' if row['said_to_fit'] else 'no'} / {'fits' if row['fits'] else 'no'}",
        )  # fmt: skip
    console = Console(width=140)
    console.print(table)
    errors = [abs(row["predicted"] / row["compiled"] - 1) for row in rows]
    wrong = [case for case, row in zip(CASES, rows, strict=True) if row["said_to_fit"] and not row["fits"]]
    console.print(
        f"{len(rows)} cases: median error {np.median(errors):.1%}, 90 % below {np.quantile(errors, 0.9):.1%};"
        f" said to fit where the compiler refuses: {len(wrong)}"
    )
    Path(options.out).write_text(json.dumps(rows, indent=1))
    return int(bool(wrong))


def _compare(case: Case) -> dict[str, Any]:
    plan = plan_model(config_from_hf(preset(case.model)), MeshSpec.parse(case.mesh))
    workload = case.workload()
    done = compile_for_tpu(
        plan, workload, case.topology, num_slices=case.slices, machine_code=False, cache=default_cache(),
    )  # fmt: skip
    assert done.peak_bytes is not None, "the compiler tells no sizes"
    predicted = memory(plan, workload, LANES).total
    # As the planner decides: of the memory that the chip has by its data sheet.
    nominal = {"v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}[case.topology.partition(":")[0]] * _GIB
    return {
        "case": vars(case), "predicted": predicted, "compiled": done.peak_bytes,
        "available": done.available_bytes, "fits": done.out_of_memory is None,
        "said_to_fit": predicted <= nominal * USABLE,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
