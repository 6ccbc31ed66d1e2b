"""shardwise's side of the comparison with transformers: prints one JSON line, like peer_transformers.py.

    python benchmarks/ours.py --model FOLDER --what train --dtype float32 --batch 4 --length 256 --steps 5

It runs the steps that the commands run (build_step through shardwise.load), on one device unless --mesh says
otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from shardwise.runtime.devices import configure_devices
from shardwise.runtime.memory import peak_rss_bytes, tune_malloc


def main() -> None:
    """Measure one thing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--what", choices=("train", "decode", "prefill", "load"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--mesh", default="dp:1,fsdp:1,tp:1")
    parser.add_argument("--devices", default="cpu:1")
    args = parser.parse_args()
    tune_malloc()
    configure_devices(args.devices)
    print(json.dumps({"what": args.what, "dtype": args.dtype, **{
        "train": train, "decode": decode, "prefill": prefill, "load": load
    }[args.what](args)}))  # fmt: skip


def _times(run: Any, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def _stats(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_ms_median": 1e3 * statistics.median(seconds), f"{name}_ms_min": 1e3 * min(seconds)}


def train(args: argparse.Namespace) -> dict[str, float]:
    """AdamW steps on random tokens; parameters float32, compute as asked."""
    import jax
    import numpy as np

    import shardwise
    from shardwise.partition.rows import put_rows
    from shardwise.steps.optimizer import OptimizerConfig
    from shardwise.steps.train import start_state
    from shardwise.steps.workload import Workload

    model = shardwise.load(args.model, mesh=args.mesh, param_dtype="float32", stacked=True)
    workload = Workload(
        "train", args.batch, args.length, compute_dtype=args.dtype, remat=args.remat,
        optimizer=OptimizerConfig(total_steps=100),
    )  # fmt: skip
    start = time.perf_counter()
    step = shardwise.build_step(model.plan, workload)
    state = start_state(model.plan, step.mesh, workload, model.params)
    tokens = np.random.default_rng(0).integers(
        0, model.config.vocab_size, (args.batch, args.length + 1), np.int32
    )
    shape = (args.batch, args.length)
    rows = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(args.length, dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
    }  # fmt: skip
    batch = put_rows(model.plan, step.mesh, rows)

    def one() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    one()
    compiled = time.perf_counter() - start
    seconds = _times(one, args.steps)
    rate = args.batch * args.length / np.array([statistics.median(seconds), min(seconds)])
    return {
        "tokens_per_second_median": float(rate[0]), "tokens_per_second_best": float(rate[1]),
        "first_step_s": compiled, "peak_rss_mb": (peak_rss_bytes() or 0) / 1e6,
    }  # fmt: skip


def decode(args: argparse.Namespace) -> dict[str, float]:
    """Greedy decoding through serving.generate.stream: milliseconds between tokens, host work included."""
    import numpy as np

    import shardwise
    from shardwise.serving.generate import Sampling, stream

    model = shardwise.load(args.model, mesh=args.mesh, param_dtype=args.dtype, compute_dtype=args.dtype)
    prompts = (
        np.random.default_rng(0).integers(0, model.config.vocab_size, (args.batch, args.prompt)).tolist()
    )
    gaps: list[float] = []
    for attempt in range(3):
        last = None
        for _ in stream(model, prompts, args.new_tokens, Sampling(), ()):
            now = time.perf_counter()
            if attempt and last is not None:
                gaps.append(now - last)
            last = now
    best = float(np.percentile(gaps, 10))
    return {**_stats("step", gaps), "step_ms_p10": 1e3 * best,
            "tokens_per_second": args.batch / statistics.median(gaps),
            "peak_rss_mb": (peak_rss_bytes() or 0) / 1e6}  # fmt: skip


def prefill(args: argparse.Namespace) -> dict[str, float]:
    """Prompt in, first token out, compiled beforehand."""
    import numpy as np

    import shardwise

    model = shardwise.load(args.model, mesh=args.mesh, param_dtype=args.dtype, compute_dtype=args.dtype)
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (args.batch, args.prompt)).tolist()

    def one() -> None:
        shardwise.generate(model, prompt, max_new_tokens=1)

    one()
    return {**_stats("prefill", _times(one, args.steps)), "peak_rss_mb": (peak_rss_bytes() or 0) / 1e6}


def load(args: argparse.Namespace) -> dict[str, float]:
    """From a folder to arrays on the device, and to the first logits."""
    import jax
    import numpy as np

    import shardwise

    start = time.perf_counter()
    model = shardwise.load(args.model, mesh=args.mesh, param_dtype=args.dtype, compute_dtype=args.dtype)
    jax.block_until_ready(model.params)
    loaded = time.perf_counter() - start
    model.logits(np.zeros((1, 8), np.int32))
    return {"load_s": loaded, "load_and_logits_s": time.perf_counter() - start,
            "peak_rss_mb": (peak_rss_bytes() or 0) / 1e6}  # fmt: skip


if __name__ == "__main__":
    main()
