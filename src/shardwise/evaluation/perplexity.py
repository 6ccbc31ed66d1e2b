"""Perplexity of a model on a text: every token scored once, in windows that fit the model.

Not here: benchmarks by task (later in this folder).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardwise.errors import DataError
from shardwise.evaluation.windows import batch_windows, rolling_windows
from shardwise.partition.padding import round_up
from shardwise.partition.plan import Plan
from shardwise.partition.rows import local_rows, put_rows
from shardwise.runtime.distributed import is_main_process
from shardwise.steps.build import build_step
from shardwise.steps.workload import Workload

if TYPE_CHECKING:
    from shardwise.cli.eval import EvalOptions

_LENGTH_STEP = 64
"""Short texts are computed at a multiple of this many tokens, not at the whole window's length."""


@dataclass(frozen=True)
class Perplexity:
    """What was measured."""

    nll: float
    """Mean negative log-likelihood of a token, in nats."""
    tokens: int
    """Tokens scored."""
    accuracy: float
    """Part of the tokens that were the model's first choice."""
    windows: int
    """Windows computed."""

    @property
    def perplexity(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def __str__(self) -> str:
        return f"nll {self.nll:.4f}  perplexity {self.perplexity:.3f}  on {self.tokens:,} tokens"


def tokenize_texts(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids of each text without BOS or EOS; what looks like a control token in it is spelled out."""
    from shardwise.data.tokens import encode_plain

    return [np.asarray(ids, np.int32) for ids in encode_plain(tokenizer, texts)]


def prefix_token(tokenizer: Any) -> int:
    """The id that stands in front of a text, so that its first token is scored too: BOS, or else EOS.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError("the tokenizer has neither BOS nor EOS to stand in front of the first token; set one")


def measure(
    plan: Plan,
    mesh: jax.sharding.Mesh,
    params: Any,
    texts: Sequence[np.ndarray],
    *,
    prefix_token: int,
    length: int,
    batch: int,
    compute_dtype: str,
    param_dtype: str,
    context: int = 1,
) -> Perplexity:
    """Score texts, each on its own.

    Args:
        params: stacked or one array per layer.
        texts: int32 ids of each, without BOS; at least one has a token.
        prefix_token: stands in front of each text, so that its first token is scored too.
        length: most tokens in a window, at most the model's context.
        batch: windows computed at a time; does not change the result.
        context: see rolling_windows.

    The sum is taken in float64 on the host, in the order of the texts.
    """
    windows = [w for text in texts for w in rolling_windows(text, prefix_token, length, context)]
    assert windows, "no token to score"
    batch = round_up(min(batch, len(windows)), plan.batch_multiple())
    length = min(length, round_up(max(len(window.inputs) for window in windows), _LENGTH_STEP))
    step = build_step(
        plan,
        Workload("score", batch, length, compute_dtype=compute_dtype, param_dtype=param_dtype),
        tuple(mesh.devices.flat),
    )
    rows = local_rows(plan, mesh, batch)
    total, right, tokens = 0.0, 0, 0
    for arrays in batch_windows(windows, batch, length):
        mine = {name: array[rows] for name, array in arrays.items()}
        out = step(params, put_rows(plan, mesh, mine, rows, batch))
        scored = arrays["weights"] > 0
        total += float(np.asarray(out["nll"].addressable_data(0))[scored].sum(dtype=np.float64))
        right += int(np.asarray(out["right"].addressable_data(0))[scored].sum())
        tokens += int(scored.sum())
    return Perplexity(total / tokens, tokens, right / tokens, len(windows))


def run(options: EvalOptions) -> int:
    """`shardwise eval`; returns the exit code."""
    from shardwise.api import load, open_model
    from shardwise.data.text import read_documents
    from shardwise.errors import ConfigError
    from shardwise.families import config_from_hf
    from shardwise.planner.choose import plan_for

    def say(text: str) -> None:
        if is_main_process():
            print(text, flush=True)

    texts = read_documents([options.perplexity], text_field=options.text_field).documents
    config = config_from_hf(open_model(options.model).hf_config)
    if not config.causal:
        raise ConfigError(
            f"{options.model}: {config.family} is an encoder, and perplexity here is of the next token; a"
            " masked model's pseudo-perplexity is not there yet"
        )
    the_plan = plan_for(
        options, config, "score",
        lambda mesh: Workload(
            "score", round_up(options.batch, mesh.dp * mesh.fsdp), min(options.length, config.max_position),
            compute_dtype=options.compute_dtype,
        ),
        say,
    )  # fmt: skip
    model = load(options.model, plan=the_plan, compute_dtype=options.compute_dtype, stacked=True)
    tokenizer = model.tokenizer
    length = min(options.length, config.max_position)
    if length < options.length:
        say(f"--length {options.length} is above the model's context: windows of {length} tokens")
    if options.context > length:
        raise ConfigError(f"--context {options.context} is above the model's context of {length}")
    default = " (default: all tp)" if options.mesh is None and options.plan is None else ""
    say(f"mesh {model.plan.mesh}{default}")
    ids = tokenize_texts(tokenizer, texts)
    prefix = prefix_token(tokenizer)
    if not any(map(len, ids)):
        raise DataError(f"{options.perplexity} has no token to score")
    start = time.perf_counter()
    result = measure(
        model.plan, model.mesh, model.params, ids, prefix_token=prefix, length=length, batch=options.batch,
        compute_dtype=options.compute_dtype, param_dtype=model.param_dtype, context=options.context,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    say(f"{options.perplexity}: {result}  ({result.windows} windows of up to {length}, {seconds:.1f} s)")
    say(f"first choice right: {result.accuracy:.1%}")
    return 0
