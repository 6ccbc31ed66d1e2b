"""pretrain and finetune: from options to a trained, exported model. One loop serves both.

Read `_run` first: it is the whole story. Not here: the step (steps/train.py) and the options (cli/).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.api import Model, open_model
from shardwise.checkpoints import native
from shardwise.checkpoints.reader import Checkpoint
from shardwise.checkpoints.tokenizer import check_tokenizer_fits, load_tokenizer
from shardwise.data.loader import BatchLoader, num_steps_for
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.families import config_from_hf
from shardwise.families.keys import of_training_alone
from shardwise.models.flops import parameter_count, train_flops_per_token
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import round_up
from shardwise.partition.plan import Plan
from shardwise.partition.rows import local_rows, put_rows
from shardwise.planner.choose import plan_for
from shardwise.runtime.distributed import is_main_process
from shardwise.runtime.peak import peak_flops
from shardwise.steps.build import Step, build_step
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.train import TrainState, abstract_state, fresh_state, start_state
from shardwise.steps.workload import Workload
from shardwise.training.metrics import Reporter
from shardwise.training.objectives import Data, Objective, prepare

if TYPE_CHECKING:
    from shardwise.cli.finetune import FinetuneOptions
    from shardwise.cli.options import TrainingOptions
    from shardwise.cli.pretrain import PretrainOptions


def finetune(options: FinetuneOptions) -> int:
    """Train a model from its checkpoint; returns the exit code."""
    source = open_model(options.model)
    if source.reader is None:
        raise CheckpointError(
            f"{options.model} has no weights to fine-tune; give a folder or .gguf file, or use"
            " `shardwise pretrain`"
        )
    return _run(options, source, source, fresh=False)


def pretrain(options: PretrainOptions) -> int:
    """Train a newly drawn model; returns the exit code."""
    return _run(options, open_model(options.model), open_model(options.tokenizer), fresh=True)


def _run(
    options: FinetuneOptions | PretrainOptions, source: Checkpoint, tokenizer_source: Checkpoint, fresh: bool
) -> int:
    quiet = not is_main_process()

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    # The plan comes first: everything after it follows it.
    objective = prepare(options, source, say)
    config = config_from_hf(objective.hf_config)
    if options.length > config.max_position:
        raise ConfigError(
            f"--length is {options.length}, more than the model's context of {config.max_position}"
        )
    the_plan = plan_for(options, config, "train", lambda mesh: _head_workload(options, mesh), say)
    default = options.mesh is None and options.plan is None
    say(f"mesh {the_plan.mesh}" + (" (default for training: all fsdp)" if default else ""))
    say(f"{options.model}: {parameter_count(the_plan):,} parameters, {options.param_dtype} held,"
        f" {options.compute_dtype} compute")  # fmt: skip
    if ignored := of_training_alone(objective.hf_config):
        listed = ", ".join(f"{key} {value}" for key, value in ignored.items())
        say(f"note: config.json asks for {listed}; training here applies none of it")

    # Data next, since mistakes in it are the user's commonest, and reading weights takes longest.
    tokenizer = load_tokenizer(tokenizer_source)
    check_tokenizer_fits(tokenizer, config.vocab_size)
    data = objective.read(tokenizer, config)
    steps = options.steps or num_steps_for(data.rows, options.global_batch)
    if options.warmup_steps > steps:
        raise ConfigError(
            f"--warmup-steps is {options.warmup_steps}, more than the {steps} steps of --epochs"
            f" {options.epochs}; lower it"
        )
    workload = Workload(
        "train", options.global_batch, options.length, compute_dtype=options.compute_dtype,
        param_dtype=options.param_dtype, remat=options.remat, grad_accum_steps=options.grad_accum_steps,
        z_loss=options.z_loss, optimizer=_optimizer(options, steps),
    )  # fmt: skip
    step = build_step(the_plan, workload)
    _check_processes_agree(options, the_plan, data)

    # The state: from a checkpoint of this run, from the model's weights, or drawn.
    state = _start(options, objective, source, step, data, fresh, say)
    done = int(state.step)
    if done < steps:
        state = _loop(options, step, state, data, done, steps, quiet)
    else:  # the run ended between its last checkpoint and its export
        say(f"all {steps} steps are done already; what is left is to write the model")

    # The end: the folder that other tools read.
    model = Model(tokenizer_source, the_plan, step.mesh, state.params, options.compute_dtype)
    say(f"wrote {_export(options, model, objective, source, tokenizer, say)}")
    return 0


def _check_processes_agree(options: TrainingOptions, the_plan: Plan, data: Data) -> None:
    """Refuse processes with different options or data: they would mix runs or wait for each other."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    values = asdict(options)
    # Paths may differ between hosts; what is found there must not.
    for name in ("model", "tokenizer", "out", "checkpoint_dir", "metrics"):
        values[name] = values.get(name) is not None
    values |= {"model": the_plan.config, "data": data.fingerprint, "eval_data": data.held_out_digest}
    for name in ("process_id", "coordinator", "devices", "debug"):
        del values[name]
    digests = [hashlib.sha256(repr(value).encode()).digest() for value in values.values()]
    all_digests = multihost_utils.process_allgather(np.array([list(d) for d in digests], np.uint8))
    odd = [_flag(name) for i, name in enumerate(values) if (all_digests[:, i] != all_digests[0, i]).any()]
    if odd:
        raise ConfigError(f"the processes were not started alike: {', '.join(odd)} differ; give all the same")


def _optimizer(options: TrainingOptions, steps: int) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=options.learning_rate, warmup_steps=options.warmup_steps, total_steps=steps,
        lr_end_ratio=options.lr_end_ratio, weight_decay=options.weight_decay, beta1=options.beta1,
        beta2=options.beta2, adam_eps=options.adam_eps, max_grad_norm=options.max_grad_norm,
    )  # fmt: skip


def _start(
    options: TrainingOptions, objective: Objective, source: Checkpoint, step: Step, data: Data, fresh: bool,
    say: Any,
) -> TrainState:  # fmt: skip
    the_plan, mesh, workload = step.plan, step.mesh, step.workload
    if options.resume:
        assert options.checkpoint_dir is not None, "the options refuse --resume without --checkpoint-dir"
        found = native.find_newest(options.checkpoint_dir, say)
        _check_same_run(found, _identity(options, step, data))
        say(f"resuming from {found.path} (step {found.step}, saved on mesh {found.meta['mesh']})")
        return native.restore(found, the_plan, mesh, abstract_state(the_plan, mesh, workload))
    if fresh:
        return fresh_state(the_plan, mesh, workload, options.seed)
    params = objective.load(source, step, options.param_dtype, options.seed)
    return start_state(the_plan, mesh, workload, params)


def _identity(options: TrainingOptions, step: Step, data: Data) -> dict[str, Any]:
    """What must be the same for a resumed run to go on exactly where it stopped."""
    return {
        "model": json.loads(json.dumps(asdict(step.plan.config))),  # as the manifest gives it back: lists
        "data_fingerprint": data.fingerprint,
        "objective": options.objective,
        **({"mask_probability": options.mask_probability} if options.objective == "mlm" else {}),
        "length": options.length,
        "global_batch": options.global_batch,
        "seed": options.seed,
        "optimizer": asdict(step.workload.trained_by),
        "z_loss": options.z_loss,
        "param_dtype": options.param_dtype,
        "compute_dtype": options.compute_dtype,
    }


def _check_same_run(found: native.Found, now: dict[str, Any]) -> None:
    for key, value in now.items():
        saved = found.meta.get(key)
        if saved == value:
            continue
        if isinstance(value, dict):
            saved = saved or {}
            odd = [name for name in value if saved.get(name) != value[name]]
            prefix = "" if key == "optimizer" else f"{_flag(key)}: "
            show = _flag if key == "optimizer" else str
            changes = [f"{show(name)} was {saved.get(name)!r}, is {value[name]!r}" for name in odd]
            detail = prefix + ", ".join(changes)
        elif key == "data_fingerprint":
            detail = f"{_flag(key)} holds other text, or it was tokenized or ordered otherwise"
        else:
            detail = f"{_flag(key)} was {saved!r}, is {value!r}"
        raise CheckpointError(
            f"--resume: {found.path} is of another run: {detail}; use the saved run's options, or another"
            " --checkpoint-dir"
        )


def _flag(key: str) -> str:
    """How the user knows an option or a part of the identity."""
    names = {"model": "MODEL", "data_fingerprint": "--data", "total_steps": "--steps or --epochs"}
    return names.get(key, "--" + key.replace("_", "-"))


def _loop(
    options: TrainingOptions, step: Step, state: TrainState, data: Data, done: int, steps: int, quiet: bool
) -> TrainState:
    the_plan, mesh, batch = step.plan, step.mesh, options.global_batch
    rows = local_rows(the_plan, mesh, batch)
    loader = BatchLoader(data.rows, global_batch=batch, rows=rows, start_step=done, num_steps=steps)
    peak, convention = peak_flops(options.compute_dtype)
    flops = train_flops_per_token(the_plan, options.length)
    identity = _identity(options, step, data)
    with Reporter(steps, done, options.metrics_file, flops, peak, quiet) as reporter:
        reporter.say(
            "MFU: 6 FLOPs a matmul parameter and token + causal attention,"
            f" over {peak / 1e9:,.0f} GFLOP/s ({convention})"
        )

        def evaluate(number: int, params: Any) -> None:
            assert data.measure is not None
            result = data.measure(step, params)
            reporter.write({"step": number, **result.metrics})
            reporter.say(f"step {number}  held-out {result.text}")

        if data.measure and done == 0:
            evaluate(0, state.params)
            reporter.restart_clock()
        since = 0
        for number, arrays in enumerate(loader, start=done + 1):
            state, metrics = step(state, put_rows(the_plan, mesh, arrays, rows, batch))
            since += 1
            last = number == steps
            saves = options.checkpoint_dir and (last or number % (options.checkpoint_every or steps) == 0)
            logs = last or number % options.log_every == 0
            if logs or saves:
                host = {name: float(value.addressable_data(0)) for name, value in metrics.items()}
                if not math.isfinite(host["loss"]) or not math.isfinite(host["grad_norm"]):
                    raise ShardwiseError(
                        f"step {number}: loss is {host['loss']}, gradient norm {host['grad_norm']}; lower"
                        " --learning-rate, raise --warmup-steps, or resume from an earlier checkpoint"
                    )
            if logs:
                reporter.step(number, host, since * batch * options.length, since)
                since = 0
            pause = False
            if saves or last:
                _check_finite(state.params, number)
            if options.checkpoint_dir and saves:
                native.save(options.checkpoint_dir, state, the_plan, identity, options.keep_last)
                pause = True
            if data.measure and (last or number % (options.eval_every or steps) == 0):
                evaluate(number, state.params)
                pause = True
            if pause:
                reporter.restart_clock()
    return state


def _head_workload(options: TrainingOptions, mesh: MeshSpec) -> Workload:
    """The step that the head layout is chosen for; a batch that does not fit the mesh is refused later."""
    accum = options.grad_accum_steps
    batch = round_up(options.global_batch, mesh.dp * mesh.fsdp * accum)
    return Workload(
        "train", batch, options.length, compute_dtype=options.compute_dtype,
        param_dtype=options.param_dtype, grad_accum_steps=accum,
    )  # fmt: skip


@jax.jit
def _not_finite(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: ~jnp.isfinite(value).all() for path, value in params.items()}


def _check_finite(params: dict[str, jax.Array], number: int) -> None:
    """Refuse to keep parameters that the last update broke: loss and gradients were from before it."""
    odd = [path for path, bad in _not_finite(params).items() if bool(bad.addressable_data(0))]
    if odd:
        raise ShardwiseError(
            f"step {number} made parameters that are not finite ({len(odd)}, such as {odd[0]}); nothing of it"
            " is kept; lower --learning-rate, or resume from an earlier checkpoint"
        )


def _export(
    options: TrainingOptions, model: Model, objective: Objective, source: Checkpoint, tokenizer: Any, say: Any
) -> Path:
    """Write the model; returns where."""
    from shardwise.checkpoints.export import export

    out = Path(options.out)
    if out.exists():
        there = f"--out {out} has come to exist meanwhile"
        if options.checkpoint_dir:
            raise CheckpointError(f"{there}; the training state is in --checkpoint-dir")
        # Nothing else holds what was trained.
        out = next(
            other for n in itertools.count(2) if not (other := out.with_name(f"{out.name}-{n}")).exists()
        )
        say(f"warning: {there}: the model goes to {out} instead")
    export(
        out, model.plan, model.mesh, model.params, hf_config=objective.hf_config, tokenizer=tokenizer,
        generation_config=source.generation_config or model.checkpoint.generation_config,
    )  # fmt: skip
    return out
