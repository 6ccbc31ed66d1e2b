"""Generation for a fixed batch of prompts: prefill, then one token a row and step until all rows stopped.

Not here: continuous batching and HTTP (later in this folder).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import CheckpointError, ConfigError, ContextError
from shardwise.models.cache import outgrown
from shardwise.partition.padding import round_up
from shardwise.partition.rows import put_rows
from shardwise.steps.sampling import SamplingParams

if TYPE_CHECKING:
    from shardwise.api import Model

# Sampling is done in float32; long before this all tokens are equally likely.
_MOST_TEMPERATURE = 1e30

CAPACITY_STEP = 64
"""Cache rows and prompts are rounded up to this many tokens, so that like requests share compiled steps."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a generation are chosen."""

    temperature: float = 0.0
    """0 takes the likeliest."""
    top_k: int = 0
    """Draw among the k likeliest; 0: among all."""
    top_p: float = 1.0
    """Draw among the likeliest that together have this probability."""
    seed: int = 0
    """Row i draws with seed + i (modulo 2³²); its draws depend on nothing else but the position."""
    min_p: float = 0.0
    """Draw among those at least this times as likely as the likeliest. Where several limits are set, top_k
    comes first, then top_p counts what top_k left, then min_p."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= _MOST_TEMPERATURE:  # refuses NaN too
            raise ConfigError(
                f"temperature is {self.temperature}; it must be a number from 0 to {_MOST_TEMPERATURE:g}"
            )
        if not 0 <= self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must lie between 0 and 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must lie between 0 and 1")
        if self.top_k < -1:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 1, or 0 (or -1) for all")


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        prompts: token ids, each at least one; of any lengths.
        max_new_tokens: at most this many new ones a row.
        temperature, top_k, top_p, min_p, seed: see Sampling.
        stop_ids: a row ends with the first of these, which is part of its result.

    Returns:
        The new ids of each row.

    Raises:
        ContextError: a prompt and max_new_tokens together exceed the model's context.
        ConfigError: an empty prompt, an id outside the vocabulary, or a setting out of range.
        CheckpointError: the logits are NaN.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    sampling = Sampling(temperature, top_k, top_p, seed, min_p)
    for ids in stream(model, prompts, max_new_tokens, sampling, stop_ids):
        for row, token in ids:
            rows[row].append(token)
    return rows


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Iterable[int],
) -> Iterator[list[tuple[int, int]]]:
    """The same, step by step: yields (row, new id) for every row that has not stopped."""
    if not prompts:
        return
    longest = _check(model, prompts, max_new_tokens)
    stops = frozenset(stop_ids)
    length = min(round_up(longest, CAPACITY_STEP), model.config.max_position)
    capacity = min(round_up(length + max_new_tokens, CAPACITY_STEP), model.config.max_position)
    # Rules may cut activations, and the cache, over the length.
    length = round_up(length, model.plan.length_multiple())
    capacity = round_up(max(capacity, length), model.plan.mesh.size(model.plan.activation("kv_cache")[1]))
    batch = round_up(len(prompts), model.plan.batch_multiple())
    choose = "greedy" if sampling.temperature == 0 else "sample"
    options: dict[str, Any] = {"capacity": capacity, "choose": choose}
    first = model.step("prefill", batch, length, **options)
    later = model.step("decode", batch, 1, **options)

    tokens = np.zeros((batch, capacity), np.int32)  # prompts, and what is made of them
    counts = np.ones((batch,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        counts[row] = len(prompt)

    def put(**arrays: np.ndarray) -> list[Any]:
        return list(put_rows(model.plan, model.mesh, arrays).values())

    chosen_by = None
    if choose == "sample":
        seeds = np.array([(sampling.seed + row) % 2**32 for row in range(batch)], np.uint32)

        def column(value: float, kind: type = np.float32) -> np.ndarray:
            return np.full((batch,), value, kind)

        top_k = min(sampling.top_k, model.config.vocab_size)
        temperature, kept, top_p, min_p, seed = put(
            t=column(sampling.temperature), k=column(top_k, np.int32), p=column(sampling.top_p),
            m=column(sampling.min_p), s=seeds,
        )  # fmt: skip
        chosen_by = SamplingParams(temperature=temperature, top_k=kept, top_p=top_p, min_p=min_p, seed=seed)
    cache = model.empty_cache(batch, capacity)
    ids, cache = first(model.decode_params, cache, *put(t=tokens[:, :length], c=counts), chosen_by)
    (ones,) = put(ones=np.ones((batch,), np.int32))
    running = set(range(len(prompts)))
    for made in range(1, max_new_tokens + 1):
        host = np.asarray(ids.addressable_data(0))
        lost = next((row for row in sorted(running) if not 0 <= host[row] < model.config.vocab_size), None)
        if lost is not None:
            raise CheckpointError(
                f"the model's logits for prompt {lost} are not numbers: the weights are broken, or too large"
                f" for compute dtype {model.compute_dtype} (float32 holds more)"
            )
        yield [(row, int(host[row])) for row in sorted(running)]
        running -= {row for row in running if int(host[row]) in stops}
        if not running or made == max_new_tokens:
            return
        tokens[np.arange(batch), counts] = host
        counts = counts + 1
        going = counts[sorted(running)]
        if outgrown(model.config, going - 1, going):
            length = min(round_up(int(counts.max()), CAPACITY_STEP), model.config.max_position)
            again, cache = model.step("prefill", batch, length, **options), model.emptied(cache)
            ids, cache = again(model.decode_params, cache, *put(t=tokens[:, :length], c=counts), chosen_by)
            continue
        (given,) = put(tokens=host[:, None])
        ids, cache = later(model.decode_params, cache, given, ones, chosen_by)


def _check(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    longest = max(len(prompt) for prompt in prompts)
    context, vocab = model.config.max_position, model.config.vocab_size
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {number} is empty; give at least one token, such as BOS")
        bad = next((token for token in prompt if not 0 <= token < vocab), None)
        if bad is not None:
            raise ConfigError(f"prompt {number} has token id {bad}, outside the vocabulary of {vocab}")
    if longest >= context:
        raise ContextError(
            f"a prompt of {longest} tokens leaves no room in the model's context of {context}; shorten it"
        )
    if longest + max_new_tokens > context:
        raise ContextError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's context of"
            f" {context}; shorten the prompt or ask for at most {context - longest} new tokens"
        )
    return longest
