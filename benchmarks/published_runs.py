"""Published training and decoding runs as the planner's own inputs: model, machine, mesh, workload.

Reads a CSV with one run a row (columns as in `Run.of`). Not here: comparing (planner_validation.py).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.cost import Assumed
from shardwise.planner.hardware import System, shapes
from shardwise.planner.memory import memory
from shardwise.runtime.chips import Domain, find_chip
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

UNGATED = ("mpt", "gpt", "bloom", "ptdp", "megatron", "mt-nlg", "maxtext")
"""Models, by the beginning of their names, whose feed-forward layer has two matrices; gpt-oss has three."""
OTHERS_ARCHITECTURE = ("deepseek", "gemma4", "llama4", "glm")
"""Models with layers that ModelConfig cannot say (latent attention, shared experts, layers of two shapes)."""
_QUANT = {"int8": "int8", "fp8": "float8", "float8": "float8"}


class NotOursError(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True)
class Run:
    """One published run."""

    id: str
    kind: str
    """`train` or `decode`."""
    model: str
    chip: str
    trust: str
    """A, B or C."""
    config: ModelConfig
    system: System
    mesh: MeshSpec
    workload: Workload
    assumed: Assumed
    seconds: float
    """Measured, of a step."""
    sweep: str
    """Runs of one sweep differ in few things: same source, model and chip."""
    hbm_gib: float | None
    """Memory of a chip in use, as reported."""


def read(path: str | Path) -> tuple[list[Run], dict[str, str]]:
    """All runs that only cut over dp, fsdp and tp; and of each other row why it was left out."""
    runs, left = [], {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                runs.append(_run(row))
            except NotOursError as why:
                left[row["id"]] = str(why)
    return runs, left


def _run(row: dict[str, str]) -> Run:
    notes = row["notes"]
    trust = re.search(r"trust=([ABC])", notes)
    for axis in ("pp", "cp", "ep"):
        if row[axis] not in ("", "1"):
            raise NotOursError(f"{axis} {row[axis]}")
    if row["model"].startswith(OTHERS_ARCHITECTURE):
        raise NotOursError(f"architecture of {row['model']}")
    config = _config(row)
    system = _system(row)
    mesh = _mesh(row, system)
    workload, assumed = _workload(row, config, mesh)
    return Run(
        id=row["id"], kind=row["kind"], model=row["model"], chip=row["chip"],
        trust=trust.group(1) if trust else "C", config=config, system=system, mesh=mesh, workload=workload,
        assumed=assumed, seconds=_seconds(row, workload),
        sweep=f"{row['source']} {row['model']} {row['chip']} {row['kind']} {row['quant']}",
        hbm_gib=float(row["hbm_gib_per_chip"]) if row["hbm_gib_per_chip"] else None,
    )  # fmt: skip


def _config(row: dict[str, str]) -> ModelConfig:
    model = row["model"]
    experts = int(row["n_experts"] or 0)
    gated = not model.startswith(UNGATED) or model.startswith("gpt-oss")
    try:
        sizes = {
            key: int(row[key]) for key in ("layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
        }
    except ValueError:
        raise NotOursError("sizes of the model") from None
    return ModelConfig(
        vocab_size=int(row["vocab"] or 50304),
        embed_dim=sizes["d_model"],
        num_layers=sizes["layers"],
        num_heads=sizes["n_heads"],
        num_kv_heads=sizes["n_kv_heads"],
        head_dim=sizes["head_dim"],
        mlp_dim=sizes["d_ff"],
        max_position=max(2048, int(row["seq_len"] or 2048)),
        gated_mlp=gated,
        tie_embeddings=row["tied"] == "1",
        num_experts=experts,
        experts_per_token=int(row["experts_per_token"] or 0),
    )


def _system(row: dict[str, str]) -> System:
    if not row["n_chips"]:
        raise NotOursError("number of chips")
    chip, count = find_chip(row["chip"]), int(row["n_chips"])
    gbits = re.search(r"(\d+) Gb/s per node", row["notes"])
    if isinstance(chip.fabric, Domain):
        size = min(count, chip.fabric.size)
        if gbits:
            chip = replace(chip, scale_out=int(gbits.group(1)) * 1e9 / 8 / size)
        return System(chip, (size,), max(1, count // size))
    slices = int(row["slices"] or 1)
    each = count // slices
    shape = next((s for s in shapes(chip) if math.prod(s) == each), None)
    if shape is None:
        raise NotOursError(f"a slice of {each} chips")
    return System(chip, shape, slices)


def _mesh(row: dict[str, str], system: System) -> MeshSpec:
    if not any(row[axis] for axis in ("dp", "fsdp", "tp")):
        raise NotOursError("mesh")
    dp, fsdp, tp = (int(row[axis] or 1) for axis in ("dp", "fsdp", "tp"))
    if dp * fsdp * tp != system.num_devices:
        raise NotOursError(f"mesh {dp},{fsdp},{tp} on {system.num_devices} devices")
    return MeshSpec(dp, fsdp, tp, split_physical=True)


def _workload(row: dict[str, str], config: ModelConfig, mesh: MeshSpec) -> tuple[Workload, Assumed]:
    quant = row["quant"].split()[0].split("-")[0].split("_")[0] if row["quant"] else "none"
    if quant not in ("none", *_QUANT):
        raise NotOursError(f"products in {row['quant']}")
    if not row["global_batch_seqs"] or not row["seq_len"]:
        raise NotOursError("batch or length")
    batch, length = int(row["global_batch_seqs"]), int(row["seq_len"])
    product = _QUANT.get(quant)
    if row["kind"] == "decode":
        group = mesh.dp * mesh.fsdp
        batch = -(-batch // group) * group
        task = Workload("decode", batch, 1, capacity=length, compute_dtype="bfloat16", param_dtype="bfloat16")
        cache = 1 if "KV cache" in row["notes"] or "fp8 KV" in row["notes"] else None
        return task, Assumed(
            product_dtype=product, weight_itemsize=1 if product else None, cache_itemsize=cache,
            message_itemsize=2,
        )  # fmt: skip
    accum = re.search(r"grad accum (\d+)", row["notes"])
    steps = int(accum.group(1)) if accum else 1
    if batch % (mesh.dp * mesh.fsdp * steps):
        steps = 1
    if batch % (mesh.dp * mesh.fsdp):
        raise NotOursError(f"a batch of {batch} over {mesh}")
    remat, products, attention = _remat(row, config, mesh, batch, length, steps)
    workload = Workload(
        "train", batch, length, compute_dtype="bfloat16", param_dtype="float32", remat=remat,
        grad_accum_steps=steps, optimizer=OptimizerConfig(),
    )  # fmt: skip
    wire = 4 if "mixed precision DEFAULT" in row["notes"] else 2
    return workload, Assumed(
        product_dtype=product,
        message_itemsize=wire,
        recomputed_products=products,
        recomputed_attention=attention,
        attention_share=_seen(row, length),
    )


def _seen(row: dict[str, str], length: int) -> float:
    """The part of causal attention that is left by `sliding window W on local layers (L local:G global)`."""
    found = re.search(r"sliding window (\d+) on local layers \((\d+) local:(\d+) global\)", row["notes"])
    if found is None:
        return 1.0
    window, local, whole = map(int, found.groups())
    pairs = window * length - window * window / 2
    return (local * pairs / (length * length / 2) + whole) / (local + whole)


def _remat(
    row: dict[str, str], config: ModelConfig, mesh: MeshSpec, batch: int, length: int, steps: int
) -> tuple[Any, float, float]:
    """Our nearest policy, and the parts of the products and of attention which that computes again that the
    run does; where nothing is said, the first policy that fits."""
    text = row["remat"]
    if text == "none":
        return "none", 1.0, 1.0
    if text == "":
        plan, system = plan_model(config, mesh), _system(row)
        for remat in ("none", "dots"):
            workload = Workload(
                "train", batch, length, compute_dtype="bfloat16", remat=remat, grad_accum_steps=steps,
                optimizer=OptimizerConfig(),
            )  # fmt: skip
            if memory(plan, workload).total < 0.9 * system.hbm:
                return remat, 1.0, 1.0
        return "full", 1.0, 1.0
    if text.startswith("custom") or "qkv_proj" in text or "except_mlp" in text:
        return "full", *_not_saved(text, config)
    if text.startswith("full"):
        return "full", 1.0, 1.0
    if "layer" in text or "block subset" in text:  # every other layer
        return "full", 0.5, 0.5
    if text.startswith("selective (op"):  # every other product, and attention is kept
        return "full", 0.5, 0.0
    return "dots", 1.0, 0.0 if "flash" in text or "dot" in text.lower() else 1.0


def _not_saved(text: str, config: ModelConfig) -> tuple[float, float]:
    """What is computed again, by the names of what is saved or brought to the host."""
    saved = set(re.findall(r"(?<![a-z])(?:q|k|v|out_proj|context|mlpwi)(?![a-z_])", text))
    if "qkv_proj" in text or "except_mlp" in text:
        saved |= {"q", "k", "v"}
    if "except_mlp" in text:
        saved |= {"out_proj", "context"}
    d, e = config.embed_dim, config.head_dim
    again = {
        "q": d * config.num_heads * e, "k": d * config.num_kv_heads * e, "v": d * config.num_kv_heads * e,
        "out_proj": config.num_heads * e * d, "mlpwi": (1 + config.gated_mlp) * d * config.mlp_dim,
    }  # fmt: skip
    products = sum(size for name, size in again.items() if name not in saved) / sum(again.values())
    return products, 0.0 if "context" in saved else 1.0


def _seconds(row: dict[str, str], workload: Workload) -> float:
    if row["step_time_s"]:
        return float(row["step_time_s"])
    if not row["tokens_per_s_per_chip"]:
        raise NotOursError("no time")
    tokens = workload.batch * workload.length
    return tokens / float(row["tokens_per_s_per_chip"]) / int(row["n_chips"])


def sweeps(runs: list[Run]) -> Iterator[list[Run]]:
    """Groups of at least three runs of one sweep."""
    names = {run.sweep for run in runs}
    for name in sorted(names):
        group = [run for run in runs if run.sweep == name]
        if len(group) >= 3:
            yield group
