"""Attention in blocks equals the definition, computed in NumPy, for whole sequences and for a cache."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.models.attention import Scores, Visibility, attention, query_block

PLACE = cast(Any, SimpleNamespace(on_cpu=True))
B, K, G, E = 2, 2, 3, 4
SCORES = Scores(E**-0.5)


def _reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    scores = np.einsum("btkge,bske->bkgts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bkgts,bske->btkge", weights / weights.sum(-1, keepdims=True), v)


def _packed(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments 1, 2, 3 of uneven lengths, and positions counted within each."""
    bounds = [0, length // 3, length // 3 + length // 2, length]
    segments = np.concatenate([np.full(b - a, i + 1) for i, (a, b) in enumerate(pairwise(bounds))])
    positions = np.concatenate([np.arange(b - a) for a, b in pairwise(bounds)])
    both = np.stack([segments, np.ones(length)]), np.stack([positions, np.arange(length)])
    return both[0].astype(np.int32), both[1].astype(np.int32)


def _draw(length: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(length)
    shapes = (B, length, K, G, E), (B, keys, K, E), (B, keys, K, E)
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    return q, k, v


def _mask(seen: Visibility) -> np.ndarray:
    q_positions, q_segments = np.asarray(seen.q_positions), np.asarray(seen.q_segments)
    same = q_segments[:, :, None] == np.asarray(seen.k_segments)[:, None]
    return same & (np.asarray(seen.k_positions)[:, None] <= q_positions[:, :, None])


@pytest.mark.parametrize("length", [1, 7, 128, 129, 300, 1025, 1100])
def test_packed_sequences_of_any_length_equal_the_definition(length: int) -> None:
    segments, positions = _packed(length)
    visible = Visibility(*(jnp.asarray(x) for x in (positions, segments) * 2), ordered=True)
    q, k, v = _draw(length, length)
    with jax.enable_x64(True):
        out = attention(PLACE, *(jnp.asarray(x) for x in (q, k, v)), visible, SCORES, "xla")
    expected = _reference(q, k, v, _mask(visible))
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)


def test_gradients_in_blocks_equal_those_of_one_block() -> None:
    length = 300
    assert query_block(length) < length
    segments, positions = _packed(length)
    rows = [jnp.asarray(x) for x in (positions, segments) * 2]
    weights = np.random.default_rng(1).standard_normal((B, length, K, G, E))

    def gradients(ordered: bool) -> tuple[jax.Array, ...]:
        def value(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return (
                attention(PLACE, q, k, v, Visibility(*rows, ordered=ordered), SCORES, "xla") * weights
            ).sum()

        return jax.grad(value, (0, 1, 2))(*(jnp.asarray(x) for x in _draw(length, length)))

    with jax.enable_x64(True):
        blocks = gradients(ordered=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardwise.models.attention.query_block", lambda length: length)
            whole = gradients(ordered=False)
    for got, expected in zip(blocks, whole, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("length", [1, 5, 200])
def test_queries_behind_a_cache_see_every_key_up_to_their_own_position(length: int) -> None:
    """Keys of a cache lie further to the right than the queries' own index: none may be left out."""
    starts, capacity = np.array([3, 40]), 256
    positions = (starts[:, None] + np.arange(length)).astype(np.int32)
    slots = np.broadcast_to(np.arange(capacity, dtype=np.int32), (B, capacity))
    ones = np.ones((B, length), np.int32), np.ones((B, capacity), np.int32)
    visible = Visibility(*(jnp.asarray(x) for x in (positions, ones[0], slots, ones[1])))
    q, k, v = _draw(length, capacity)
    with jax.enable_x64(True):
        out = attention(PLACE, *(jnp.asarray(x) for x in (q, k, v)), visible, SCORES, "xla")
    np.testing.assert_allclose(out, _reference(q, k, v, _mask(visible)), rtol=1e-12, atol=1e-13)


def test_bfloat16_is_rounded_alike_if_products_are_widened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Widening operands changes no product: results differ by reduction order in float32 before rounding."""
    length = 300
    segments, positions = _packed(length)
    visible = Visibility(*(jnp.asarray(x) for x in (positions, segments) * 2), ordered=True)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in _draw(length, length)]
    results = []
    for native in (True, False):
        monkeypatch.setattr("shardwise.models.dense.multiplies_bfloat16", lambda native=native: native)
        out = attention(PLACE, *arrays, visible, SCORES, "xla")
        assert out.dtype == jnp.bfloat16
        results.append(np.asarray(out, np.float64))
    # a value near a rounding boundary may fall to either side: one unit in the last of bfloat16's 8 bits, of
    # the weights and then of the sum, whose terms are at most max|v|
    largest = float(np.abs(np.asarray(arrays[2], np.float64)).max())
    np.testing.assert_allclose(results[0], results[1], rtol=2**-7, atol=2**-8 * largest)
