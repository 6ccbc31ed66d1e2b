"""The process in which a step is compiled for devices that are not there: one job in, one record out.

`python -m shardwise.planner.compile_worker` reads a job as one line of JSON from its standard input, and
ends when that closes, so that it outlives nobody. On its standard output it writes lines of JSON: the stage
that it is at, and at last the result or an error. Not here: who starts it, and the cache (verify.py).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.models.config import ModelConfig
from shardwise.partition.plan import Plan
from shardwise.partition.plan_file import mesh_of, restore_plan
from shardwise.planner.tpu_memory import ACCEPTED, PROGRAM, Allocations, overrun, read_allocations
from shardwise.runtime.records import from_values, to_values
from shardwise.steps.workload import Workload

if TYPE_CHECKING:
    from shardwise.planner.partitioned import PartitionedModule

Say = Callable[[dict[str, Any]], None]

_POLL_SECONDS = 0.05
_HANDED_OVER = "(handed over)"


def main() -> None:
    """Do the job on the standard input."""
    # What libraries print must not come between the lines of JSON.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        say({"result": _compile(job, say)})
    except ShardwiseError as error:
        say({"error": str(error), "kind": type(error).__name__})
    # Without waiting for a compilation whose machine code nobody wants.
    os._exit(0)


def _leave_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def _compile(job: dict[str, Any], say: Say) -> dict[str, Any]:
    say({"stage": "tracing the step"})
    plan, workload = _plan(job["plan"]), from_values(Workload, job["workload"])
    if job["platform"] == "tpu":
        return _for_tpu(plan, workload, job, say)
    return _on_processors(plan, workload, say)


def _plan(content: dict[str, Any]) -> Plan:
    from shardwise.models.parameters import plan_model

    config, mesh = from_values(ModelConfig, content["model"]), mesh_of(content, _HANDED_OVER)
    return restore_plan(content, _HANDED_OVER, config, mesh, lambda *given: plan_model(config, mesh, *given))


def _on_processors(plan: Plan, workload: Workload, say: Say) -> dict[str, Any]:
    """Collectives alone: what a processor's program holds says nothing of another device's memory."""
    import jax

    from shardwise.planner.partitioned import partitioned_module
    from shardwise.steps.build import build_step

    jax.config.update("jax_num_cpu_devices", plan.mesh.num_devices)
    step = build_step(plan, workload)
    say({"stage": f"compiling for {plan.mesh.num_devices} simulated devices"})
    start = time.monotonic()
    module = partitioned_module(step)
    return {
        "collectives": [to_values(c) for c in module.collectives(plan.mesh)],
        "product_flops": module.flops().total,
        "seconds": time.monotonic() - start,
    }


def tpu_devices(topology: str, num_slices: int) -> list[Any]:
    """The devices of a TPU topology, one a chip where a program can span a chip's cores.

    Raises:
        ConfigError: the TPU compiler does not know it.
    """
    from jax.experimental import topologies

    kind, _, dims = topology.partition(":")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    sizes = [int(n) for n in dims.split("x") if n.isdecimal()]
    if 1 in sizes[:2]:  # the default host is 2×2 chips, of which a smaller slice is a part
        options["chips_per_host_bounds"] = (*(min(2, n) for n in sizes[:2]), 1)
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
    except Exception as error:  # libtpu raises whatever it finds
        raise ConfigError(
            f"topology {topology!r}: the TPU compiler does not know it ({_first_line(error)}); topologies are"
            " such as v4:4x4x4, v5e:16x16, v5p:4x4x8, v6e:8x8, tpu7x:4x4x4"
        ) from None
    return list(found.devices)


def _for_tpu(plan: Plan, workload: Workload, job: dict[str, Any], say: Say) -> dict[str, Any]:
    import jax

    from shardwise.planner.partitioned import dump_options, no_compile_cache, partitioned_in
    from shardwise.steps.build import build_step

    devices = tpu_devices(job["topology"], job["num_slices"])
    folder = Path(job["folder"])
    lowered = build_step(plan, workload, devices).lower()
    say({"stage": f"compiling for {job['target']}"})
    start = time.monotonic()
    compiler = _Compiler(lambda: lowered.compile(compiler_options=dump_options(str(folder))))
    with no_compile_cache():
        compiler.run(folder, say, job["machine_code"])
        seconds = time.monotonic() - start
        available = _hbm(devices[0])
    refused, compiled = compiler.error, compiler.compiled
    if refused is not None and "RESOURCE_EXHAUSTED" not in str(refused):
        raise ShardwiseError(
            f"the TPU compiler failed on this step: {_first_line(refused)}; please report it with the command"
        )
    code, allocations = None, read_allocations(folder)
    if compiled is not None:
        stats = compiled.memory_analysis()
        code = stats.generated_code_size_in_bytes
        allocations = allocations or Allocations(
            stats.argument_size_in_bytes, stats.alias_size_in_bytes, stats.output_size_in_bytes,
            stats.peak_memory_in_bytes - stats.argument_size_in_bytes, (),
        )  # fmt: skip
    module, why = None, ""
    try:
        module = partitioned_in(folder)
    except ShardwiseError as error:
        why = str(error)
    return {
        "allocations": None if allocations is None else to_values(allocations),
        "code_bytes": code,
        "available_bytes": available,
        "refusal": "" if refused is None else str(refused),
        "collectives": None if module is None else [to_values(c) for c in module.collectives(plan.mesh)],
        "product_flops": None if module is None else module.flops().total,
        "widened": None if module is None else _widened(module, plan, folder),
        "no_collectives": why,
        "seconds": seconds,
        "jax_version": jax.__version__,
    }


def _widened(module: PartitionedModule, plan: Plan, folder: Path) -> int | None:
    """How many runs of reduce-scatters became all-reduces of the whole; None if the compiler does not say."""
    from shardwise.planner.partitioned import PartitionedModule

    final = next(folder.glob(f"*.{PROGRAM}"), None)
    if final is None:
        return None
    try:
        last = PartitionedModule.from_text(final.read_text(errors="replace"))
        runs = [
            sum(c.count for c in m.collectives(plan.mesh) if c.op == "reduce-scatter") for m in (module, last)
        ]
    except ValueError:
        return None
    return max(runs[0] - runs[1], 0)


class _Compiler:
    """A compilation in a thread of its own, so that what it has written so far can be looked at."""

    def __init__(self, compile: Callable[[], Any]):
        self.compiled: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(compile,), daemon=True)

    def _run(self, compile: Callable[[], Any]) -> None:
        try:
            self.compiled = compile()
        except Exception as error:  # told by whoever looks
            self.error = error

    def run(self, folder: Path, say: Say, machine_code: bool) -> None:
        """Until it is done; without machine code until all memory is assigned and the program accepted."""
        self._thread.start()
        accepted = False
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            if not accepted and any(folder.glob(f"*.{ACCEPTED}")):
                accepted = True
                if not machine_code:
                    return
                say({"stage": "memory assigned, making machine code"})


def _hbm(device: Any) -> int | None:
    """Bytes of HBM that the compiler gives a program, which it names when it refuses one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    huge = jax.ShapeDtypeStruct((1 << 40,), jnp.int8, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(huge).compile()
    except Exception as error:
        found = overrun(str(error))
        return None if found is None else found.available_bytes
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


if __name__ == "__main__":
    main()
