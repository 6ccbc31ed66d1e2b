"""What `PackedDataset` promises: every token a target once an epoch, rows that depend on their index only."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data import PackedDataset, TokenStore
from shardwise.errors import ConfigError, DataError

Row = dict[str, np.ndarray]


def unique_store(sizes: list[int]) -> TokenStore:
    """Documents whose tokens are 1, 2, 3, … without repetition, so that a token tells where it came from."""
    ends = np.cumsum(sizes)
    return TokenStore.from_lists(
        [range(end - size + 1, end + 1) for end, size in zip(ends, sizes, strict=True)]
    )


def first_tokens(store: TokenStore) -> np.ndarray:
    return store.tokens[store.offsets[:-1][np.diff(store.offsets) > 0]]


sizes_with_a_target = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(
    lambda sizes: max(sizes) > 1
)


def cases(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on many stores, lengths and seeds; without a deadline, because machines of CI stall."""
    drawn = given(
        sizes=sizes_with_a_target,
        length=st.integers(1, 20),
        seed=st.integers(0, 2**32),
        shuffle=st.booleans(),
    )
    return settings(deadline=None)(drawn(test))


def epoch_rows(dataset: PackedDataset, epoch: int) -> list[Row]:
    rows = dataset.rows_per_epoch
    return [dataset[index] for index in range(epoch * rows, (epoch + 1) * rows)]


@cases
def test_every_token_but_the_first_of_its_document_is_a_target_once_per_epoch(
    sizes: list[int], length: int, seed: int, shuffle: bool
) -> None:
    store = unique_store(sizes)
    dataset = PackedDataset(store, length, seed=seed, epochs=2, shuffle=shuffle)
    for epoch in range(2):
        rows = epoch_rows(dataset, epoch)
        weighted = np.concatenate([row["targets"][row["weights"] == 1] for row in rows])
        assert sorted(weighted) == sorted(set(store.tokens) - set(first_tokens(store)))
        assert weighted.size == dataset.targets_per_epoch
        for row in rows:  # tokens count up inside a document, so the next token is known
            assert np.array_equal(row["targets"], np.where(row["weights"] == 1, row["tokens"] + 1, 0))


@cases
def test_an_epoch_holds_each_document_whole_and_once(
    sizes: list[int], length: int, seed: int, shuffle: bool
) -> None:
    store = unique_store(sizes)
    dataset = PackedDataset(store, length, seed=seed, epochs=2, shuffle=shuffle)
    for epoch in range(2):
        rows = epoch_rows(dataset, epoch)
        stream = np.concatenate([row["tokens"][row["segment_ids"] > 0] for row in rows])
        found = np.split(stream, np.flatnonzero(np.isin(stream, first_tokens(store)))[1:])
        found_lists = [document.tolist() for document in found]
        documents = np.split(store.tokens, store.offsets[1:-1])
        assert (sorted(found_lists) if shuffle else found_lists) == [d.tolist() for d in documents if d.size]


@cases
def test_segments_and_positions_mark_each_part_of_a_document(
    sizes: list[int], length: int, seed: int, shuffle: bool
) -> None:
    store = unique_store(sizes)
    dataset = PackedDataset(store, length, seed=seed, epochs=1, shuffle=shuffle)
    owner = np.repeat(np.arange(len(sizes)), sizes)  # document of token t is owner[t - 1]
    for index, row in enumerate(epoch_rows(dataset, 0)):
        used = int((row["segment_ids"] > 0).sum())
        assert used == length or index == dataset.rows_per_epoch - 1  # only an epoch's last row is padded
        assert used > 0 and all(not array[used:].any() for array in row.values())
        document = owner[row["tokens"][:used] - 1]
        begins = np.concatenate([[True], document[1:] != document[:-1]])
        assert np.array_equal(row["segment_ids"][:used], np.cumsum(begins))
        place = np.arange(used)
        assert np.array_equal(row["positions"][:used], place - np.maximum.accumulate(place * begins))


@cases
def test_a_row_depends_on_its_index_only(sizes: list[int], length: int, seed: int, shuffle: bool) -> None:
    store = unique_store(sizes)

    def fresh(epochs: int | None) -> PackedDataset:
        return PackedDataset(store, length, seed=seed, epochs=epochs, shuffle=shuffle)

    sequential = [fresh(4)[i] for i in range(len(fresh(4)))]
    dataset = fresh(None)  # the order of visits and the number of epochs do not matter either
    order = np.random.default_rng(seed).permutation(len(sequential))
    for index in order:
        row = dataset[index]
        for name, array in row.items():
            assert array.tobytes() == sequential[index][name].tobytes()


def test_dtypes_and_shapes_are_those_of_the_step() -> None:
    row = PackedDataset(unique_store([3, 5]), 6, seed=0, epochs=1)[1]
    assert {name: (array.dtype.name, array.shape) for name, array in row.items()} == {
        "tokens": ("int32", (6,)),
        "targets": ("int32", (6,)),
        "segment_ids": ("int32", (6,)),
        "positions": ("int32", (6,)),
        "weights": ("float32", (6,)),
    }


def test_three_documents_in_one_row_are_laid_out_as_expected() -> None:  # C310's row
    store = TokenStore.from_lists([[1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17], [21, 22, 23]])
    row = PackedDataset(store, 16, seed=0, epochs=1, shuffle=False)[0]
    assert row["segment_ids"].tolist() == [1] * 5 + [2] * 7 + [3] * 3 + [0]
    assert row["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0]
    assert row["targets"].tolist() == [2, 3, 4, 5, 0, 12, 13, 14, 15, 16, 17, 0, 22, 23, 0, 0]
    assert row["weights"].tolist() == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]


def test_a_document_that_crosses_a_row_goes_on_as_a_new_segment_and_loses_no_target() -> None:
    rows = epoch_rows(PackedDataset(unique_store([3, 6]), 5, seed=0, epochs=1, shuffle=False), 0)
    assert rows[0]["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert rows[0]["targets"].tolist() == [2, 3, 0, 5, 6]  # 6 stands in the next row
    assert rows[1]["tokens"].tolist() == [6, 7, 8, 9, 0]
    assert rows[1]["segment_ids"].tolist() == [1, 1, 1, 1, 0]
    assert rows[1]["positions"].tolist() == [0, 1, 2, 3, 0]


def test_epochs_and_seeds_give_different_orders() -> None:
    store = unique_store([2] * 50)
    stream = {
        (seed, epoch): tuple(np.concatenate([row["tokens"] for row in epoch_rows(dataset, epoch)]))
        for seed in (0, 1)
        for dataset in [PackedDataset(store, 10, seed=seed, epochs=3)]
        for epoch in range(3)
    }
    assert len(set(stream.values())) == 6


def test_the_order_of_documents_never_changes_between_versions() -> None:
    # Golden: a run that was started with an older release must resume on the same rows.
    dataset = PackedDataset(unique_store([1] * 9 + [2]), 11, seed=1234, epochs=None)
    assert dataset[0]["tokens"].tolist() == GOLDEN[0]
    assert dataset[7]["tokens"].tolist() == GOLDEN[7]


GOLDEN = {0: [6, 7, 4, 10, 11, 8, 5, 2, 3, 9, 1], 7: [9, 10, 11, 2, 1, 8, 6, 3, 4, 7, 5]}


def test_memory_mapped_tokens_give_the_same_rows(tmp_path: Path) -> None:
    store = unique_store([5, 1, 9, 4])
    store.tokens.tofile(tmp_path / "tokens.bin")
    mapped = TokenStore.build(np.memmap(tmp_path / "tokens.bin", np.int32, mode="r"), store.offsets)
    assert mapped.fingerprint == store.fingerprint
    expected, found = (PackedDataset(each, 7, seed=3, epochs=2) for each in (store, mapped))
    for index in range(len(expected)):
        for name, array in found[index].items():
            assert type(array) is np.ndarray and array.tobytes() == expected[index][name].tobytes()


@settings(max_examples=20, deadline=None)
@given(index=st.integers(0, sys.maxsize - 1))
def test_an_endless_data_set_has_a_row_at_every_index(index: int) -> None:
    dataset = PackedDataset(unique_store([3, 4]), 4, seed=0, epochs=None)
    assert len(dataset) == sys.maxsize
    assert dataset[index]["weights"].sum() > 0


@pytest.mark.parametrize("index", [-1, 6, 7])
def test_rows_outside_the_data_set_do_not_exist(index: int) -> None:
    dataset = PackedDataset(unique_store([3, 6]), 4, seed=0, epochs=2)
    assert len(dataset) == 6
    with pytest.raises(IndexError):
        dataset[index]


def test_only_the_layout_of_few_epochs_is_kept() -> None:
    dataset = PackedDataset(unique_store([3, 6]), 4, seed=0, epochs=None)
    for epoch in range(50):
        epoch_rows(dataset, epoch)
    assert len(dataset._cache) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"length": 0}, "length is 0"), ({"seed": -1}, "seed is -1"), ({"epochs": 0}, "epochs is 0")],
)
def test_numbers_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedDataset(unique_store([3]), **{"length": 4, "seed": 0, "epochs": 1, **options})


@pytest.mark.parametrize("sizes", [[], [0], [1, 1, 0]])
def test_documents_without_anything_to_predict_are_refused(sizes: list[int]) -> None:
    with pytest.raises(DataError, match="nothing can be predicted"):
        PackedDataset(TokenStore.from_lists([[7] * size for size in sizes]), 4, seed=0, epochs=1)
