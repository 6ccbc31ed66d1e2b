"""Measures one layout of the output head at a time, as head_layouts.py asks over a pipe.

A process of its own for each number of devices, since JAX fixes that when it starts. Reads a JSON request a
line and answers with a JSON line. Decoding runs through serving.generate.stream, training through build_step:
the steps that the commands run. Not here: the order of the requests and what is made of the answers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.runtime.devices import configure_devices
from shardwise.runtime.memory import tune_malloc
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

GEMMA = "gemma-3-270m-shapes"
# Sizes of Gemma 3 270M (62 % of the weights are the tied table) in a Llama-like model of ours.
GEMMA_CONFIG = ModelConfig(
    vocab_size=262_144, embed_dim=640, num_layers=18, num_heads=4, num_kv_heads=1, head_dim=256, mlp_dim=2048,
    max_position=32_768, norm_eps=1e-6, tie_embeddings=True,
)  # fmt: skip
ONE_DEVICE = "one device"


class Worker:
    """One model on one mesh, under several layouts of its head."""

    def __init__(self, model: str, tp: int):
        self.name, self.tp = model, tp
        self.models: dict[str, Any] = {}
        self.streams: dict[tuple[str, int], tuple[Iterator[Any], int]] = {}

    def _params(self, plan: Plan, stacked: bool) -> tuple[Any, Any]:
        """The device mesh and float32 parameters on it: the checkpoint's, or drawn with one seed."""
        from shardwise.api import open_model
        from shardwise.checkpoints.load import load_params
        from shardwise.models.parameters import init_params, unstack
        from shardwise.partition.mesh import build_mesh

        mesh = build_mesh(plan.mesh)
        if self.name != GEMMA:
            return mesh, load_params(open_model(self.name), plan, mesh, "float32", stacked)
        params = init_params(plan, mesh, 0, "float32")
        return mesh, params if stacked else unstack(plan, mesh, params)

    def decode(self, layout: str, batch: int, prompt: int, new_tokens: int, part: int) -> dict[str, Any]:
        """Milliseconds between the next `part` tokens of greedy decoding, and the tokens.

        Decoding goes on where the last request stopped, or begins anew where less than that is left.
        """
        if layout not in self.models:
            self.models[layout] = self._model(layout)
        stream, left = self.streams.pop((layout, batch), (None, 0))
        if stream is None or left < part + 1:
            stream, left = self._stream(self.models[layout], batch, prompt, new_tokens), new_tokens
        times, tokens = [], []
        for _ in range(part + 1):  # from the first on it is timed: what came before it was a pause
            tokens.append([token for _, token in next(stream)])
            times.append(time.perf_counter())
        self.streams[layout, batch] = stream, left - part - 1
        return {"ms": [1e3 * (b - a) for a, b in itertools.pairwise(times)], "tokens": tokens}

    def _model(self, layout: str) -> Any:
        from shardwise.api import Model
        from shardwise.checkpoints.reader import Checkpoint

        plan = plan_of(self.name, layout, self.tp)
        nothing = Checkpoint(Path(self.name), "config", {}, None, None)
        return Model(nothing, plan, *self._params(plan, stacked=False))

    def _stream(self, model: Any, batch: int, prompt: int, new_tokens: int) -> Iterator[Any]:
        import numpy as np

        from shardwise.serving.generate import Sampling, stream

        prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, prompt)).tolist()
        return stream(model, prompts, new_tokens, Sampling(), ())

    def train(self, layout: str, batch: int, length: int, steps: int) -> dict[str, Any]:
        """Milliseconds of AdamW steps after one that is not timed; each step's loss and gradient norm."""
        import jax
        import numpy as np

        from shardwise.partition.rows import put_rows
        from shardwise.steps.build import build_step
        from shardwise.steps.train import start_state

        plan = plan_of(self.name, layout, self.tp)
        workload = train_workload(batch, length)
        step = build_step(plan, workload)
        mesh, params = self._params(plan, stacked=True)
        state = start_state(plan, mesh, workload, params)
        tokens = np.random.default_rng(0).integers(0, plan.config.vocab_size, (batch, length + 1), np.int32)
        shape = (batch, length)
        rows = {
            "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones(shape, np.int32),
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
            "weights": np.ones(shape, np.float32),
        }  # fmt: skip
        given = put_rows(plan, mesh, rows)
        times, results = [], []
        for _ in range(steps + 1):
            start = time.perf_counter()
            state, metrics = step(state, given)
            jax.block_until_ready((state, metrics))
            times.append(1e3 * (time.perf_counter() - start))
            results += [float(metrics["loss"]), float(metrics["grad_norm"])]
        del state, params, metrics
        give_back_memory()
        return {"ms": times[1:], "results": results}


def give_back_memory() -> None:
    """Return what was freed to the kernel: another process's turn is next, and both do not fit."""
    gc.collect()
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def plan_of(model: str, layout: str, tp: int) -> Plan:
    """The Plan that is measured; needs no devices."""
    import shardwise

    config = GEMMA_CONFIG if model == GEMMA else model
    return shardwise.plan(config, MeshSpec(tp=tp), head_layout=None if layout == ONE_DEVICE else layout)


def train_workload(batch: int, length: int) -> Workload:
    """The training step that is measured."""
    return Workload("train", batch, length, optimizer=OptimizerConfig(total_steps=100))


def decode_workload(batch: int, prompt: int, new_tokens: int) -> Workload:
    """The decoding step that is measured."""
    return Workload("decode", batch, 1, capacity=prompt + new_tokens)


def main() -> None:
    """Answer requests until the pipe closes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help=f"Hugging Face folder, or {GEMMA}")
    parser.add_argument("--tp", type=int, required=True, help="devices, all on tp")
    args = parser.parse_args()
    tune_malloc()
    configure_devices(f"cpu:{args.tp}")
    worker = Worker(args.model, args.tp)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(worker, request.pop("what"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
