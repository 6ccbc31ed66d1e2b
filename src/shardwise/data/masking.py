"""Rows for masked language modelling: some tokens of packed rows are hidden, and the model is to find them.

Devlin et al. 2019 (arXiv:1810.04805, §3.1), with the places drawn anew for every row of every epoch, as
RoBERTa has it (Liu et al. 2019, arXiv:1907.11692, §4.1). Not here: packing (packing.py) and scoring with one
token hidden at a time (evaluation/).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardwise.data.packing import PackedDataset, random_bits
from shardwise.data.tokens import control_tokens
from shardwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SALT = 0x6D61736B  # keeps these bits apart from those that shuffle documents
_MASKED, _REPLACED = 0.8, 0.1
"""Of the tokens to be found, the part that becomes the mask token, and that which becomes some other token;
the rest stays as it is."""


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know of a tokenizer."""

    mask_id: int
    """The token that stands for a hidden one."""
    control: tuple[int, ...]
    """Tokens that are never hidden nor put in another's place: beginnings, ends, padding."""
    size: int
    """Ids are 0 … size - 1."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """Raises DataError if the tokenizer has no mask token."""
        if tokenizer.mask_token_id is None:
            raise DataError(
                "the tokenizer has no mask token, which masked language modelling needs; set mask_token in"
                " tokenizer_config.json"
            )
        marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id)
        control = {*control_tokens(tokenizer), *(mark for mark in marks if mark is not None)}
        return cls(int(tokenizer.mask_token_id), tuple(sorted(control)), len(tokenizer))

    @cached_property
    def ordinary(self) -> np.ndarray:
        """int32: all ids but the control tokens, rising."""
        return np.setdiff1d(np.arange(self.size, dtype=np.int32), np.asarray(self.control, np.int32))


class MaskedDataset:
    """Packed rows with some of their tokens hidden; row i is a pure function of (rows, i, seed)."""

    def __init__(self, rows: PackedDataset, vocabulary: Vocabulary, probability: float, seed: int) -> None:
        """
        Args:
            rows: whose next-token targets are replaced.
            probability: of each ordinary token to be among those that are to be found, in (0, 1].
            seed: not negative.

        Raises:
            ConfigError: the probability or the seed is out of range.
        """
        if not 0 < probability <= 1:
            raise ConfigError(f"probability is {probability}; it must be more than 0 and at most 1")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; it must be at least 0")
        self.rows, self.vocabulary, self.probability, self.seed = rows, vocabulary, probability, seed
        self.rows_per_epoch = rows.rows_per_epoch

    def __len__(self) -> int:
        """Rows over all epochs."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`.

        Returns:
            As PackedDataset's, but: tokens with some hidden; targets the token that was at a place to be
            found, 0 elsewhere; weights 1 at these places.
        """
        row = self.rows[index]
        tokens, length = row["tokens"], self.rows.length
        chosen, fate, other = random_bits(3 * length, _SALT, self.seed, int(index)).reshape(3, length)
        real = (row["segment_ids"] > 0) & ~np.isin(tokens, self.vocabulary.control)
        found = real & (_fractions(chosen) < self.probability)
        fate = _fractions(fate)
        ordinary = self.vocabulary.ordinary
        others = ordinary[(other % np.uint64(ordinary.size)).astype(np.int64)]
        shown = np.where(fate < _MASKED, self.vocabulary.mask_id, tokens)
        shown = np.where((fate >= _MASKED) & (fate < _MASKED + _REPLACED), others, shown)
        return row | {
            "tokens": np.where(found, shown, tokens).astype(np.int32),
            "targets": np.where(found, tokens, 0).astype(np.int32),
            "weights": found.astype(np.float32),
        }


def _fractions(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from the highest 53 bits of uint64."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
