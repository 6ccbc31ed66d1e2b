"""`shardwise eval`: from its options to what is printed.

Not here: the measuring (perplexity.py, masked.py, labels.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwise.api import Model, load, open_model
from shardwise.data.labelled import counted, encode, read_labelled
from shardwise.data.masking import Vocabulary
from shardwise.data.text import read_documents
from shardwise.data.tokens import template
from shardwise.errors import ConfigError, DataError
from shardwise.evaluation import labels, masked, perplexity
from shardwise.families import config_from_hf
from shardwise.models.config import ModelConfig
from shardwise.partition.padding import round_up
from shardwise.planner.choose import plan_for
from shardwise.runtime.distributed import is_main_process
from shardwise.steps.workload import Workload

if TYPE_CHECKING:
    from shardwise.cli.eval import EvalOptions

Say = Callable[[str], None]


def run(options: EvalOptions) -> int:
    """Measures; returns the exit code."""

    def say(text: str) -> None:
        if is_main_process():
            print(text, flush=True)

    # What the user may have got wrong comes before the weights, whose reading takes longest.
    config = config_from_hf(open_model(options.model).hf_config)
    _check_head(options, config)
    length = min(options.length, config.max_position)
    if length < options.length:
        say(f"--length {options.length} is above the model's context: windows of {length} tokens")
    if options.context > length:
        raise ConfigError(f"--context {options.context} is above the model's context of {length}")
    work = _labels if options.classify is not None else _pseudo if not config.causal else _perplexity
    measure = work(options, length, say)
    the_plan = plan_for(
        options, config, "score",
        lambda mesh: Workload(
            "score", round_up(options.batch, mesh.dp * mesh.fsdp), length, compute_dtype=options.compute_dtype
        ),
        say,
    )  # fmt: skip
    model = load(options.model, plan=the_plan, compute_dtype=options.compute_dtype, stacked=True)
    default = " (default: all tp)" if options.mesh is None and options.plan is None else ""
    say(f"mesh {model.plan.mesh}{default}")
    measure(model)
    return 0


def _check_head(options: EvalOptions, config: ModelConfig) -> None:
    """Refuse a measurement that the model has no head for."""
    if options.classify is not None:
        if config.head != "labels":
            raise ConfigError(
                f"--classify: {options.model} is no classifier; make it one with"
                " `shardwise finetune --objective classify`"
            )
        return
    if config.head == "labels":
        raise ConfigError(f"--perplexity: {options.model} is a classifier; measure it with --classify FILE")
    if config.head == "none":
        raise ConfigError(
            f"--perplexity: {options.model} is the base model alone, without a head over the vocabulary; give"
            " it one with `shardwise finetune --objective mlm`"
        )
    if not config.causal and options.context != 1:
        raise ConfigError(
            f"--context has no effect on {config.family}, which reads every window whole; leave it out"
        )


def _perplexity(options: EvalOptions, length: int, say: Say) -> Callable[[Model], None]:
    texts = _texts(options)

    def measure(model: Model) -> None:
        ids = perplexity.tokenize_texts(model.tokenizer, texts)
        _require_tokens(options, any(map(len, ids)))
        prefix = perplexity.prefix_token(model.tokenizer)
        start = time.perf_counter()
        result = perplexity.measure(
            model.plan, model.mesh, model.params, ids, prefix_token=prefix, length=length,
            batch=options.batch, compute_dtype=options.compute_dtype, param_dtype=model.param_dtype,
            context=options.context,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        say(f"{options.perplexity}: {result}  ({result.windows} windows of up to {length}, {seconds:.1f} s)")
        say(f"first choice right: {result.accuracy:.1%}")

    return measure


def _pseudo(options: EvalOptions, length: int, say: Say) -> Callable[[Model], None]:
    texts = _texts(options)

    def measure(model: Model) -> None:
        ids = perplexity.tokenize_texts(model.tokenizer, texts)
        _require_tokens(options, any(map(len, ids)))
        before, behind = template(model.tokenizer)
        frame = masked.Frame(tuple(before), tuple(behind), Vocabulary.of(model.tokenizer).mask_id)
        say(f"{sum(map(len, ids)):,} tokens, each hidden once by itself: as many rows to compute")
        start = time.perf_counter()
        result = masked.measure(
            model.plan, model.mesh, model.params, ids, frame=frame, length=length, batch=options.batch,
            compute_dtype=options.compute_dtype, param_dtype=model.param_dtype,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        say(f"{options.perplexity}: {result}  ({result.windows} windows of up to {length}, {seconds:.1f} s)")
        say(f"first choice right: {result.accuracy:.1%}")

    return measure


def _labels(options: EvalOptions, length: int, say: Say) -> Callable[[Model], None]:
    assert options.classify is not None
    texts, _ = read_labelled(
        [options.classify], text_field=options.text_field, pair_field=options.pair_field,
        label_field=options.label_field,
    )  # fmt: skip

    def measure(model: Model) -> None:
        names = model.config.labels
        encoded = encode(model.tokenizer, texts, names, length=length, vocab_size=model.config.vocab_size)
        say(f"labels: {counted(encoded.labels, names)}")
        if encoded.cut:
            say(
                f"{encoded.cut:,} of {len(texts):,} texts are longer than {length} tokens: their ends are cut"
            )
        start = time.perf_counter()
        result = labels.measure(
            model.plan, model.mesh, model.params, encoded, length=length, batch=options.batch,
            compute_dtype=options.compute_dtype, param_dtype=model.param_dtype,
        )  # fmt: skip
        say(f"{options.classify}: {result}  ({time.perf_counter() - start:.1f} s)")

    return measure


def _texts(options: EvalOptions) -> list[str]:
    assert options.perplexity is not None
    return read_documents([options.perplexity], text_field=options.text_field).documents


def _require_tokens(options: EvalOptions, some: bool) -> None:
    if not some:
        raise DataError(f"{options.perplexity} has no token to score")
