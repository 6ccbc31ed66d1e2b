"""Which mesh for a model on a machine: every mesh that the machine can host, predicted and ranked.

Not here: the prediction of one (cost.py, memory.py), what is printed (plan_view.py), and compiling or running
the best (verify.py, measure.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.errors import ConfigError, MeshError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rules import HeadLayout
from shardwise.planner.cost import Cost, cost, mfu, time_text
from shardwise.planner.hardware import System, shapes
from shardwise.planner.head_choice import choose_head_layout
from shardwise.planner.hosting import Hosting, host
from shardwise.planner.memory import LANES, Memory, memory
from shardwise.runtime.chips import Domain, Torus
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

Objective = Literal["throughput", "latency", "memory", "devices"]
Remat = Literal["none", "dots", "full"]

USABLE = 0.92
"""Of a device's memory, what a step may be predicted to take: the system keeps a part, and a compiler leaves
gaps between arrays."""
_REMATS: tuple[Remat, ...] = ("none", "dots", "full")


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    config: ModelConfig
    task: Literal["train", "prefill", "decode", "score"]
    batch: int
    """Sequences in one step over all devices."""
    length: int
    """Tokens a sequence; in decoding, and after a prefill, the tokens that the cache holds."""
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    objective: Objective = "throughput"
    max_latency: float | None = None
    """Seconds that a step may take."""
    head_layout: HeadLayout | None = None
    """None: the cheapest for each mesh."""
    remat: Remat | None = None
    """None: whatever is fastest and fits."""
    grad_accum_steps: int | None = None
    """None: as few as fit."""

    def workload(self, remat: Remat = "none", grad_accum_steps: int = 1) -> Workload:
        """The step."""
        trains = self.task == "train"
        return Workload(
            self.task, self.batch, 1 if self.task == "decode" else self.length,
            capacity=self.length if self.task in ("prefill", "decode") else 0,
            compute_dtype=self.compute_dtype, param_dtype=self.param_dtype, remat=remat,
            grad_accum_steps=grad_accum_steps, optimizer=OptimizerConfig() if trains else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One way to run the step, predicted."""

    plan: Plan
    workload: Workload
    hosting: Hosting
    cost: Cost
    memory: Memory
    refused: str = ""
    """Why it is no answer; empty if it is one."""

    @property
    def mesh(self) -> MeshSpec:
        """Axes' sizes."""
        return self.plan.mesh

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.cost.tokens / self.cost.total / self.mesh.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs a second over the peak for products in the compute dtype."""
        return mfu(self.cost, self.hosting, self.workload.compute_dtype)

    @property
    def micro_batch(self) -> int:
        """Sequences that a device works on at a time."""
        steps = self.workload.grad_accum_steps if self.workload.task == "train" else 1
        return self.workload.batch // self.plan.batch_multiple() // steps


@dataclass(frozen=True)
class Ranking:
    """All candidates."""

    request: Request
    system: System
    fitting: tuple[Candidate, ...]
    """The best first."""
    refused: tuple[Candidate, ...]
    """Those that do not fit or are too slow, the nearest to fitting first."""
    impossible: tuple[tuple[MeshSpec, str], ...]
    """Meshes that were not predicted, with the reason: the machine cannot host them, or the batch does not
    divide."""


def search(request: Request, system: System) -> Ranking:
    """Predict every mesh of all devices, each with its fastest head layout, remat and micro-batch to fit."""
    fitting, refused, impossible = [], [], []
    for mesh in meshes(system.num_devices):
        try:
            found = _best_on(request, host(system, mesh))
        except (MeshError, ConfigError) as error:
            impossible.append((mesh, str(error)))
            continue
        if found.refused:
            refused.append(found)
        else:
            fitting.append(found)
    key = _KEYS[request.objective]
    # Of equal ones, as every mesh of one device, the simplest first: no tp, then no dp.
    fitting.sort(key=lambda c: (key(c), c.mesh.tp, c.mesh.dp))
    refused.sort(key=lambda c: (c.memory.total, c.cost.total))
    return Ranking(request, system, tuple(fitting), tuple(refused), tuple(impossible))


_KEYS: dict[Objective, Callable[[Candidate], float]] = {
    "throughput": lambda c: c.cost.total,
    "latency": lambda c: c.cost.total,
    "memory": lambda c: c.memory.total,
    "devices": lambda c: c.cost.total,
}


def meshes(num_devices: int) -> Iterator[MeshSpec]:
    """All factorings of a number of devices over dp, fsdp and tp."""
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tp in divisors:
        for fsdp in divisors:
            if num_devices % (tp * fsdp) == 0:
                yield MeshSpec(num_devices // tp // fsdp, fsdp, tp)


def _best_on(request: Request, hosting: Hosting) -> Candidate:
    """The fastest on one mesh that fits, or the smallest if none does."""
    mesh = hosting.mesh
    group = mesh.dp * mesh.fsdp
    if request.batch % group:
        raise ConfigError(_indivisible(request.batch, group, mesh))
    plan = _with_head(request, hosting)
    each = request.batch // group
    steps = [request.grad_accum_steps] if request.grad_accum_steps else _divisors(each)
    if request.task != "train":
        steps = [1]
    found: list[Candidate] = []
    remats = _REMATS if request.task == "train" and request.remat is None else (request.remat or "none",)
    room = hosting.system.hbm * USABLE
    for remat in remats:
        # More micro-batches take less memory and more messages: the first that fit are the fastest.
        lanes = LANES if hosting.system.chip.kind == "tpu" else 1
        sized = [(n, memory(plan, request.workload(remat, n), lanes)) for n in steps if each % n == 0]
        if not sized:
            raise ConfigError(
                f"{request.grad_accum_steps} micro-batches do not divide {each} sequences a group"
            )
        number, size = next((item for item in sized if item[1].total <= room), sized[-1])
        workload = request.workload(remat, number)
        refused = "" if size.total <= room else _too_large(size, hosting.system)
        predicted = cost(plan, workload, hosting)
        if not refused and request.max_latency is not None and predicted.total > request.max_latency:
            refused = f"a step takes {time_text(predicted.total)}, more than {time_text(request.max_latency)}"
        found.append(Candidate(plan, workload, hosting, predicted, size, refused))
    answers = [c for c in found if not c.refused]
    if answers:
        return min(answers, key=_KEYS[request.objective])
    return min(found, key=lambda c: c.memory.total)


def _with_head(request: Request, hosting: Hosting) -> Plan:
    """The plan with the layout asked for, or the cheapest."""
    mesh, config = hosting.mesh, request.config

    def make(layout: HeadLayout | None) -> Plan:
        return plan_model(config, mesh, head_layout=layout)

    if request.head_layout is not None or mesh.tp == 1 or config.head_path is None:
        return make(request.head_layout if mesh.tp > 1 else None)
    choice = choose_head_layout(make, request.workload(), hosting.system.chip)
    return make(choice.layout)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _indivisible(batch: int, group: int, mesh: MeshSpec) -> str:
    near = [n for n in (batch // group * group, (batch // group + 1) * group) if n]
    if batch < group:
        return f"{batch} sequences leave {group - batch} of dp {mesh.dp} × fsdp {mesh.fsdp} without one"
    return f"{batch} sequences do not divide over {group}; {' or '.join(map(str, near))} do"


def _too_large(size: Memory, system: System) -> str:
    return f"takes {size.total / 2**30:.1f} GiB of {system.hbm * USABLE / 2**30:.1f} usable"


def fewest(request: Request, system: System, at_most: int | None = None) -> Ranking | None:
    """The ranking on the smallest machine of this chip on which the request fits; None if none has.

    Args:
        at_most: chips; default as many as the chip's largest slice has, or 4,096.
    """
    for smaller in sizes(system, at_most):
        ranking = search(request, smaller)
        if ranking.fitting:
            return ranking
    return None


def sizes(system: System, at_most: int | None = None) -> Iterator[System]:
    """Machines of one chip, rising: one slice of each size (TPU), or 1, 2, 4, 8 GPUs and then whole nodes."""
    chip = system.chip
    if isinstance(chip.fabric, Torus):
        seen: set[int] = set()
        for shape in shapes(chip):
            chips = math.prod(shape)
            # In between there are many sizes that few have.
            if chips in seen or chips & (chips - 1) or chips > (at_most or chip.fabric.most_chips):
                continue
            seen.add(chips)
            yield System(chip, shape)
        return
    most = chip.fabric.size if isinstance(chip.fabric, Domain) else system.num_devices
    count = 1
    while count <= (at_most or 4096):
        yield replace(system, shape=(min(count, most),), slices=max(1, count // most))
        count *= 2
