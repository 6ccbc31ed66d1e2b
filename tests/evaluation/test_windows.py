"""What the evaluation windows promise: every token is scored exactly once, with the context that fits."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.evaluation import Window, batch_windows, rolling_windows

P = 99


def span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


def test_windows_of_34_tokens_and_length_10() -> None:  # C408
    assert rolling_windows(range(34), P, 10, 1) == [
        Window((P, *span(0, 8)), span(0, 9)),
        Window(span(9, 18), span(10, 19)),
        Window(span(19, 28), span(20, 29)),
        Window(span(23, 32), span(30, 33)),
    ]


def test_windows_of_11_tokens_and_length_4() -> None:  # C408
    assert rolling_windows(range(11), P, 4) == [
        Window((P, 0, 1, 2), (0, 1, 2, 3)),
        Window((3, 4, 5, 6), (4, 5, 6, 7)),
        Window((6, 7, 8, 9), (8, 9, 10)),
    ]


def test_an_empty_text_gives_no_window_and_no_batch() -> None:  # C408
    assert rolling_windows([], P, 10) == []
    assert list(batch_windows([], 4, 10)) == []


def test_a_text_of_exactly_one_window() -> None:  # C408
    assert rolling_windows(range(10), P, 10) == [Window((P, *span(0, 8)), span(0, 9))]


def test_more_context_scores_fewer_tokens_per_window() -> None:
    assert rolling_windows(range(9), P, 4, context=3) == [
        Window((P, 0, 1, 2), (0, 1, 2, 3)),
        Window((1, 2, 3, 4), (4, 5)),
        Window((3, 4, 5, 6), (6, 7)),
        Window((4, 5, 6, 7), (8,)),
    ]


def texts(test: Callable[..., None]) -> Callable[..., None]:
    drawn = given(size=st.integers(0, 60), max_length=st.integers(1, 12), data=st.data())
    return settings(deadline=None)(drawn(test))


@texts
def test_every_token_is_a_target_once_and_follows_its_input(
    size: int, max_length: int, data: st.DataObject
) -> None:
    context = data.draw(st.integers(1, max_length))
    windows = rolling_windows(np.arange(size), P, max_length, context)
    assert [token for window in windows for token in window.targets] == list(range(size))
    for number, window in enumerate(windows):
        scored = len(window.targets)
        assert 1 <= scored <= len(window.inputs) <= max_length
        if number:
            assert len(window.inputs) == max_length
            assert len(window.inputs) - scored + 1 >= context
        # Tokens count up from 0 and P stands for -1, so each target is one more than the input it follows.
        following = [0 if token == P else token + 1 for token in window.inputs]
        assert following[-scored:] == list(window.targets)


@texts
def test_batches_hold_every_window_in_order_and_score_its_targets_only(
    size: int, max_length: int, data: st.DataObject
) -> None:
    batch, length = data.draw(st.integers(1, 5)), max_length + data.draw(st.integers(0, 3))
    windows = rolling_windows(range(size), P, max_length)
    batches = list(batch_windows(windows, batch, length, pad_id=7))
    assert len(batches) == -(-len(windows) // batch)
    for arrays in batches:
        assert {name: (a.dtype.name, a.shape) for name, a in arrays.items()} == {
            "tokens": ("int32", (batch, length)),
            "targets": ("int32", (batch, length)),
            "segment_ids": ("int32", (batch, length)),
            "positions": ("int32", (batch, length)),
            "weights": ("float32", (batch, length)),
        }
    rows = [
        {name: array[row] for name, array in arrays.items()} for arrays in batches for row in range(batch)
    ]
    for window, row in zip(windows, rows, strict=False):
        used = len(window.inputs)
        assert row["tokens"].tolist() == [*window.inputs, *[7] * (length - used)]
        assert row["segment_ids"].tolist() == [1] * used + [0] * (length - used)
        assert row["positions"].tolist() == [*range(used), *[0] * (length - used)]
        assert row["targets"][row["weights"] == 1].tolist() == list(window.targets)
        assert np.flatnonzero(row["weights"])[-1] == used - 1
    for row in rows[len(windows) :]:
        assert (row["tokens"] == 7).all() and not row["weights"].any() and not row["segment_ids"].any()


@pytest.mark.parametrize(("max_length", "context"), [(4, 0), (4, 5), (0, 1)])
def test_a_context_that_does_not_fit_is_refused(max_length: int, context: int) -> None:
    with pytest.raises(ConfigError, match=f"from 1 to max_length \\({max_length}\\)"):
        rolling_windows(range(10), P, max_length, context)
