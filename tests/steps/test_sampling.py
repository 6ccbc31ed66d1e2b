"""The next token: greedy, temperature, top-k and top-p are what they should be, on every mesh, row by row."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.plan import named_sharding
from shardwise.steps import sampling
from shardwise.steps.sampling import SamplingParams

DRAWS = 2000


@lru_cache(maxsize=16)
def placement(vocab: int, *sizes: int) -> Placement:
    config = ModelConfig(
        vocab_size=vocab, embed_dim=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=4,
        max_position=8,
    )  # fmt: skip
    plan = plan_model(config, MeshSpec(*sizes))
    return Placement(
        plan, build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices]), jnp.dtype("float32")
    )


@lru_cache(maxsize=16)
def compiled(place: Placement, kind: str) -> Callable[..., jax.Array]:
    function = {"greedy": sampling.greedy, "sample": sampling.sample}[kind]
    return jax.jit(lambda *args: function(place, args[0], place.plan.rules.mesh_axes("vocab"), *args[1:]))


def put(place: Placement, logits: np.ndarray) -> jax.Array:
    """Logits [B, V] as the model leaves them: padded ids −inf, cut over the vocabulary."""
    padded = np.pad(
        logits, [(0, 0), (0, place.plan.padding.vocab - logits.shape[1])], constant_values=-np.inf
    )
    spec = (place.plan.batch_axes(), place.plan.rules.mesh_axes("vocab"))
    return jax.device_put(padded, named_sharding(place.mesh, spec))


def greedy(place: Placement, logits: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(place, "greedy")(put(place, logits)))


def sample(
    place: Placement,
    logits: np.ndarray,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    seed: Any = 0,
    position: Any = 0,
) -> np.ndarray:
    """Draw for each row of `logits`; the other arguments are one for all rows or one a row."""
    rows = logits.shape[:1]
    kinds = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.int32)
    values = (temperature, top_k, top_p, min_p, seed, position)
    *params, positions = (np.broadcast_to(np.asarray(v, k), rows) for v, k in zip(values, kinds, strict=True))
    return np.asarray(compiled(place, "sample")(put(place, logits), SamplingParams(*params), positions))


def draws(place: Placement, logits: np.ndarray, count: int = DRAWS, **settings: Any) -> np.ndarray:
    """`count` draws from one distribution, each with another seed."""
    return sample(place, np.broadcast_to(logits, (count, logits.size)), seed=np.arange(count), **settings)


def random_logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c514_kept_sets_of_top_p_and_top_k(sizes: tuple[int, int, int], dtype: str) -> None:
    place = placement(4, *sizes)

    def kept(probabilities: list[float], **settings: Any) -> set[int]:
        with np.errstate(divide="ignore"):
            logits = np.log(np.array(probabilities, np.float32)).astype(jnp.dtype(dtype))
        return set(draws(place, logits, **settings).tolist())

    three, four = [0.45, 0.35, 0.2, 0.0], [0.5, 0.25, 0.125, 0.125]
    assert kept(three, top_p=0.7) == {0, 1}
    # 0.75 is exactly the sum of the first two, so that rounding may ask for one more, but for no other.
    assert kept(four, top_p=0.75) in ({0, 1}, {0, 1, 2}, {0, 1, 3})
    assert kept(four, top_p=0.74) == {0, 1}
    assert kept(four, top_p=1e-8) == kept(four, top_p=0.0) == {0}
    assert kept(four, top_p=1.0) == {0, 1, 2, 3}
    assert kept(three, top_p=1.0) == {0, 1, 2}
    for off in (0, -1, 4, 5, 1_000_000, 2**31 - 1):
        assert kept(four, top_k=off) == {0, 1, 2, 3}
    assert kept(four, top_k=1) == {0}
    assert kept(four, top_k=2) == {0, 1}
    # top_p counts the probability that top_k has left: of {0, 1} the first alone has two thirds.
    assert kept(four, top_k=2, top_p=0.6) == {0}
    # At temperature 2 the first two have 0.41 + 0.29, so that 0.75 takes in a third.
    assert kept(four, top_p=0.75, temperature=2.0) == {0, 1, 2}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 2)])
def test_kept_sets_of_min_p(sizes: tuple[int, int, int]) -> None:
    place = placement(4, *sizes)

    def kept(**settings: Any) -> set[int]:
        logits = np.log(np.array([0.08, 0.5, 0.3, 0.12], np.float32))
        return set(draws(place, logits, **settings).tolist())

    assert kept(min_p=0.0) == kept(min_p=0.15) == {0, 1, 2, 3}  # the least is 0.16 of the likeliest
    assert kept(min_p=0.2) == {1, 2, 3}
    assert kept(min_p=0.5) == {1, 2}
    assert kept(min_p=0.7) == kept(min_p=1.0) == {1}
    # It looks at probabilities after temperature: at 2 the shares are their roots, 0.4, 1, 0.77, 0.49.
    assert kept(min_p=0.35, temperature=2.0) == {0, 1, 2, 3}
    assert kept(min_p=0.7, temperature=2.0) == {1, 2}
    # What top_k and top_p leave out stays out, and changes no share.
    assert kept(min_p=0.2, top_k=2) == kept(min_p=0.2, top_p=0.7) == {1, 2}
    assert kept(min_p=0.7, top_k=3, top_p=0.99) == {1}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 4)])
def test_min_p_1_keeps_all_that_tie_for_the_likeliest(sizes: tuple[int, int, int]) -> None:
    logits = np.full((103,), 0.1, np.float32)
    logits[[7, 90]] = 0.1000001
    drawn = draws(placement(103, *sizes), logits, min_p=1.0, temperature=0.7)
    assert set(drawn.tolist()) == {7, 90}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 4), (2, 2, 2)])
def test_c513_temperature_zero_and_almost_zero_take_the_likeliest_whatever_else_is_set(
    sizes: tuple[int, int, int],
) -> None:
    place = placement(103, *sizes)
    logits = random_logits(64, 103)
    want = logits.argmax(1)
    np.testing.assert_array_equal(greedy(place, logits), want)
    for settings in ({}, {"top_p": 0.9, "top_k": 5}, {"top_p": 0.0}):
        for temperature in (0.0, 1e-9):
            np.testing.assert_array_equal(sample(place, logits, temperature, **settings), want)


def test_c513_cold_rows_of_a_mixed_batch_are_greedy_and_warm_ones_are_not() -> None:
    place = placement(103, 1, 1, 4)
    logits = random_logits(64, 103)
    temperature = np.tile([0, 1, 0, 2], 16)
    drawn = sample(place, logits, temperature, seed=np.arange(64))
    cold = temperature == 0
    np.testing.assert_array_equal(drawn[cold], logits.argmax(1)[cold])
    assert (drawn[~cold] != logits.argmax(1)[~cold]).any()
    np.testing.assert_array_equal(
        drawn[~cold], sample(place, logits, temperature + cold, seed=np.arange(64))[~cold]
    )


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 4)])
def test_ties_take_the_lowest_ids(sizes: tuple[int, int, int]) -> None:
    place = placement(103, *sizes)
    logits = np.full((DRAWS, 103), -20.0, np.float32)
    tied = [20, 30, 77, 78, 102]  # on all four shards
    logits[:, tied] = 5.0
    assert set(greedy(place, logits)) == {20}

    def kept(**settings: Any) -> set[int]:
        return set(sample(place, logits, seed=np.arange(DRAWS), **settings).tolist())

    assert kept() == set(tied)
    assert kept(top_k=3) == {20, 30, 77}
    assert kept(top_p=0.5) == {20, 30, 77}  # 3/5 is the least that reaches a half
    assert kept(top_k=1) == kept(top_p=0.0) == {20}
    assert set(greedy(place, np.zeros((DRAWS, 103), np.float32))) == {0}


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    logits = random_logits(64, 103)
    for temperature in (0.5, 100.0):
        drawn = sample(placement(103, 1, 1, 4), logits, temperature, top_k=1, seed=np.arange(64))
        np.testing.assert_array_equal(drawn, logits.argmax(1))


def test_padded_ids_are_never_drawn_even_where_all_ids_are_almost_as_likely() -> None:
    place = placement(103, 1, 1, 4)
    assert place.plan.padding.vocab == 104
    for settings in ({}, {"top_k": 103}, {"top_k": 104}, {"top_p": 0.99999}):
        drawn = draws(place, random_logits(1, 103)[0], 5000, temperature=100.0, **settings)
        # 5000 draws leave none of 103 ids out (about 48 each), if none is left out.
        assert set(drawn) == set(range(103)) or settings.get("top_p")
        assert drawn.max() <= 102


def mixed_settings(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "temperature": rng.choice([0.0, 0.7, 1.0, 3.0], rows),
        "top_k": rng.choice([0, 1, 10, 200], rows),
        "top_p": rng.choice([0.3, 0.9, 1.0], rows),
        "min_p": rng.choice([0.0, 0.05, 0.5], rows),
        "seed": rng.integers(0, 2**32, rows),
        "position": rng.integers(0, 1000, rows),
    }


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4), (2, 2, 2)])
def test_a_seed_gives_the_same_tokens_on_every_mesh(sizes: tuple[int, int, int]) -> None:
    logits, settings = random_logits(64, 103), mixed_settings(64)
    want = sample(placement(103, 1, 1, 1), logits, **settings)
    assert len(set(want)) > 20
    np.testing.assert_array_equal(sample(placement(103, *sizes), logits, **settings), want)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 4)])
def test_a_row_draws_the_same_wherever_it_stands_and_whoever_is_beside_it(
    sizes: tuple[int, int, int],
) -> None:
    place, logits, settings = placement(103, *sizes), random_logits(64, 103), mixed_settings(64)
    want = sample(place, logits, **settings)
    order = np.random.default_rng(1).permutation(64)
    moved = sample(place, logits[order], **{name: value[order] for name, value in settings.items()})
    np.testing.assert_array_equal(moved, want[order])
    strangers = {name: np.where(np.arange(64) == 3, value, value[::-1]) for name, value in settings.items()}
    others = np.where((np.arange(64) == 3)[:, None], logits, 7 - logits)
    assert sample(place, others, **strangers)[3] == want[3]
    for row in (3, 40):
        alone = sample(place, logits[row : row + 1], **{n: v[row : row + 1] for n, v in settings.items()})
        assert alone[0] == want[row]


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_are_those_of_the_softmax_over_seeds_and_over_positions(vary: str) -> None:
    count, temperature = 20_000, 1.7
    logits = np.random.default_rng(2).normal(0, 1.3, 20).astype(np.float32)
    many = np.broadcast_to(logits, (count, 20))
    drawn = sample(placement(20, 1, 1, 1), many, temperature, **{vary: np.arange(count)})
    powers = np.exp(logits.astype(np.float64) / temperature)
    expected = count * powers / powers.sum()
    assert expected.min() > 100
    chi_square = ((np.bincount(drawn, minlength=20) - expected) ** 2 / expected).sum()
    assert chi_square < 64.0  # 19 degrees of freedom: exceeded by chance once in a million
    assert chi_square > 2.0  # and so good a fit no oftener: the draws are not a grid


def test_consecutive_positions_and_neighbouring_seeds_are_independent() -> None:
    place = placement(20, 1, 1, 1)
    even = np.zeros((20_000, 20), np.float32)
    seeds, positions = np.divmod(np.arange(20_000), 200)
    drawn = sample(place, even, seed=seeds, position=positions).reshape(100, 200)
    # Of 19,900 pairs 1/20 agree by chance: 995 ± 31.
    for pairs in (drawn[:, 1:] == drawn[:, :-1], drawn[1:] == drawn[:-1], drawn[1:, :-1] == drawn[:-1, 1:]):
        assert abs(pairs.sum() - pairs.size / 20) < 5 * np.sqrt(pairs.size / 20)


IDS = 16


@lru_cache(maxsize=1)
def shows_kept() -> Callable[..., jax.Array]:
    """A sampler for 16 rows whose noise favours id i in row i so much that i is drawn just if it is kept."""
    place = placement(IDS, 1, 1, 4)

    def function(logits: jax.Array, params: SamplingParams) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.random, "fold_in", lambda key, position: position)
            patch.setattr(
                jax.random,
                "gumbel",
                lambda position, shape, dtype: 1e6 * (jnp.arange(*shape) == position).astype(dtype),
            )
            return sampling.sample(place, logits, ("tp",), params, jnp.arange(IDS))

    return jax.jit(function)


def reference_kept(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], float]:
    """The kept ids by sorting, in float64; and how near top_p comes to a sum, or min_p to a share, where
    rounding decides."""
    order = np.lexsort((np.arange(IDS), -logits))
    if top_k > 0:
        order = order[:top_k]
    powers = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    sums = np.cumsum(powers) / powers.sum()
    margin = 1.0
    if top_p < 1:
        margin = np.abs(sums - top_p).min() if top_p > 0 else 1.0
        order = order[: 1 + int((sums < top_p).sum())]
    powers = powers[: len(order)]
    if 0 < min_p < 1:  # the greatest is exactly 1, so that min_p 1 is exact
        margin = min(margin, np.abs(powers - min_p).min())
    return set(order[powers >= min_p].tolist()), margin


@given(
    st.lists(st.integers(-12, 12), min_size=IDS, max_size=IDS),
    st.sampled_from([0.1, 0.5, 1.0, 4.0]),
    st.integers(-1, IDS + 2),
    st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
)
@example([0] * 13 + [-7, 12, -6], 0.1, 15, 1.0, 0.0)
def test_top_k_then_top_p_then_min_p_keep_what_sorting_keeps(
    halves: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(halves, np.float32) / 2  # many ties
    want, margin = reference_kept(logits, temperature, top_k, top_p, min_p)
    # float32 probabilities of 16 ids are summed to about 1e-6; nearer than that either answer is right.
    assume(margin > 1e-5)
    rows = np.broadcast_to(logits, (IDS, IDS))
    values = (temperature, top_k, top_p, min_p, 0)
    kinds = (np.float32, np.int32, np.float32, np.float32, np.uint32)
    params = SamplingParams(*(np.full((IDS,), v, kind) for v, kind in zip(values, kinds, strict=True)))
    drawn = np.asarray(shows_kept()(put(placement(IDS, 1, 1, 4), rows), params))
    # A power below float32's least normal number, 2⁻¹²⁶, counts as 0: which of those are kept cannot matter.
    possible = {i for i in range(IDS) if (logits[i] - logits.max()) / temperature > -126 * np.log(2)}
    assert set(np.flatnonzero(drawn == np.arange(IDS)).tolist()) & possible == want & possible
    assert set(drawn[sorted(possible)].tolist()) <= want


def test_a_single_possible_id_is_drawn_whatever_the_settings() -> None:
    place = placement(103, 1, 1, 4)
    logits = np.full((64, 103), -np.inf, np.float32)
    logits[np.arange(64), np.arange(64)] = -1e30
    np.testing.assert_array_equal(greedy(place, logits), np.arange(64))
    np.testing.assert_array_equal(sample(place, logits, **mixed_settings(64)), np.arange(64))
