"""What `BatchLoader` promises: a step has the same batch whenever, wherever and however often it is made."""

import gc
import sys
import threading
import time

import numpy as np
import pytest

from shardwise.data import BatchLoader, PackedDataset, TokenStore, num_steps_for
from shardwise.errors import ConfigError

Batch = dict[str, np.ndarray]


def dataset_of_c322(epochs: int | None = 2) -> PackedDataset:
    """13 documents of different lengths, shuffled, packed to length 16: 117 tokens, 8 rows an epoch."""
    rng = np.random.default_rng(0)
    store = TokenStore.from_lists([rng.integers(1, 1000, size) for size in range(3, 16)])
    return PackedDataset(store, 16, seed=5, epochs=epochs)


def batches(dataset: PackedDataset, global_batch: int, **options: object) -> list[Batch]:
    options = {"num_steps": num_steps_for(dataset, global_batch), **options}
    return list(BatchLoader(dataset, global_batch=global_batch, **options))


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert {name: (a.shape, a.dtype, a.tobytes()) for name, a in one.items()} == {
            name: (a.shape, a.dtype, a.tobytes()) for name, a in other.items()
        }


@pytest.mark.parametrize("stop", [1, 4, 7, 12])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_a_resumed_run_gets_byte_equal_batches(stop: int, prefetch: int) -> None:  # C322
    whole = batches(dataset_of_c322(), 1)
    assert len(whole) == 16
    stopped = BatchLoader(dataset_of_c322(), global_batch=1, num_steps=16, prefetch=prefetch)
    before = [batch for batch, _ in zip(stopped, range(stop), strict=False)]
    assert_equal(before, whole[:stop])
    assert_equal(batches(dataset_of_c322(), 1, start_step=stop, prefetch=prefetch), whole[stop:])


def test_a_step_holds_the_rows_of_its_number_in_order() -> None:
    dataset = dataset_of_c322()
    for step, batch in enumerate(batches(dataset, 3)[:5]):
        for name, array in batch.items():
            assert array.tobytes() == np.stack([dataset[3 * step + row][name] for row in range(3)]).tobytes()


def test_the_last_batch_is_completed_with_empty_rows_and_nothing_is_dropped() -> None:
    dataset = dataset_of_c322()
    found = batches(dataset, 5)
    assert len(found) == num_steps_for(dataset, 5) == 4  # 16 rows
    assert all(array.shape == (5, 16) for batch in found for array in batch.values())
    assert found[-1]["weights"][0].any()
    assert all(not array[1:].any() for array in found[-1].values())
    assert sum(batch["weights"].sum() for batch in found) == 2 * dataset.targets_per_epoch


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3], [4]], [[4, 0], [3], [1, 2]], [[2, 2, 0, 1], [3, 4]]])
def test_the_rows_of_all_processes_make_up_the_whole_batch(parts: list[list[int]]) -> None:
    whole = batches(dataset_of_c322(), 5, start_step=1)
    for rows in parts:
        part = batches(dataset_of_c322(), 5, start_step=1, rows=rows)
        assert_equal(part, [{name: array[rows] for name, array in batch.items()} for batch in whole])


def test_a_loader_can_be_iterated_again_from_its_start() -> None:
    loader = BatchLoader(dataset_of_c322(), global_batch=3, start_step=2, num_steps=5)
    first = list(loader)
    assert len(first) == len(loader) == 3
    assert_equal(list(loader), first)


def test_an_endless_data_set_serves_any_number_of_steps() -> None:
    dataset = dataset_of_c322(epochs=None)
    found = batches(dataset, 4, start_step=1_000_000, num_steps=1_000_002)
    assert (
        found[1]["tokens"].tobytes()
        == np.stack([dataset[4_000_004 + r]["tokens"] for r in range(4)]).tobytes()
    )


def test_nothing_is_left_to_do_when_the_run_was_complete() -> None:
    assert batches(dataset_of_c322(), 4, start_step=4) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"num_steps": 5}, "num_steps is 5, but the 16 rows of the data set give only 4 steps of 4 rows"),
        ({"start_step": 5}, "start_step is 5"),
        ({"start_step": -1}, "start_step is -1"),
        ({"prefetch": -1}, "prefetch is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchLoader(dataset_of_c322(), **{"global_batch": 4, "num_steps": 4, **options})


class FailingDataset:
    """Four rows; row 2 cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Batch:
        if index == 2:
            raise self.error
        return {"tokens": np.full(3, index, np.int32)}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("error", [OSError("disk gone"), ValueError("bad row")])
def test_an_error_in_a_thread_is_raised_at_its_own_step(prefetch: int, error: Exception) -> None:
    iterator = iter(BatchLoader(FailingDataset(error), global_batch=1, num_steps=4, prefetch=prefetch))
    assert [int(next(iterator)["tokens"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(type(error)) as caught:
        next(iterator)
    assert caught.value is error
    wait_for_no_prefetch_threads()


def test_a_pipeline_that_ends_early_is_never_taken_for_the_end_of_the_data() -> None:
    loader = BatchLoader(FailingDataset(StopIteration()), global_batch=1, num_steps=4)
    with pytest.raises((AssertionError, RuntimeError)):
        list(loader)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain")]


def wait_for_no_prefetch_threads() -> None:
    gc.collect()
    deadline = time.monotonic() + 10
    while prefetch_threads():
        assert time.monotonic() < deadline, f"threads left: {prefetch_threads()}"
        time.sleep(0.01)


def test_no_thread_is_left_after_the_end() -> None:
    iterator = iter(BatchLoader(dataset_of_c322(), global_batch=2, num_steps=8))
    next(iterator)
    assert prefetch_threads()  # else the test shows nothing
    assert len(list(iterator)) == 7
    wait_for_no_prefetch_threads()


def test_no_thread_is_left_after_an_abandoned_iteration() -> None:
    for _ in range(3):
        for _batch in BatchLoader(dataset_of_c322(epochs=None), global_batch=2, num_steps=10**9):
            assert prefetch_threads()
            break
    wait_for_no_prefetch_threads()


def test_importing_the_data_package_loads_neither_jax_nor_grain_nor_transformers() -> None:
    import subprocess

    heavy = "{'jax', 'grain', 'transformers', 'orbax'}"
    code = f"import sys, shardwise.data; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
