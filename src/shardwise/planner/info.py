"""`shardwise info`: what a model is made of and how a mesh cuts each kind of tensor; from shapes alone.

Not here: costs and reasons in full (explain, later in this folder).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shardwise.models.config import ModelConfig
from shardwise.models.flops import forward_flops_per_token, parameter_count
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Decision, Plan

if TYPE_CHECKING:
    from shardwise.cli.info import InfoOptions


def run(options: InfoOptions) -> int:
    """Print the report; returns the exit code."""
    from shardwise.api import open_model, plan, resolve_mesh
    from shardwise.families import config_from_hf

    checkpoint = open_model(options.model)
    config = config_from_hf(checkpoint.hf_config)
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    single = plan(config, MeshSpec())
    console.print(f"{options.model} ({checkpoint.format if checkpoint.reader else 'shapes only'})")
    for line in describe(config, single):
        console.print(f"  {line}")
    if options.mesh is not None:
        spec = MeshSpec.parse(options.mesh)
        if options.devices or -1 in spec.sizes.values():
            spec = resolve_mesh(spec, "train")
        console.print()
        print_plan(plan(config, spec, overrides=options.override), console)
    return 0


def describe(config: ModelConfig, plan: Plan) -> list[str]:
    """A few lines on a model: sizes, parameters, FLOPs and cache per token, memory by dtype."""
    count = parameter_count(plan)
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    rope = (
        config.rope.kind if config.rope.kind == "default" else f"{config.rope.kind} ×{config.rope.factor:g}"
    )
    return [
        f"{config.family}: {config.num_layers} layers, embed {config.embed_dim}, {config.num_heads} heads"
        f" ({config.num_kv_heads} kv) of {config.head_dim}, mlp {config.mlp_dim}, vocab {config.vocab_size:,}"
        f"{' (tied head)' if config.tie_embeddings else ''}",
        f"context {config.max_position:,} tokens, rotary theta {config.rope.theta:g} ({rope})",
        f"{count:,} parameters: {count * 4 / 2**30:.2f} GiB in float32,"
        f" {count * 2 / 2**30:.2f} GiB in bfloat16",
        f"{forward_flops_per_token(plan, 1) / 1e9:.3g} GFLOP a token forward (short context),"
        f" {cache * 2 / 2**10:.3g} KiB of cache a token in bfloat16",
    ]


def print_plan(plan: Plan, console: Console) -> None:
    """One line for each kind of tensor: shapes, cut, float32 bytes a device; then paddings and fallbacks."""
    table = Table(box=None, pad_edge=False)
    for name in ("tensor", "true shape", "stored as", "cut", "MiB each"):
        table.add_column(name, justify="right" if name.startswith("MiB") else "left", no_wrap=True)
    notes: dict[str, list[str]] = {}
    for d in plan.decisions:
        skip, short = int(d.stacked), d.path.removeprefix("layers/").removesuffix("/kernel")
        layers = f"{d.true_shape[0]} × " if d.stacked else ""
        stored = "same" if d.shape == d.true_shape else " ".join(map(str, d.shape[skip:]))
        named = " ".join(
            f"{axis}:{size}" for axis, size in zip(d.axes[skip:], d.true_shape[skip:], strict=True)
        )
        table.add_row(short, layers + named, stored, _cut(d), f"{bytes_per_device(plan, d) / 2**20:.1f}")
        for note in d.notes:
            notes.setdefault(note, []).append(short)
    console.print(f"mesh {plan.mesh}: {plan.mesh.num_devices} devices")
    console.print(table)
    each = sum(bytes_per_device(plan, d) for d in plan.decisions)
    true = sum(4 * math.prod(d.true_shape) for d in plan.decisions)
    padded = sum(4 * math.prod(d.shape) for d in plan.decisions)
    console.print(
        f"parameters a device: {each / 2**20:.1f} MiB in float32 of {true / 2**20:.1f} in all; padding adds"
        f" {padded / true - 1:.1%}"
    )
    for note, paths in notes.items():
        console.print(f"note: {note}  [{', '.join(paths)}]", markup=False)


def bytes_per_device(plan: Plan, decision: Decision, itemsize: int = 4) -> int:
    """Bytes of one parameter that a device stores."""
    axes = [axis for dim in decision.spec for axis in dim]
    return itemsize * math.prod(decision.shape) // plan.mesh.size(axes)


def _cut(decision: Decision) -> str:
    """Mesh axes of each dim, the layers left out; `·` is a dim that is not cut."""
    return "(" + ", ".join("+".join(axes) or "·" for axes in decision.spec[decision.stacked :]) + ")"
