"""Heads of every layout for tests: plans whose head is cut over V, over D or not, and a float64 reference.

Not here: how a user asks for a layout; these plans are made by hand from the decisions of the rules.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.padding import round_up
from shardwise.partition.plan import Plan
from shardwise.partition.rules import Spec

LAYOUTS = ("vocab", "hidden", "replicated")
FSDP_DIMS = (0, 1)


def with_layout(plan: Plan, layout: str, fsdp_dim: int | None = 1, path: str | None = None) -> Plan:
    """The plan with its head (or the matrix at `path`) laid out so.

    Only the dim that `tp` cuts is padded for it. `fsdp` cuts `fsdp_dim` as well, where it divides it.
    """
    path = path or ("embed/table" if plan.config.tie_embeddings else "lm_head/kernel")
    tp = plan.mesh.tp
    cut: list[tuple[str, ...]] = {
        "vocab": [("tp",), ()], "hidden": [(), ("tp",)], "replicated": [(), ()]
    }[layout]  # fmt: skip
    sizes = (plan.config.vocab_size, plan.config.embed_dim)
    shape = tuple(round_up(size, tp) if axes else size for size, axes in zip(sizes, cut, strict=True))
    spec: Spec = tuple(cut)
    if fsdp_dim is not None and shape[fsdp_dim] % (plan.mesh.fsdp * (tp if cut[fsdp_dim] else 1)) == 0:
        spec = tuple((*axes, "fsdp") if dim == fsdp_dim else axes for dim, axes in enumerate(cut))
    changed = {path: (shape, spec), "lm_head/bias": (shape[:1], tuple(cut[:1]))}
    decisions = tuple(
        replace(d, use_shape=changed[d.path][0], shape=changed[d.path][0], spec=changed[d.path][1])
        if d.path in changed
        else d
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions)


@dataclass(frozen=True)
class Case:
    """One head on one mesh."""

    layout: str
    sizes: tuple[int, int, int]
    vocab: int
    embed: int
    rows: int
    """B on each device that splits the batch."""
    length: int
    tied: bool = False
    bias: bool = False
    dtype: str = "float64"
    fsdp_dim: int | None = 1

    @property
    def path(self) -> str:
        return "embed/table" if self.tied else "lm_head/kernel"

    def placement(self) -> Placement:
        config = ModelConfig(
            vocab_size=self.vocab, embed_dim=self.embed, num_layers=1, num_heads=2, num_kv_heads=1,
            head_dim=2, mlp_dim=4, max_position=64, tie_embeddings=self.tied, head_bias=self.bias,
        )  # fmt: skip
        plan = with_layout(plan_model(config, MeshSpec(*self.sizes)), self.layout, self.fsdp_dim)
        mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
        return Placement(plan, mesh, jnp.dtype(self.dtype))

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random weights and rows; some targets are the likeliest ids, some tokens have no weight."""
        rng = np.random.default_rng(seed)
        rows = self.rows * self.sizes[0] * self.sizes[1]
        shape = (rows, self.length)
        weights = rng.random(shape) * (rng.random(shape) < 0.7)
        weights[0, 0] = 0.5
        out = {
            "hidden": rng.normal(size=(*shape, self.embed)),
            "weight": rng.normal(size=(self.vocab, self.embed)),
            "bias": rng.normal(0, 2, self.vocab) if self.bias else np.zeros(self.vocab),
            "tokens": rng.integers(0, self.vocab, shape),
            "targets": rng.integers(0, self.vocab, shape),
            "weights": weights,
        }
        out["tokens"][0, 0] = out["targets"][0, 0] = self.vocab - 1  # the last real id, beside any padding
        kinds = {"tokens": np.int32, "targets": np.int32}
        return {name: array.astype(kinds.get(name, self.dtype)) for name, array in out.items()}

    def reference(self, given: dict[str, np.ndarray], z_loss: float) -> dict[str, Any]:
        """In float64 from whole logits; where the matrix is tied, tokens are looked up in it too."""
        wide = {name: array.astype(np.float64) for name, array in given.items()}
        hidden, w, bias, weights = (wide[name] for name in ("hidden", "weight", "bias", "weights"))
        targets, tokens = given["targets"], given["tokens"]
        x = hidden + w[tokens] if self.tied else hidden
        logits = x @ w.T + bias
        best = logits.max(-1)
        lse = best + np.log(np.exp(logits - best[..., None]).sum(-1))
        picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
        one_hot = targets[..., None] == np.arange(self.vocab)
        probabilities = np.exp(logits - lse[..., None])
        slopes = weights[..., None] * (probabilities * (1 + 2 * z_loss * lse)[..., None] - one_hot)
        d_hidden, d_weight = slopes @ w, np.einsum("btv,btd->vd", slopes, x)
        if self.tied:
            np.add.at(d_weight, tokens, d_hidden)
        return {
            "logits": logits,
            "loss": (weights * (lse - picked + z_loss * lse**2)).sum(),
            "d_hidden": d_hidden,
            "d_weight": d_weight,
            "d_bias": slopes.sum((0, 1)),
            "nll": lse - picked,
            "right": picked >= best,
            "top_ids": np.argsort(-logits, -1, kind="stable"),
            "top_logprobs": -np.sort(-(logits - lse[..., None]), -1),
        }


def largest_array(compiled: str, kind: str = r"f\d+") -> int:
    """Elements of the largest array of floats in a compiled program."""
    shapes = re.findall(rf"\b{kind}\[([\d,]+)\]", compiled)
    assert shapes
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)
