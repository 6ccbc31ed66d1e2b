"""Cuts the documents of a token store into rows of equal length, reachable in any order.

Not here: batches and threads (loader.py). Row i is a pure function of (store, length, seed, i), so a run can
be resumed at any step, and on any number of processes, with the same rows.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from shardwise.data.tokens import TokenStore
from shardwise.errors import ConfigError, DataError

# Prefetching threads work on both sides of an epoch's end for a while.
_CACHED_EPOCHS = 2


@dataclass(frozen=True)
class _Epoch:
    """Where the documents of one epoch stand in its stream of tokens; those without tokens are left out."""

    starts: np.ndarray
    """int64 [documents + 1]: stream position of each document's first token, then the stream's length."""
    shifts: np.ndarray
    """int64 [documents]: store position = stream position + shift."""


class PackedDataset:
    """Rows of `length` tokens, cut from the documents laid end to end, in a new order each epoch.

    A document that crosses a row's end goes on in the next row as a new segment, whose positions restart at 0
    and which does not see the part before (the price of rows that are full and can be computed alone). The
    target of the last token in such a row is still the document's next token, so every token but the first of
    its document is a target exactly once per epoch. An epoch has ceil(N / length) rows; the last is padded.
    """

    def __init__(
        self, store: TokenStore, length: int, *, seed: int, epochs: int | None, shuffle: bool = True
    ) -> None:
        """Computes no row yet.

        Args:
            store: the documents; may be memory mapped. A document of one token gives no target.
            length: T, tokens in a row.
            seed: not negative; with the number of the epoch it fixes the order of the documents.
            epochs: how often each document is seen; None for no end.
            shuffle: False keeps the order of the store in every epoch.

        Raises:
            ConfigError: the length, the seed or the number of epochs is out of range.
            DataError: no document has a second token.
        """
        for name, value, least in (("length", length, 1), ("seed", seed, 0), ("epochs", epochs, 1)):
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        self.store, self.length, self.seed, self.epochs, self.shuffle = store, length, seed, epochs, shuffle
        sizes = np.diff(store.offsets)
        self._documents = np.flatnonzero(sizes)
        self._sizes = sizes[self._documents]
        self.rows_per_epoch: int = -(-store.num_tokens // length)
        """ceil(N / length), the same in every epoch."""
        self.targets_per_epoch: int = store.num_tokens - self._documents.size
        """How many weights of an epoch are 1."""
        if self.targets_per_epoch == 0:
            raise DataError(
                f"none of the {store.num_documents} documents has a second token, so nothing can be predicted"
            )
        self._cache: OrderedDict[int, _Epoch] = OrderedDict()
        self._cache_lock = threading.Lock()

    def __len__(self) -> int:
        """Rows over all epochs; sys.maxsize, standing for no end, if epochs is None."""
        return sys.maxsize if self.epochs is None else self.rows_per_epoch * self.epochs

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Computes row `index`, and no other.

        Returns:
            Arrays of shape [T]:
            tokens int32, 0 in padding;
            targets int32, the next token of the same document, 0 where there is none;
            segment_ids int32, 1, 2, … per document in the row, 0 in padding;
            positions int32, from 0 in each segment, 0 in padding;
            weights float32, 1 where `targets` is a real next token, else 0.

        Raises:
            IndexError: `index` is not in 0 … len - 1.
        """
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a data set with {len(self)} rows")
        epoch_number, row = divmod(index, self.rows_per_epoch)
        epoch = self._epoch(epoch_number)
        begin = row * self.length
        stream = np.arange(begin, min(begin + self.length, self.store.num_tokens))  # int64 [used]

        first, last = np.searchsorted(epoch.starts, stream[[0, -1]], side="right") - 1
        starts = epoch.starts[first : last + 1]
        ends = epoch.starts[first + 1 : last + 2]
        in_row = np.minimum(ends, stream[-1] + 1) - np.maximum(starts, begin)  # tokens of each segment
        segment = np.repeat(np.arange(in_row.size), in_row)  # [used]
        source = stream + epoch.shifts[first + segment]
        has_target = stream + 1 < ends[segment]

        result = {
            "tokens": self._blank(np.int32),
            "targets": self._blank(np.int32),
            "segment_ids": self._blank(np.int32),
            "positions": self._blank(np.int32),
            "weights": self._blank(np.float32),
        }
        used = stream.size
        result["tokens"][:used] = self.store.tokens[source]
        # Where there is no next token the token itself is read: source + 1 may lie outside the store.
        result["targets"][:used] = np.where(has_target, self.store.tokens[source + has_target], 0)
        result["segment_ids"][:used] = segment + 1
        result["positions"][:used] = stream - np.maximum(starts, begin)[segment]
        result["weights"][:used] = has_target
        return result

    def _blank(self, dtype: type[np.generic]) -> np.ndarray:
        return np.zeros(self.length, dtype)

    def _epoch(self, number: int) -> _Epoch:
        if not self.shuffle:
            number = 0
        with self._cache_lock:
            if number not in self._cache:
                self._cache[number] = self._lay_out(number)
                if len(self._cache) > _CACHED_EPOCHS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(number)
            return self._cache[number]

    def _lay_out(self, number: int) -> _Epoch:
        order = shuffled(self._documents.size, self.seed, number if self.shuffle else None)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._sizes[order])])
        return _Epoch(starts, self.store.offsets[self._documents[order]] - starts[:-1])


def shuffled(size: int, seed: int, epoch: int | None) -> np.ndarray:
    """The numbers 0 … size - 1 in an epoch's order: int64 [size]; in their own where `epoch` is None."""
    if epoch is None:
        return np.arange(size)
    return np.argsort(random_bits(size, seed, epoch), kind="stable")


def random_bits(size: int, *seed: int) -> np.ndarray:
    """uint64 [size], a pure function of the numbers in `seed`.

    Raw bits, because NumPy promises that a bit generator's stream stays the same between versions, but not
    what Generator's methods make of it (NEP 19); a run may resume elsewhere.
    """
    bits = np.random.PCG64(np.random.SeedSequence(list(seed))).random_raw(size)
    return np.asarray(bits, np.uint64)
