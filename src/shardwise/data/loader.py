"""Serves batches of rows by step number, prepared ahead of time by Grain's threads.

Not here: what a row holds (packing.py), and moving arrays to devices (training/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from shardwise.errors import ConfigError

_PREFETCH_THREADS = 2  # one may wait for a page of a memory map while the other computes


class RowDataset(Protocol):
    """A random-access data set of rows: arrays with the same names, shapes and dtypes for every index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


def num_steps_for(dataset: RowDataset, global_batch: int) -> int:
    """Steps that it takes to see every row once: ceil(rows / global_batch).

    For a data set without an end this is too large to be reached; choose the number of steps instead.
    """
    _check_batch(global_batch)
    return -(-len(dataset) // global_batch)


class BatchLoader:
    """The batches of steps start_step, start_step + 1, …, num_steps - 1.

    Step s holds rows s * global_batch … (s + 1) * global_batch - 1 of the data set, whatever start_step is,
    so a resumed run goes on exactly where it stopped. The last batch is filled up with empty rows (all arrays
    zero: no segment, no weight), never dropped. Each iteration starts anew; its threads end with it, also
    when it is abandoned.
    """

    def __init__(
        self,
        dataset: RowDataset,
        *,
        global_batch: int,
        rows: Sequence[int] | None = None,
        start_step: int = 0,
        num_steps: int,
        prefetch: int = 2,
    ) -> None:
        """Starts no thread yet.

        Args:
            dataset: at least one row.
            global_batch: rows in the batch of one step, over all processes.
            rows: which of the rows 0 … global_batch - 1 this process needs, in that order; None for all.
            start_step: steps done already.
            num_steps: the step to stop before, counted from the start of the whole run, not from start_step.
            prefetch: how many batches are prepared ahead of time; 0 computes each when it is asked for.

        Raises:
            ConfigError: a number is out of range, or there are more steps than the data set has rows for.
        """
        _check_batch(global_batch)
        available = num_steps_for(dataset, global_batch)
        if num_steps > available:
            raise ConfigError(
                f"num_steps is {num_steps}, but the {len(dataset)} rows of the data set give only "
                f"{available} steps of {global_batch} rows; lower num_steps or raise epochs"
            )
        if not 0 <= start_step <= num_steps:
            raise ConfigError(f"start_step is {start_step}; it must be from 0 to num_steps ({num_steps})")
        if prefetch < 0:
            raise ConfigError(f"prefetch is {prefetch}; it must be 0 (no threads) or more batches")
        self.rows = tuple(range(global_batch) if rows is None else rows)
        assert self.rows, "a process that needs no row has nothing to load"
        assert set(self.rows) <= set(range(global_batch)), (self.rows, global_batch)
        self.start_step, self.num_steps, self.prefetch = start_step, num_steps, prefetch
        self._source = _RowSource(dataset, global_batch, self.rows, start_step, num_steps)

    def __len__(self) -> int:
        """Batches that an iteration gives."""
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields a dict of arrays [len(rows), …] per step; raises a thread's error here, at its step."""
        if not len(self):
            return
        import grain  # imports JAX and Orbax, which takes seconds

        options = grain.ReadOptions(
            num_threads=min(_PREFETCH_THREADS, self.prefetch), prefetch_buffer_size=self.prefetch
        )
        batches = grain.MapDataset.source(self._source).batch(len(self.rows))
        iterator = iter(batches.to_iter_dataset(options))
        try:
            for step in range(self.start_step, self.num_steps):
                batch = next(iterator, None)
                assert batch is not None, f"the data pipeline ended before step {step}"
                yield batch
        finally:
            iterator.close()


class _RowSource:
    """The rows of the remaining steps in one sequence, as Grain reads them: len(rows) for each step."""

    def __init__(
        self, dataset: RowDataset, global_batch: int, rows: tuple[int, ...], start_step: int, num_steps: int
    ) -> None:
        self._dataset, self._global_batch = dataset, global_batch
        self._rows, self._start_step = rows, start_step
        self._length = len(rows) * (num_steps - start_step)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        steps, column = divmod(index, len(self._rows))
        row = (self._start_step + steps) * self._global_batch + self._rows[column]
        if row < len(self._dataset):
            return self._dataset[row]
        return {name: np.zeros_like(array) for name, array in self._dataset[0].items()}


def _check_batch(global_batch: int) -> None:
    if global_batch < 1:
        raise ConfigError(f"global_batch is {global_batch}; it must be at least 1")
