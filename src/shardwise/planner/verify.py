"""Proof by compilation: the step that training or serving runs, compiled for devices that are not there.

For TPUs by their own compiler, which is in the libtpu wheel and needs no TPU: what the step takes of HBM to
the byte, whether it is refused, and its collectives. For other devices on simulated processors: collectives
alone. Each compilation has a process of its own; what came of it is kept under a key made of all that it
depends on. Not here: that process (compile_worker.py), and which plans are worth it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise import errors
from shardwise.errors import ShardwiseError
from shardwise.partition.plan import Plan
from shardwise.partition.plan_file import to_json
from shardwise.planner.collectives import Collective
from shardwise.planner.tpu_memory import LiveBuffer, Overrun, overrun
from shardwise.runtime.compile_cache import cache_folder
from shardwise.runtime.records import from_values, to_values
from shardwise.steps.workload import Workload

Progress = Callable[[str], None]

TIMEOUT_SECONDS = 3600.0
"""After which a compilation is given up; those of large models take minutes."""

_FORMAT = "shardwise-compiled-1"
_PACKAGE = Path(__file__).parents[1]
_MAKES_THE_STEP = ("models", "steps", "partition")
"""Folders of this package of which a compiled step is made."""
_READS_THE_STEP = (
    "compile_worker", "tpu_memory", "partitioned", "hlo", "origins", "replica_groups", "scalars", "slices",
    "collectives",
)  # fmt: skip
"""Modules of planner/ by which it is read."""
_LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "tokamax")
_TICK_SECONDS = 1.0
_MOST_LINES = 5


class NoTpuCompilerError(ShardwiseError):
    """The libtpu wheel is not installed; compile_on_fake_devices needs none."""


class CompileTimeoutError(ShardwiseError):
    """A compilation took longer than it was given."""


@dataclass(frozen=True)
class CompiledStep:
    """What a compiler made of one device's part of a step. Sizes in bytes; None where nobody has said."""

    target: str
    """What it was compiled for: `v5e:16x16`, `2 × v5e:16x16`, `8 simulated devices`."""
    argument_bytes: int | None = None
    """Arguments in HBM as they lie there, in tiles: of a training step the parameters, the optimizer's state
    and the batch."""
    output_bytes: int | None = None
    """Results, those included that take over a donated argument's memory."""
    alias_bytes: int | None = None
    """Donated arguments whose memory results take over: in a training step all of the state, so that it
    counts once."""
    temp_bytes: int | None = None
    """One heap for all that is neither: gradients, what the backward pass keeps, gathered weights, casts,
    logits. Its size is what it takes at its fullest, with the gaps between arrays of different lifetimes."""
    peak_bytes: int | None = None
    """What the compiler compares with the HBM that there is: arguments, results in memory of their own, and
    the heap. Machine code is not in it."""
    code_bytes: int | None = None
    """Machine code, which lies in HBM too; None where none was made."""
    available_bytes: int | None = None
    """HBM that a program may take on this device: all, less what the system keeps."""
    overrun: Overrun | None = None
    """Why the compiler refused the step, if it did."""
    live: tuple[LiveBuffer, ...] = field(default=(), repr=False)
    """The largest arrays in the heap when it is fullest."""
    collectives: tuple[Collective, ...] | None = field(default=None, repr=False)
    """As the partitioner left them, before the compiler merges and splits them further."""
    no_collectives: str = ""
    """Why there are none."""
    widened: int | None = None
    """How many runs of the reduce-scatters among them the compiler makes all-reduces of the whole in the end,
    which send twice as much: so it does on several torus axes at once."""
    product_flops: int | None = None
    """Of the matrix products of one device; those inside a fused kernel are not seen."""
    seconds: float = 0.0
    """That it took to compile, when it was compiled."""
    jax_version: str = ""
    libtpu_version: str = ""
    """Empty for simulated devices."""
    cached: bool = field(default=False, compare=False)
    """Whether it was compiled by an earlier call."""

    @property
    def memory_verified(self) -> bool:
        """Whether a compiler for the device itself has said what the step takes of its memory."""
        return self.peak_bytes is not None

    @property
    def out_of_memory(self) -> str | None:
        """One sentence on why the step does not fit; None where it does, or where nobody has said."""
        return None if self.overrun is None else f"on {self.target} the step {self.overrun}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"format": _FORMAT, **to_values(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CompiledStep:
        """The record whose `to_json` these are.

        Raises:
            ValueError, TypeError: they are of another form.
        """
        if values.get("format") != _FORMAT:
            raise ValueError(f"no record of format {_FORMAT}")
        return from_values(cls, {key: value for key, value in values.items() if key != "format"})


def default_cache() -> Path | None:
    """Where records are kept unless told otherwise, beside JAX's compiled programs; None if turned off."""
    folder = cache_folder()
    return None if folder is None else folder / "steps"


def compile_for_tpu(
    plan: Plan,
    workload: Workload,
    topology: str,
    *,
    num_slices: int = 1,
    machine_code: bool = True,
    cache: Path | None = None,
    progress: Progress = lambda line: None,
    timeout: float = TIMEOUT_SECONDS,
) -> CompiledStep:
    """Compile the step for a TPU topology, with no TPU.

    Args:
        plan, workload: as for build_step, which makes the step.
        topology: of one slice, in the compiler's words: `v4:4x4x4`, `v5e:16x16`, `v5p:4x4x8`, `v6e:8x8`,
            `tpu7x:4x4x4` (which has two devices a chip).
        num_slices: how many such slices, joined by the data-centre network.
        machine_code: False stops once all memory is assigned and the program accepted, which takes seconds
            where machine code takes a minute. Only code_bytes is missing then, and whether a kernel's own
            memory on the chip suffices.
        cache: folder of records; None keeps none (see default_cache).
        progress: is told, about once a second, what is being done and for how long.
        timeout: in seconds.

    Returns:
        The record; a step that does not fit is a record too (`out_of_memory`), not an error.

    Raises:
        NoTpuCompilerError: libtpu is not installed.
        ConfigError: no such topology, or a workload that does not fit the plan.
        MeshError: the topology cannot host the plan's mesh.
        CompileTimeoutError: it took too long.
        ShardwiseError: the compiler failed otherwise.
    """
    require_tpu_compiler()
    target = topology if num_slices == 1 else f"{num_slices} × {topology}"
    job = {
        "platform": "tpu", "topology": topology, "num_slices": num_slices, "target": target,
        "machine_code": machine_code,
    }  # fmt: skip
    return _compiled(plan, workload, job, cache, progress, timeout)


def compile_on_fake_devices(
    plan: Plan,
    workload: Workload,
    *,
    cache: Path | None = None,
    progress: Progress = lambda line: None,
    timeout: float = TIMEOUT_SECONDS,
) -> CompiledStep:
    """Compile the step on as many simulated processors as the plan's mesh has devices: its collectives.

    Arguments and errors as for compile_for_tpu. Of memory nothing is known: `memory_verified` is False.
    """
    target = f"{plan.mesh.num_devices} simulated devices"
    return _compiled(plan, workload, {"platform": "cpu", "target": target}, cache, progress, timeout)


def require_tpu_compiler() -> None:
    """
    Raises:
        NoTpuCompilerError: libtpu is not installed; says how to.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NoTpuCompilerError(
            "the TPU compiler is not installed: pip install 'shardwise[tpu-compiler]' (it needs no TPU)"
        )


def _compiled(
    plan: Plan,
    workload: Workload,
    job: dict[str, Any],
    cache: Path | None,
    progress: Progress,
    timeout: float,
) -> CompiledStep:
    workload.check(plan)
    job = {**job, "plan": to_json(plan), "workload": to_values(workload)}
    file = None if cache is None else cache / f"{record_key(job)}.json"
    kept = None if file is None else _kept(file)
    if kept is not None and (kept.code_bytes is not None or kept.overrun or not job.get("machine_code")):
        return kept
    with tempfile.TemporaryDirectory(prefix="shardwise-compile-") as folder:
        result = _in_a_process({**job, "folder": folder}, progress, timeout)
    record = _record(job, result)
    if file is not None:
        _keep(file, record)
    return record


def record_key(job: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> str:
    """A digest of all that a record depends on: the step, the target, this package's code and the libraries.

    Args:
        job: plan and workload as JSON, and the target.
        environ: for tests; None is os.environ.
    """
    environ = os.environ if environ is None else environ
    # How plans are told apart by reasons and notes changes no program.
    plan = {key: job["plan"][key] for key in ("model", "mesh", "rules", "overrides", "head_layout")}
    cuts = {
        kind: {name: {k: d[k] for k in ("spec", "shape") if k in d} for name, d in job["plan"][kind].items()}
        for kind in ("parameters", "activations")
    }
    target = {key: job[key] for key in ("platform", "topology", "num_slices") if key in job}
    given = {
        "format": _FORMAT,
        "plan": plan,
        "cuts": cuts,
        "workload": job["workload"],
        "target": target,
        "code": _code_digest(),
        "libraries": {name: installed(name) for name in _LIBRARIES},
        "flags": environ.get("LIBTPU_INIT_ARGS", ""),
    }
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Of the files that make a step, and of those that read what the compiler makes of it."""
    files = [file for folder in _MAKES_THE_STEP for file in sorted((_PACKAGE / folder).rglob("*.py"))]
    files += [_PACKAGE / "planner" / f"{name}.py" for name in _READS_THE_STEP]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(_PACKAGE)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def installed(library: str) -> str:
    """The version of a library; "" where it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _kept(file: Path) -> CompiledStep | None:
    """The record in a file; None where there is none that can be read: it is then made again."""
    try:
        return replace(CompiledStep.from_json(json.loads(file.read_text(encoding="utf-8"))), cached=True)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _keep(file: Path, record: CompiledStep) -> None:
    """Write a record, whole or not at all; a cache that cannot be written is none."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix=".", delete=False, encoding="utf-8"
        ) as new:
            json.dump(record.to_json(), new, indent=1)
        os.replace(new.name, file)


def _record(job: Mapping[str, Any], result: Mapping[str, Any]) -> CompiledStep:
    """From what the process said."""
    made = CompiledStep(
        target=job["target"],
        product_flops=result["product_flops"],
        seconds=result["seconds"],
        jax_version=installed("jax"),
        no_collectives=result.get("no_collectives", ""),
    )
    if result["collectives"] is not None:
        made = replace(made, collectives=tuple(from_values(Collective, c) for c in result["collectives"]))
    if job["platform"] != "tpu":
        return made
    sums = result["allocations"] or {}
    peak = sum(sums[k] for k in ("arguments", "outputs", "temporaries")) - sums["aliased"] if sums else None
    found = overrun(result["refusal"])
    if found is not None and found.space == "HBM" and peak is not None and peak > found.available_bytes:
        found = replace(found, needed_bytes=peak)  # the compiler rounds
    return replace(
        made,
        argument_bytes=sums.get("arguments"),
        output_bytes=sums.get("outputs"),
        alias_bytes=sums.get("aliased"),
        temp_bytes=sums.get("temporaries"),
        peak_bytes=peak if peak is not None or found is None else found.needed_bytes,
        code_bytes=result["code_bytes"],
        available_bytes=result["available_bytes"],
        overrun=found,
        widened=result["widened"],
        live=tuple(from_values(LiveBuffer, b) for b in sums.get("live", ())),
        libtpu_version=installed("libtpu"),
    )


def _environment() -> dict[str, str]:
    """Of the process: no device is woken, no cloud asked which TPU this is, and a libtpu that another process
    holds is no hindrance."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    path = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]))
    return {
        **kept, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": path,
    }  # fmt: skip


def _in_a_process(job: Mapping[str, Any], progress: Progress, timeout: float) -> dict[str, Any]:
    """The result of a job; the process is gone when this returns or raises, be it by Ctrl-C."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.planner.compile_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True, env=_environment(),
            start_new_session=True,  # Ctrl-C is this process's to handle
        )  # fmt: skip
        try:
            return _attended(process, job, progress, timeout, complaints)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()


def _attended(
    process: subprocess.Popen[str],
    job: Mapping[str, Any],
    progress: Progress,
    timeout: float,
    complaints: Any,
) -> dict[str, Any]:
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    start = time.monotonic()
    stage = "starting"
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it died at once; its last words are read below
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    while True:
        spent = time.monotonic() - start
        if spent > timeout:
            raise CompileTimeoutError(
                f"compiling for {job['target']} was given up after {timeout:.0f} s, while {stage}"
            )
        progress(f"{stage} ({spent:.0f} s)")
        try:
            line = lines.get(timeout=min(_TICK_SECONDS, max(timeout - spent, 0.01)))
        except queue.Empty:
            continue
        if line is None:
            raise ShardwiseError(_died(process, job, stage, complaints))
        said = json.loads(line)
        if "error" in said:
            kind = getattr(errors, said["kind"], ShardwiseError)
            raise kind(said["error"])
        if "result" in said:
            result: dict[str, Any] = said["result"]
            return result
        stage = said["stage"]


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    with suppress(ValueError):  # closed by whoever gave up
        for line in stream:
            lines.put(line)
    lines.put(None)


def _died(process: subprocess.Popen[str], job: Mapping[str, Any], stage: str, complaints: Any) -> str:
    code = process.wait()
    complaints.seek(0)
    said = [line.strip() for line in complaints.read().splitlines() if line.strip()]
    last = " | ".join(said[-_MOST_LINES:])
    return (
        f"compiling for {job['target']}: the process ended with code {code} while {stage}; its last words:"
        f" {last or 'none'}"
    )
