"""How fast each layout of the output head is, and why; prints a table and writes JSON.

    python benchmarks/head_layouts.py --model FOLDER --out head_layouts.json

Two models: FOLDER (a Hugging Face folder of SmolLM2-135M in float32), and random weights of Gemma 3 270M's
shapes, whose table is 62 % of the weights. Each runs on two simulated devices (tp 2) under the layouts
`replicated`, `hidden` and `vocab`, and on one device. They take turns in rounds, each round beginning with
another, so that a noisy minute strikes all; a layout's speed is compared with `replicated` within each round.
Not here: what is measured (head_layouts_worker.py), and other programs (versus_transformers.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from head_layouts_worker import GEMMA, ONE_DEVICE, decode_workload, plan_of, train_workload

from shardwise.partition.plan import Plan
from shardwise.planner.predict import predict
from shardwise.planner.predict_head import head_cause
from shardwise.steps.workload import Workload

LAYOUTS = ("replicated", "hidden", "vocab", ONE_DEVICE)
PROMPT, NEW_TOKENS, PART = 128, 60, 5
"""Tokens of a prompt, new ones before decoding begins again, and those timed in one turn (about 0.15 s, so
that what is compared happens close together)."""
TRAIN_TOKENS = {GEMMA: (1, 256)}
"""Sequences and their length where 4×256 would take too long: the big head computes 6·V·D a token."""
TARGETS = {
    ("smollm2", "decode 1"): 1.06,
    ("smollm2", "decode 8"): 1.10,
    (GEMMA, "decode 1"): 1.3,
    (GEMMA, "decode 8"): 1.3,
}
"""How much faster than `replicated` `vocab` should be at least."""


class Worker:
    """A measuring process."""

    def __init__(self, model: str, tp: int):
        path = Path(__file__).with_name("head_layouts_worker.py")
        left_out = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
        self.process = subprocess.Popen(
            [sys.executable, str(path), "--model", model, "--tp", str(tp)],
            env={k: v for k, v in os.environ.items() if k not in left_out},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request: Any) -> dict[str, Any]:
        """Wait for one measurement."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: the measuring process ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Let it end, and wait."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def theory(plan: Plan, workload: Workload) -> dict[str, float]:
    """What a step costs one device: products of the head, weights read, what both ends and the rest move."""
    ledger, cause = predict(plan, workload), head_cause(plan.head_path)
    ends = [c for c in ledger.collectives if c.cause in (cause, plan.head_path, "embed/table")]
    read = 0
    for d in plan.decisions:
        if d.use.kind == "embedding" and d.path != plan.head_path:
            continue  # looked up, not read whole
        parts = math.prod(plan.mesh.size(axes) for axes in d.at_use())
        read += 4 * math.prod(d.use_shape) // parts
    return {
        "head_gflop": sum(f.amount for f in ledger.flops if f.cause == cause) / 1e9,
        "weights_mb": read / 1e6,
        "ends_moved_kb": sum(c.moved(plan.mesh) for c in ends) / 1e3,
        "ends_messages": sum(c.count for c in ends),
        "moved_kb": sum(c.moved(plan.mesh) for c in ledger.collectives) / 1e3,
        "messages": sum(c.count for c in ledger.collectives),
    }


def measure(model: str, workers: dict[str, Worker], case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run all layouts in turn; the first round compiles and is not timed."""
    times: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    results: dict[str, list[Any]] = {layout: [] for layout in LAYOUTS}
    for number in range(rounds + 1):
        shift = number % len(LAYOUTS)
        for layout in LAYOUTS[shift:] + LAYOUTS[:shift]:
            answer = workers[layout].ask(layout=layout, **case)
            results[layout] += answer.get("tokens") or answer["results"]
            if number:
                times[layout].append(statistics.median(answer["ms"]))
    workload = workload_of(case)
    base = times["replicated"]
    table = {}
    for layout in LAYOUTS:
        ratios = [b / t for b, t in zip(base, times[layout], strict=True)]
        table[layout] = {
            "ms_median": statistics.median(times[layout]), "ms": times[layout],
            "spread": quartiles(times[layout]), "ms_quiet": quiet(times[layout]),
            "ratio_median": statistics.median(ratios), "ratio_spread": quartiles(ratios),
            "result": results[layout],
            **theory(plan_of(model, layout, 1 if layout == ONE_DEVICE else 2), workload),
        }  # fmt: skip
    return table


def quartiles(values: list[float]) -> tuple[float, float]:
    """First and third quartile: half of the rounds lie between."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def quiet(values: list[float]) -> float:
    """First decile: the time of a turn that other programs on the machine hardly disturbed."""
    return statistics.quantiles(values, n=10, method="inclusive")[0] if len(values) > 1 else values[0]


def workload_of(case: dict[str, Any]) -> Workload:
    """The step behind a request."""
    if case["what"] == "decode":
        return decode_workload(case["batch"], case["prompt"], case["new_tokens"])
    return train_workload(case["batch"], case["length"])


def same(case: dict[str, Any], table: dict[str, Any]) -> str:
    """Whether all layouts gave the same tokens, or losses and gradient norms up to the order of sums."""
    results = [table[layout]["result"] for layout in LAYOUTS]
    if case["what"] == "decode":
        number = len(results[0])
        same = all(r == results[0] for r in results)
        return f"the same {number} × {case['batch']} tokens from all" if same else "tokens DIFFER"
    if not all(math.isfinite(value) for r in results for value in r):
        return "losses or gradient norms are NOT FINITE"
    most = max(abs(a / b - 1) for r in results for a, b in zip(r, results[0], strict=True))
    return f"losses and gradient norms agree to {most:.1e}"


def show(model: str, name: str, table: dict[str, Any], remark: str) -> None:
    """Print one case."""
    print(f"\n{model}, {name}: {remark}")
    print("| layout | ms, median (quartiles) | × replicated (quartiles) | quiet turns: ms, × replicated |"
          " head GFLOP a device |"
          " weights MB a device | moved by both ends, KB / messages | by all, KB / messages |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for layout, r in table.items():
        (a, b), (c, d) = r["spread"], r["ratio_spread"]
        cells = [
            layout,
            f"{r['ms_median']:.1f} ({a:.1f}–{b:.1f})",
            f"{r['ratio_median']:.2f} ({c:.2f}–{d:.2f})",
            f"{r['ms_quiet']:.1f}, {table['replicated']['ms_quiet'] / r['ms_quiet']:.2f}",
            f"{r['head_gflop']:.3g}",
            f"{r['weights_mb']:.0f}",
            f"{r['ends_moved_kb']:,.1f} / {r['ends_messages']}",
            f"{r['moved_kb']:,.1f} / {r['messages']}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    target = TARGETS.get((model if model == GEMMA else "smollm2", name))
    if target:
        ratio = table["vocab"]["ratio_median"]
        low = table["vocab"]["ratio_spread"][0]
        verdict = "met" if ratio >= target else "MISSED"
        unsure = "" if (low >= target) == (ratio >= target) else "; not sure: the quartiles lie on both sides"
        print(f"target: vocab {target} × replicated: {verdict} ({ratio:.2f}{unsure})")


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face folder of SmolLM2-135M; left out: Gemma's shapes alone")
    parser.add_argument("--no-gemma", action="store_true", help="only --model")
    parser.add_argument("--cases", nargs="*", default=["decode 1", "decode 8", "train"])
    parser.add_argument("--rounds", type=int, default=40, help="of decoding; of training a tenth")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, Python {platform.python_version()}, {processor()},"
          f" {os.cpu_count()} processors, float32")  # fmt: skip
    results: dict[str, Any] = {}
    models = [m for m in (args.model, None if args.no_gemma else GEMMA) if m]
    for model in models:
        label = model if model == GEMMA else Path(model).name
        results[label] = {}
        for name in args.cases:
            kind, _, batch = name.partition(" ")
            rounds = args.rounds
            case: dict[str, Any] = {"what": kind}
            if kind == "decode":
                case |= {"batch": int(batch), "prompt": PROMPT, "new_tokens": NEW_TOKENS, "part": PART}
            else:
                rows, length = TRAIN_TOKENS.get(model, (4, 256))
                case |= {"batch": rows, "length": length, "steps": 1}
                rounds = max(1, rounds // 10)
            two, one = Worker(model, 2), Worker(model, 1)  # anew: training needs the memory
            workers = {layout: one if layout == ONE_DEVICE else two for layout in LAYOUTS}
            table = measure(model, workers, case, rounds)
            two.close()
            one.close()
            show(label, name, table, same(case, table))
            results[label][name] = {"case": case, "layouts": table}
            if args.out:
                Path(args.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
