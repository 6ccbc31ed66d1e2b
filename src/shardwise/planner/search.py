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


Plans = Callable[[Hosting], Plan]
"""The plan that a model has on a mesh."""


def search(request: Request, system: System, plans: Plans | None = None) -> Ranking:
    """Predict every mesh of all devices, each with the head layout, remat and micro-batch that are best.

    Args:
        plans: default the usual rules, with the head layout asked for or the cheapest.
    """
    plans = plans or (lambda hosting: _with_head(request, hosting))
    fitting, refused, impossible = [], [], []
    for mesh in meshes(system.num_devices):
        try:
            found = _best_on(request, host(system, mesh), plans)
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


def _best_on(request: Request, hosting: Hosting, plans: Plans) -> Candidate:
    """The best on one mesh that fits, or the smallest if none does."""
    mesh = hosting.mesh
    group = mesh.dp * mesh.fsdp
    if request.batch % group:
        raise ConfigError(_indivisible(request.batch, group, mesh))
    plan = plans(hosting)
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
        if request.objective == "memory":
            number, size = min(sized, key=lambda item: item[1].total)
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


FINEST = 48
"""Sizes of machines that `fewest` tries between those that double."""


def fewest(request: Request, system: System, at_most: int | None = None) -> Ranking | None:
    """The ranking on the smallest machine of this chip on which the request fits; None if none was found.

    Sizes that double are tried until one does, then those in between; where these are more than FINEST, as
    many of them, evenly spread.

    Args:
        at_most: chips; default as many as the chip's largest slice has, or 4,096.
    """
    large = next(
        (found for machine in sizes(system, at_most) if (found := search(request, machine)).fitting), None
    )
    if large is None:
        return None
    between = [
        machine
        for machine in sizes(system, large.system.num_chips - 1, doubling=False)
        if _may_hold(request, machine)
    ]
    if len(between) > FINEST:
        between = between[:: -(-len(between) // FINEST)]
    rankings = (search(request, machine) for machine in between)
    return next((ranking for ranking in rankings if ranking.fitting), large)


def _may_hold(request: Request, system: System) -> bool:
    """Whether what lies split on all devices, parameters and what the optimizer keeps, fits at all."""
    plan = plan_model(request.config, MeshSpec(1, 1, 1))
    size = memory(plan, request.workload("full", 1))
    return (size.params + size.optimizer) / system.num_devices <= system.hbm * USABLE


def sizes(system: System, at_most: int | None = None, doubling: bool = True) -> Iterator[System]:
    """Machines of one chip, rising.

    TPUs: one slice of each size, then up to MOST_SLICES of the largest, where that is of 2 dims. GPUs: parts
    of a node, then whole nodes, which are as large as the given machine's.

    Args:
        at_most: chips; default the largest slice's or 4,096.
        doubling: only sizes that double; otherwise all that there are.
    """
    chip = system.chip
    if isinstance(chip.fabric, Torus):
        seen: set[int] = set()
        for shape in shapes(chip):
            chips = math.prod(shape)
            if (
                chips in seen
                or (doubling and chips & (chips - 1))
                or chips > (at_most or chip.fabric.most_chips)
            ):
                continue
            seen.add(chips)
            yield System(chip, shape)
        largest = shapes(chip)[-1]
        if len(largest) == 2:
            for slices in range(2, MOST_SLICES + 1):
                chips = slices * math.prod(largest)
                if not (doubling and slices & (slices - 1)) and chips <= (at_most or chips):
                    yield System(chip, largest, slices)
        return
    most = chip.fabric.size if isinstance(chip.fabric, Domain) else system.num_devices
    if system.slices > 1:
        most = system.slice_chips
    limit, count = at_most or 4096, 1
    while count <= limit:
        yield replace(system, shape=(min(count, most),), slices=max(1, count // most))
        if count < most:
            count = min(count * 2, most)
        else:
            count += count if doubling else most


MOST_SLICES = 16
"""Slices that the search for a machine goes up to."""
