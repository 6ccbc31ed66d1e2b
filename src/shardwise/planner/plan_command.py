"""`shardwise plan`: from its options to what it prints.

Not here: the search (search.py) and its tables (plan_view.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.planner import plan_view as view
from shardwise.planner.hardware import System, local_system, parse_system
from shardwise.planner.search import Candidate, Ranking, Request, fewest, search
from shardwise.runtime.files import write_new

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.cli.plan import PlanOptions
    from shardwise.planner.prove import Measured, Verified

DEFAULT_SEQ, DEFAULT_CONTEXT = 4096, 8192
DEFAULT_TOKENS = 16384
"""Tokens a device in training where no batch is given; sequences a device in decoding: DEFAULT_ROWS."""
DEFAULT_ROWS = 8


def run(options: PlanOptions) -> int:
    """Print the ranking; returns the exit code: 1 if nothing fits."""
    from shardwise.api import open_model
    from shardwise.families import config_from_hf

    config = config_from_hf(open_model(options.model).hf_config)
    system, notes = _machine(options)
    request = request_of(options, config, system)
    console = view.console()
    quiet = options.json == "-"
    ranking: Ranking | None
    if options.objective == "devices":
        ranking = fewest(request, system)
        ranking = ranking or search(request, system)
    else:
        ranking = search(request, system)
    # Where nothing fits, the smallest machine that would do is what the reader asks next.
    smallest = None if ranking.fitting else fewest(request, system)
    if options.json is not None:
        text = json.dumps(view.to_json(options.model, ranking), indent=1)
        if quiet:
            print(text)
            return int(not ranking.fitting)
        write_new("--json", options.json, text + "\n")
    for note in (*notes, *_rounded(options, request)):
        console.print(f"note: {note}")
    view.ranked(console, options.model, ranking, options.top, smallest)
    if options.plot is not None:
        from shardwise.planner import plan_plot

        plan_plot.draw(options.plot, options.model, ranking)
    verified = [_verified(candidate, console) for candidate in ranking.fitting[: options.verify]]
    if verified:
        view.verified(console, verified)
    if options.measure and ranking.fitting:
        view.measured(console, _measured(options, ranking, console))
    for written in (options.json, options.plot):
        if written is not None:
            console.print(f"wrote {written}")
    wrong = any(found.compiled.out_of_memory for found in verified)
    return int(not ranking.fitting or wrong)


def simulate(options: PlanOptions) -> None:
    """Make the simulated devices of `--on cpu:N` before JAX starts."""
    from shardwise.runtime import devices, memory

    assert options.on is not None
    system, _ = parse_system(options.on, options.chips)
    memory.tune_malloc()
    devices.configure_devices(f"cpu:{system.num_devices}")


def _verified(candidate: Candidate, console: Console) -> Verified:
    from shardwise.planner.prove import verify

    with console.status(f"compiling {candidate.mesh}") as status:
        return verify(candidate, lambda line: status.update(f"compiling {candidate.mesh}: {line}"))


def _measured(options: PlanOptions, ranking: Ranking, console: Console) -> list[Measured]:
    import jax

    from shardwise.planner.prove import measure

    found = []
    for candidate in ranking.fitting[: options.measure]:
        with console.status(f"running {candidate.mesh}"):
            found.append(measure(candidate, jax.devices()[: candidate.mesh.num_devices]))
    return found


def _machine(options: PlanOptions) -> tuple[System, tuple[str, ...]]:
    if options.on is not None:
        return parse_system(options.on, options.chips)
    system = local_system()
    if system is None:
        raise ConfigError("this machine's devices are not in the table of chips; name a machine with --on")
    return system, (f"--on not given: this machine, {system}",)


def _rounded(options: PlanOptions, request: Request) -> list[str]:
    """What is to be said where --batch-tokens is no whole number of sequences."""
    from shardwise.cli.plan import count

    planned = request.batch * request.length
    if options.batch_tokens is None or count(options.batch_tokens) == planned:
        return []
    return [
        f"--batch-tokens {options.batch_tokens} is no multiple of {request.length:,}; planned for"
        f" {planned:,} tokens, {request.batch:,} whole sequences"
    ]


def request_of(options: PlanOptions, config: ModelConfig, system: System) -> Request:
    """What the options ask for.

    Raises:
        ConfigError: a length above the model's context, or a batch of less than a sequence.
    """
    from shardwise.cli.plan import count, seconds

    decodes = options.task == "decode"
    if decodes and not config.causal:
        raise ConfigError(f"{options.model}: {config.family} is an encoder and does not decode")
    name, given = ("--context", options.context) if decodes else ("--seq", options.seq)
    length = given or min(DEFAULT_CONTEXT if decodes else DEFAULT_SEQ, config.max_position)
    if length > config.max_position:
        raise ConfigError(f"{name} is {length}, more than the model's context of {config.max_position}")
    batch = options.batch
    if batch is None and options.batch_tokens is not None:
        batch = count(options.batch_tokens) // length
        if batch == 0:
            raise ConfigError(f"--batch-tokens {options.batch_tokens} is less than one sequence of {length}")
    if batch is None:
        rows = DEFAULT_ROWS if decodes else max(1, DEFAULT_TOKENS // length)
        batch = rows * system.num_devices
    trains = options.task == "train"
    return Request(
        config, options.task, batch, length, compute_dtype=options.compute_dtype,
        param_dtype=options.param_dtype or ("float32" if trains else "bfloat16"),
        objective=options.objective,
        max_latency=None if options.max_latency is None else seconds(options.max_latency),
        head_layout=None if options.head_layout == "auto" else options.head_layout,
        remat=None if options.remat == "auto" else options.remat,
        grad_accum_steps=options.grad_accum_steps,
    )  # fmt: skip
