"""Padding of heads, mlp and vocab: exact, reversible, cheapest, and each real head beside its own kv head."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.models.config import ModelConfig
from shardwise.partition.padding import HeadSlots, Padding, round_up

QUERY = ("heads", "q_per_kv", "head_dim", "embed")
OUTPUT = ("layers", "embed", "heads", "q_per_kv", "head_dim")
KEY = ("kv_heads", "head_dim", "embed")

KV_HEADS = st.integers(1, 9)
Q_PER_KV = st.integers(1, 9)
TP = st.integers(1, 12)


def config(kv_heads: int, q_per_kv: int, head_dim: int = 2, mlp: int = 10, vocab: int = 11) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab, embed_dim=3, num_layers=2, num_heads=kv_heads * q_per_kv, num_kv_heads=kv_heads,
        head_dim=head_dim, mlp_dim=mlp, max_position=8,
    )  # fmt: skip


def numbered(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Different numbers everywhere and no zero, so that a misplaced or missing one shows."""
    return (np.arange(np.prod(shape)) + 1).reshape(shape).astype(dtype)


@given(KV_HEADS, Q_PER_KV, TP)
def test_tp_divides_the_slots_and_as_many_places_are_valid_as_there_are_heads(
    k: int, g: int, tp: int
) -> None:
    slots = HeadSlots.choose(k, g, tp)
    assert slots.slots % tp == 0
    assert slots.valid.shape == (slots.slots, slots.group)
    assert slots.valid.sum() == k * g
    assert slots.padded_heads == slots.valid.size
    assert slots.stored_kv_heads in (k, slots.slots)


@given(KV_HEADS, Q_PER_KV, TP)
def test_every_real_query_head_sits_with_its_own_kv_head(k: int, g: int, tp: int) -> None:
    padding = Padding.choose(config(k, g), tp)
    slots = padding.heads
    # Each query head carries the number of its kv head; each stored kv head, its own.
    owner = np.broadcast_to(np.arange(1, k + 1)[:, None], (k, g))
    where = padding.pad(owner, ("heads", "q_per_kv"))
    stored = padding.pad(np.arange(1, k + 1), ("kv_heads",))
    assert slots.kv_of_slot.shape == (slots.slots,)
    assert slots.kv_of_slot.min() >= 0 and slots.kv_of_slot.max() < slots.stored_kv_heads
    attended = np.broadcast_to(stored[slots.kv_of_slot][:, None], where.shape)
    np.testing.assert_array_equal(where[slots.valid], attended[slots.valid])
    assert (where[~slots.valid] == 0).all()


@given(KV_HEADS, Q_PER_KV, TP, st.integers(1, 4), st.sampled_from([QUERY, OUTPUT, KEY]))
def test_trimming_undoes_padding_and_nothing_but_zeros_is_added(
    k: int, g: int, tp: int, half: int, axes: tuple[str, ...]
) -> None:
    padding = Padding.choose(config(k, g, 2 * half), tp)
    true = numbered(padding.true_shape(axes))
    padded = padding.pad(true, axes)
    assert padded.shape == padding.use_shape(axes)
    np.testing.assert_array_equal(padding.trim(padded, axes), true)
    np.testing.assert_array_equal(np.sort(padded[padded != 0]), np.sort(true.ravel()))


@given(KV_HEADS, Q_PER_KV, TP, st.integers(0, 2), st.integers(0, 2))
def test_trimming_undoes_padding_to_a_larger_stored_shape(
    k: int, g: int, tp: int, more: int, wider: int
) -> None:
    padding = Padding.choose(config(k, g), tp)
    true = numbered(padding.true_shape(QUERY))
    slots, group, *rest = padding.use_shape(QUERY)
    shape = (slots + more, group + wider, *rest)
    padded = padding.pad(true, QUERY, shape)
    assert padded.shape == shape
    np.testing.assert_array_equal(padding.trim(padded, QUERY), true)


@given(st.integers(1, 40), st.integers(1, 40), TP)
def test_mlp_and_vocab_are_padded_at_the_end_to_the_least_multiple(mlp: int, vocab: int, tp: int) -> None:
    padding = Padding.choose(config(1, 1, mlp=mlp, vocab=vocab), tp)
    true = numbered((mlp, vocab))
    padded = padding.pad(true, ("mlp", "vocab"))
    assert all(
        size % tp == 0 and size - tp < part for size, part in zip(padded.shape, (mlp, vocab), strict=True)
    )
    np.testing.assert_array_equal(padded[:mlp, :vocab], true)
    assert padded.sum() == true.sum()


@pytest.mark.parametrize(("k", "g", "tp"), [(3, 3, 4), (2, 4, 8), (1, 5, 4), (5, 1, 3), (4, 2, 4)])
def test_jax_arrays_are_padded_and_trimmed_as_numpy_arrays_are(k: int, g: int, tp: int) -> None:
    padding = Padding.choose(config(k, g), tp)
    true = numbered(padding.true_shape(OUTPUT))
    want, got = padding.pad(true, OUTPUT), padding.pad(jnp.asarray(true), OUTPUT)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(padding.trim(got, OUTPUT), true)


def test_bfloat16_stays_bfloat16() -> None:
    padding = Padding.choose(config(3, 3), 4)
    true = numbered(padding.true_shape(KEY), ml_dtypes.bfloat16)
    padded = padding.pad(true, KEY)
    assert padded.dtype == padding.trim(padded, KEY).dtype == true.dtype


@given(KV_HEADS, Q_PER_KV, TP, st.data())
def test_runs_say_where_the_heads_of_any_range_of_slots_come_from(k: int, g: int, tp: int, data: Any) -> None:
    padding = Padding.choose(config(k, g), tp)
    slots = padding.heads
    start = data.draw(st.integers(0, slots.slots))
    stop = data.draw(st.integers(start, slots.slots))
    true = numbered((k, g))
    want = padding.pad(true, ("heads", "q_per_kv"))[start:stop]
    got = np.zeros_like(want)
    for slot, kv_head, first, count in slots.runs(start, stop):
        assert count > 0
        got[slot - start, :count] = true[kv_head, first : first + count]
    np.testing.assert_array_equal(got, want)


@given(KV_HEADS, Q_PER_KV, TP)
def test_no_other_layout_has_less_work_on_a_device(k: int, g: int, tp: int) -> None:
    def work(slots: int, group: int) -> int:
        """Heads computed on one device: a slot has `group` query heads and one kv head, of two matrices."""
        return slots // tp * (group + 1)

    chosen = HeadSlots.choose(k, g, tp)
    # Any group size, with as many slots as the kv heads then need, up to the next multiple of tp.
    cheapest = min(work(round_up(k * -(-g // group), tp), group) for group in range(1, g + 1))
    assert work(chosen.slots, chosen.group) == cheapest


@given(KV_HEADS, Q_PER_KV, TP)
def test_where_tp_divides_the_kv_heads_nothing_is_padded_or_repeated(k: int, g: int, tp: int) -> None:
    slots = HeadSlots.choose(k * tp, g, tp)
    assert slots == HeadSlots(k * tp, g)
    assert slots.valid.all()
    np.testing.assert_array_equal(slots.kv_of_slot, np.arange(k * tp))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "want"),
    [
        # (slots, query heads a slot, stored kv heads), worked out by hand
        (
            9,
            3,
            2,
            (4, 3, 4),
        ),  # a fourth kv group of padding: 4·(3+1) = 16; three halves repeated: 6·(2+1) = 18
        (9, 3, 4, (4, 3, 4)),
        (8, 2, 4, (4, 2, 2)),  # each kv head on two devices, no padding
        (8, 1, 8, (8, 1, 1)),
        (5, 1, 4, (4, 2, 1)),  # 5 query heads in 4 slots of 2
        (6, 6, 4, (8, 1, 8)),
        (6, 3, 2, (4, 2, 4)),
        (128, 8, 16, (16, 8, 8)),
    ],
)
def test_known_layouts(heads: int, kv_heads: int, tp: int, want: tuple[int, int, int]) -> None:
    slots = HeadSlots.choose(kv_heads, heads // kv_heads, tp)
    assert (slots.slots, slots.group, slots.stored_kv_heads) == want


def test_query_heads_must_be_two_neighbouring_dims() -> None:
    padding = Padding.choose(config(3, 3), 2)
    with pytest.raises(AssertionError, match="neighbouring"):
        padding.pad(np.zeros((3, 2, 3)), ("heads", "head_dim", "q_per_kv"))


def test_a_tensor_larger_than_its_padded_shape_is_refused() -> None:
    padding = Padding.choose(config(3, 3), 2)
    with pytest.raises(AssertionError, match="larger than"):
        padding.pad(np.zeros((20,)), ("mlp",))
