"""Generation continues each prompt as if it were alone, on any mesh, and stops and refuses where it must."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from shardwise.api import Model
from shardwise.checkpoints.reader import Checkpoint
from shardwise.errors import CheckpointError, ConfigError, ContextError
from shardwise.models.config import ModelConfig, RopeConfig
from shardwise.models.parameters import layer_paths, plan_model
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import named_sharding
from shardwise.serving.generate import Sampling, generate, stream

VOCAB, CONTEXT, NEW = 103, 96, 6
PROMPTS = [
    [7],
    list(range(20, 60, 6)),
    [5, 99, 102, 0, 1, 50, 50, 50, 3, 77, 8, 14, 15, 92, 6, 53, 58, 97, 93, 23],
]
CONFIG = ModelConfig(
    vocab_size=VOCAB, embed_dim=16, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_dim=22,
    max_position=CONTEXT, tie_embeddings=True,
)  # fmt: skip


LONGROPE = replace(
    CONFIG, rope=RopeConfig(
        "longrope", factor=4.0, original_max_position=24, short_factor=(1.0, 1.25), long_factor=(2.0, 9.0)
    ),
)  # fmt: skip


@lru_cache(maxsize=8)
def model(*sizes: int, config: ModelConfig = CONFIG) -> Model:
    """A random model: one array per layer, the same numbers on every mesh."""
    plan = plan_model(config, MeshSpec(*sizes))
    mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    rng, params = np.random.default_rng(3), {}
    for d in plan.decisions:
        true = rng.normal(1.0 if d.init == "ones" else 0.0, 0.3, d.true_shape).astype(np.float32)
        padded = plan.padding.pad(true, d.axes, d.shape)
        for layer, path in enumerate(layer_paths(plan, d.path)):
            array, spec = (padded[layer], d.spec[1:]) if d.stacked else (padded, d.spec)
            params[path] = jax.device_put(array, named_sharding(mesh, spec))
    return Model(Checkpoint(Path("none"), "config", {}, None, None), plan, mesh, params)


@lru_cache(maxsize=1)
def greedy_rows() -> list[list[int]]:
    """The greedy continuation of all prompts in one batch, on one device."""
    return generate(model(1, 1, 1), PROMPTS, max_new_tokens=NEW)


def assert_likeliest(prompts: list[list[int]], rows: list[list[int]]) -> None:
    """Every new token is the argmax, by a clear margin, of the whole sequence's logits without a cache."""
    length = max(len(p) + len(r) for p, r in zip(prompts, rows, strict=True))
    tokens = np.zeros((len(rows), length), np.int32)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[i, : len(prompt) + len(row)] = prompt + row
    logits = model(1, 1, 1).logits(tokens)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        found = logits[i, len(prompt) - 1 : len(prompt) - 1 + len(row)]
        assert found.argmax(-1).tolist() == row
        second, first = np.sort(found, axis=-1)[:, -2:].T
        # float32 logits are known to about 1e-6; a nearer tie could fall either way on another mesh.
        assert (first - second).min() > 1e-4


def test_greedy_tokens_are_the_likeliest_of_the_whole_sequence() -> None:
    rows = greedy_rows()
    assert [len(row) for row in rows] == [NEW] * 3
    assert len({tuple(row) for row in rows}) == 3 and max(len(set(row)) for row in rows) > 2
    assert_likeliest(PROMPTS, rows)


def test_rows_of_a_mixed_batch_equal_each_prompt_alone() -> None:
    alone = [generate(model(1, 1, 1), [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS]
    assert alone == greedy_rows()


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4), (2, 1, 2)])
def test_every_mesh_gives_the_tokens_of_one_device(sizes: tuple[int, int, int]) -> None:
    assert generate(model(*sizes), PROMPTS, max_new_tokens=NEW) == greedy_rows()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2)])
def test_rows_that_outgrow_their_context_one_after_the_other_go_on_as_each_alone(
    sizes: tuple[int, int, int],
) -> None:
    """Rows of 1, 7 and 20 tokens: of 20 steps the third passes 24 tokens in the fifth, the second in the last
    but two, the first in none."""
    rows = generate(model(*sizes, config=LONGROPE), PROMPTS, max_new_tokens=20)
    one = model(1, 1, 1, config=LONGROPE)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert generate(one, [prompt], max_new_tokens=20) == [row]
        # each new token against all before it as a whole sequence of just that length
        lengths = len(prompt) + np.arange(20)
        mask = np.arange(lengths[-1])[None] < lengths[:, None]
        text = np.array([prompt + row[:-1]], np.int32) * mask
        logits = one.logits(text, mask.astype(np.int32))[np.arange(20), lengths - 1]
        assert logits.argmax(-1).tolist() == row


def test_a_row_ends_with_its_first_stop_id_and_the_others_go_on() -> None:
    free = greedy_rows()
    stop = free[2][2]
    want = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len(want[2]) == 3 and max(map(len, want)) == NEW
    assert generate(model(1, 1, 1), PROMPTS, max_new_tokens=NEW, stop_ids=[stop]) == want


def test_generation_ends_when_all_rows_have_stopped_and_each_step_tells_running_rows_only() -> None:
    free = greedy_rows()
    stops = {free[0][2], free[1][3], free[2][2]}
    steps = list(stream(model(1, 1, 1), PROMPTS, NEW, Sampling(), stops))
    want = [[(i, row[n]) for i, row in enumerate(free) if not stops & set(row[:n])] for n in range(NEW)]
    assert steps == [step for step in want if step]
    assert [len(step) for step in steps] == [3, 3, 3, 1]


def test_one_new_token_is_the_first_of_many() -> None:
    one = generate(model(1, 1, 1), PROMPTS, max_new_tokens=1)
    assert one == [row[:1] for row in greedy_rows()]


def test_a_prompt_and_its_continuation_may_fill_the_context_to_the_last_token() -> None:
    prompt = [(13 * i) % VOCAB for i in range(CONTEXT - NEW)]
    rows = generate(model(1, 1, 1), [prompt], max_new_tokens=NEW)
    assert len(rows[0]) == NEW
    assert_likeliest([prompt], rows)


def test_more_than_the_context_holds_is_refused_with_what_would_fit() -> None:
    words = "a prompt of 90 tokens and 7 new ones exceed the model's context of 96; .* at most 6 new tokens"
    with pytest.raises(ContextError, match=words):
        generate(model(1, 1, 1), [[1], [1] * 90], max_new_tokens=7)
    with pytest.raises(ContextError, match="200 tokens leaves no room in the model's context of 96"):
        generate(model(1, 1, 1), [[1] * 200], max_new_tokens=1)


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 103]], {}, "prompt 0 has token id 103, outside the vocabulary of 103"),
        ([[1], [2, -1]], {}, "prompt 1 has token id -1"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
        ([[1]], {"temperature": math.nan}, "temperature is nan"),
        ([[1]], {"temperature": math.inf}, "temperature is inf"),
        ([[1]], {"temperature": 1e300}, "temperature is 1e[+]300; it must be a number from 0 to 1e[+]30"),
        ([[1]], {"top_p": 1.5}, "top_p is 1.5"),
        ([[1]], {"top_p": -0.1}, "top_p is -0.1"),
        ([[1]], {"min_p": 1.5}, "min_p is 1.5"),
        ([[1]], {"min_p": -0.1}, "min_p is -0.1"),
        ([[1]], {"top_k": -2}, "top_k is -2"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    prompts: list[list[int]], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(model(1, 1, 1), prompts, **({"max_new_tokens": 2} | settings))


def test_no_prompts_give_no_rows() -> None:
    assert generate(model(1, 1, 1), []) == []


def sampled(prompts: list[list[int]], seed: int, **settings: Any) -> list[list[int]]:
    options = {
        "max_new_tokens": NEW,
        "temperature": 1.5,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.001,
        "seed": seed,
    }
    return generate(model(1, 1, 1), prompts, **(options | settings))


def test_seeds_give_the_same_tokens_again_whoever_is_in_the_batch() -> None:
    rows = sampled(PROMPTS, seed=5)
    assert sampled(PROMPTS, seed=5) == rows != sampled(PROMPTS, seed=6)
    assert rows != greedy_rows()
    for i, prompt in enumerate(PROMPTS):
        assert sampled([prompt], seed=5 + i) == [rows[i]]
    swapped = sampled([PROMPTS[2], PROMPTS[1], PROMPTS[0]], seed=5)
    assert swapped[1] == rows[1]
    # The same prompt three times is three draws.
    assert len({tuple(row) for row in sampled([PROMPTS[1]] * 3, seed=5)}) == 3


def test_any_whole_number_is_a_seed() -> None:
    assert sampled([[7]], seed=2**32 + 9) == sampled([[7]], seed=9)
    assert sampled([[7]], seed=-1) == sampled([[7]], seed=2**32 - 1)


def test_a_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    assert sampled(PROMPTS, seed=5, top_k=2**40) == sampled(PROMPTS, seed=5, top_k=0)


def test_settings_that_leave_one_id_are_greedy() -> None:
    for settings in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-9}):
        assert sampled(PROMPTS, seed=1, **settings) == greedy_rows()


def test_weights_that_make_no_numbers_are_reported_and_no_token_is_made_up() -> None:
    made = model(1, 1, 1)
    broken = dict(made.params)
    broken["layers/1/mlp/up_proj/kernel"] = broken["layers/1/mlp/up_proj/kernel"] * np.nan
    with pytest.raises(CheckpointError, match="logits for prompt 0 are not numbers.*compute dtype float32"):
        generate(made.with_params(broken), PROMPTS, max_new_tokens=NEW)
