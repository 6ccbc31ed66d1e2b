"""Masked rows: which tokens are hidden, how often, by what, and that a row never changes."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.data.masking import MaskedDataset, Vocabulary
from shardwise.data.packing import PackedDataset
from shardwise.data.tokens import TokenStore
from shardwise.errors import ConfigError

VOCABULARY = Vocabulary(mask_id=4, control=(0, 1, 2, 4), size=100)
BOS, EOS = 0, 1


def masked(probability: float = 0.15, seed: int = 0, length: int = 64, documents: int = 200) -> MaskedDataset:
    rng = np.random.default_rng(7)
    store = TokenStore.from_lists(
        [[BOS, *rng.integers(5, 100, size=rng.integers(1, 60)), EOS] for _ in range(documents)]
    )
    return MaskedDataset(
        PackedDataset(store, length, seed=1, epochs=2), VOCABULARY, probability=probability, seed=seed
    )


def test_what_is_hidden_is_the_target_and_all_else_is_as_it_was() -> None:
    rows = masked()
    for index in range(len(rows)):
        row, plain = rows[index], rows.rows[index]
        found = row["weights"] > 0
        assert set(np.unique(row["weights"])) <= {0.0, 1.0}
        np.testing.assert_array_equal(row["targets"][found], plain["tokens"][found])
        np.testing.assert_array_equal(row["tokens"][~found], plain["tokens"][~found])
        assert not row["targets"][~found].any()
        for name in ("segment_ids", "positions"):
            np.testing.assert_array_equal(row[name], plain[name])


def test_beginnings_ends_and_padding_are_never_hidden_nor_put_in_anothers_place() -> None:
    rows = masked(probability=1.0)
    for index in range(len(rows)):
        row, plain = rows[index], rows.rows[index]
        ordinary = (plain["segment_ids"] > 0) & ~np.isin(plain["tokens"], VOCABULARY.control)
        np.testing.assert_array_equal(row["weights"] > 0, ordinary)
        assert set(row["tokens"][ordinary]) & set(VOCABULARY.control) <= {VOCABULARY.mask_id}


def test_shares_are_those_of_the_paper() -> None:
    rows = masked(documents=2000)
    every = [(rows[i], rows.rows[i]) for i in range(rows.rows_per_epoch)]
    tokens, plain, found = (
        np.concatenate(arrays)
        for arrays in (
            [row["tokens"] for row, _ in every],
            [before["tokens"] for _, before in every],
            [row["weights"] > 0 for row, _ in every],
        )
    )
    ordinary = int((~np.isin(plain, VOCABULARY.control) & (plain > 0)).sum())
    hidden = found & (tokens == VOCABULARY.mask_id)
    same = found & (tokens == plain)
    n = int(found.sum())
    # Each share within five standard deviations of a binomial; of those replaced, 1 in 96 is itself again.
    for count, total, p in (
        (n, ordinary, 0.15),
        (int(hidden.sum()), n, 0.8),
        (int(same.sum()), n, 0.1 + 0.1 / 96),
    ):
        assert abs(count - total * p) < 5 * (total * p * (1 - p)) ** 0.5, (count, total, p)


def test_a_row_is_the_same_each_time_and_other_under_another_seed_or_epoch() -> None:
    one, again, other = masked(), masked(), masked(seed=1)
    first = one[3]
    for name, array in again[3].items():
        np.testing.assert_array_equal(array, first[name])
    assert (other[3]["weights"] != first["weights"]).any()
    epoch = one.rows_per_epoch
    places = [one[i]["weights"] for i in range(epoch)]
    later = [one[i]["weights"] for i in range(epoch, 2 * epoch)]
    assert any((a != b).any() for a, b in zip(places, later, strict=True))


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.5, float("nan")])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match="probability is .*at most 1"):
        masked(probability=probability)
