"""What experts move and compute, predicted: models/moe.py, collective by collective.

Not here: the router, which is a kernel like others (predict.py).
"""

from __future__ import annotations

import math

from shardwise.models.moe import NAMES, ExpertLayout
from shardwise.partition.plan import DATA_AXES
from shardwise.planner.collectives import Phase
from shardwise.planner.predict import Flops, Ledger, layer_runs, made_again

PREFIX = "layers/mlp/experts/"
"""Of the paths of all experts' kernels."""


def predict_experts(ledger: Ledger) -> None:
    """Record the experts of all layers."""
    _Experts(ledger).record()


class _Experts:
    """One prediction."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        plan = ledger.plan
        self.layout = ExpertLayout.of(plan, PREFIX)
        self.kernels = [plan[f"{PREFIX}{name}/kernel"] for name in NAMES]
        self.count, self.in_loop = layer_runs(ledger, self.kernels[0])
        self.shape = ledger.shape("residual")
        self.tokens = ledger.local(self.shape[:2], self.layout.rows[:2])
        self.taken = plan.config.experts_per_token

    def record(self) -> None:
        """Forward, and what training adds."""
        self._forward("forward", whole=True)
        if not self.ledger.trains:
            return
        if self.ledger.workload.remat == "full":
            self._forward("backward", whole=made_again(self.ledger.plan, self.kernels[-1].path))
        self._backward()

    def _forward(self, phase: Phase, whole: bool) -> None:
        """`whole`: with the last product and what follows; else only what the backward pass needs."""
        ledger, layout = self.ledger, self.layout
        out = self.kernels[-1].path
        ledger.reshard(
            self.shape, ledger.plan.activation("residual"), layout.rows, ledger.compute, self.count, phase,
            self.kernels[0].path, "residual laid out for the experts", self.in_loop,
        )  # fmt: skip
        for d in self.kernels if whole else self.kernels[:-1]:
            self._gather(d.path, phase)
            self._product(d.path, phase, 1)
        if not whole:
            return
        ledger.add("all-reduce", layout.parts, ledger.wide, self.tokens * self.shape[2], self.count, phase,
                   out, "residual: the experts' parts added", self.in_loop)  # fmt: skip
        ledger.reshard(
            self.shape, layout.rows, ledger.plan.activation("residual"), ledger.compute, self.count, phase,
            out, "residual: laid out anew", self.in_loop,
        )  # fmt: skip

    def _backward(self) -> None:
        ledger, layout = self.ledger, self.layout
        into, residual = self.kernels[0].path, ledger.plan.activation("residual")
        ledger.reshard(
            self.shape, residual, layout.rows, ledger.compute, self.count, "backward", into,
            "gradient of residual laid out for the experts", self.in_loop,
        )  # fmt: skip
        for d in self.kernels:
            self._gather(d.path, "backward")
            self._product(d.path, "backward", 2)
            self._scatter(d.path)
        for what, width in (("gradient of residual", self.shape[2]), ("gradient of the shares", self.taken)):
            ledger.add("all-reduce", layout.parts, ledger.wide, self.tokens * width, self.count, "backward",
                       into, f"{what}: the experts' parts added", self.in_loop)  # fmt: skip
        ledger.reshard(
            self.shape, layout.rows, residual, ledger.compute, self.count, "backward", into,
            "gradient of residual: laid out anew", self.in_loop,
        )  # fmt: skip

    def _gather(self, path: str, phase: Phase) -> None:
        d = self.ledger.plan[path]
        self.ledger.reshard(
            d.shape[d.stacked :], d.spec[d.stacked :], d.at_use()[d.stacked :], self.ledger.compute,
            self.count, phase, path, "weights gathered just before use", self.in_loop,
        )  # fmt: skip

    def _scatter(self, path: str) -> None:
        ledger, d = self.ledger, self.ledger.plan[path]
        elements = ledger.local(d.shape[d.stacked :], d.at_use()[d.stacked :])
        cut = {axis for axes in d.spec for axis in axes if axis in DATA_AXES}
        scattered, c = ledger.spread(sorted(cut)), ledger.compute
        if scattered:
            ledger.add("reduce-scatter", scattered, c, elements, self.count, "backward", path,
                       "gradient summed and scattered", self.in_loop)  # fmt: skip
            elements //= ledger.plan.mesh.size(scattered)
        rest = [axis for axis in ledger.plan.batch_axes() if axis in DATA_AXES and axis not in cut]
        ledger.add("all-reduce", rest, c, elements, self.count, "backward", path,
                   "gradient summed over the batch", self.in_loop)  # fmt: skip

    def _product(self, path: str, phase: Phase, times: int) -> None:
        """A row for every pair of a token and an expert that it takes, shared evenly by those who hold the
        experts. XLA on a CPU multiplies every row with every expert's kernel and keeps one."""
        ledger, d = self.ledger, self.ledger.plan[path]
        kernel = ledger.local(d.use_shape[d.stacked :], d.at_use()[d.stacked :])
        held = d.use_shape[d.stacked] // ledger.plan.mesh.size(self.layout.experts)
        rows = self.tokens * self.taken
        dense = 2 * rows * kernel * self.count * times
        owners = ledger.plan.mesh.size(self.layout.experts)
        ledger.flops.append(Flops(path, phase, math.ceil(dense / held / owners), dense))
