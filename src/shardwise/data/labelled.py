"""Texts with a label each, from JSON lines, as rows for a classifier: one text a row, never packed.

Not here: the text's reading (text.py) and the loss (steps/labels.py).
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardwise.data.packing import shuffled
from shardwise.data.text import (
    JSONL_SUFFIXES,
    BadLineError,
    SkippedLine,
    expand,
    kind,
    missing_field_reason,
    read_json_lines,
    text_of,
)
from shardwise.data.tokens import TokenStore, check_ids, encode_plain, pair_template, template
from shardwise.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Label = str | int


@dataclass(frozen=True)
class LabelledText:
    """One line."""

    text: str
    pair: str | None
    """A second text, where the task is about two."""
    label: Label
    """A name, or a label's number."""


def read_labelled(
    paths: Sequence[str],
    *,
    text_field: str = "text",
    pair_field: str | None = None,
    label_field: str = "label",
    on_bad_line: Literal["error", "skip"] = "error",
) -> tuple[list[LabelledText], list[SkippedLine]]:
    """Read labelled texts from .jsonl or .ndjson files, or folders of them.

    A label is a string, a whole number, or true or false (taken as the strings `true` and `false`).

    Raises:
        DataError: another kind of file; a broken line, unless it is to be skipped; no line is left.
    """
    found: list[LabelledText] = []
    skipped: list[SkippedLine] = []
    parse = partial(_labelled, text_field=text_field, pair_field=pair_field, label_field=label_field)
    for file in [file for path in paths for file in expand(Path(path))]:
        if file.suffix.lower() not in JSONL_SUFFIXES:
            raise DataError(
                f"{file}: labelled texts are read from JSON lines, such as"
                f' {{"{text_field}": "…", "{label_field}": "…"}}; give a .jsonl file'
            )
        found += read_json_lines(file, parse, skipped if on_bad_line == "skip" else None)
    if not found:
        raise DataError(f"no labelled text is left: all {len(skipped)} lines were broken")
    return found, skipped


def _labelled(
    row: dict[str, Any], *, text_field: str, pair_field: str | None, label_field: str
) -> LabelledText:
    text = text_of(row, text_field)
    pair = None if pair_field is None else text_of(row, pair_field, "--pair-field")
    if label_field not in row:
        raise BadLineError(missing_field_reason(label_field, list(row), "--label-field"))
    label = row[label_field]
    if isinstance(label, bool):
        label = str(label).lower()
    if not isinstance(label, (str, int)):
        what = "a fraction" if isinstance(label, float) else f"a JSON {kind(label)}"
        raise BadLineError(f"field {label_field!r} is {what}, but a label is a string or a whole number")
    return LabelledText(text, pair, label)


def names_of(texts: Sequence[LabelledText]) -> tuple[str, ...]:
    """Names for the labels of a new classifier, in order of their ids.

    Strings are sorted; whole numbers are ids themselves, and are called LABEL_0, LABEL_1, … as transformers
    does.

    Raises:
        DataError: fewer than two labels, names and numbers mixed, or numbers with gaps.
    """
    found = {text.label for text in texts}
    names = sorted(label for label in found if isinstance(label, str))
    ids = sorted(label for label in found if isinstance(label, int))
    if len(found) < 2:
        raise DataError(f"all {len(texts)} texts have the label {next(iter(found))!r}; two are the least")
    if names and ids:
        raise DataError(f"labels are mixed: names such as {names[0]!r} and numbers such as {ids[0]}; use one")
    if ids and ids != list(range(len(ids))):
        shown = ", ".join(map(str, ids[:10]))
        raise DataError(
            f"the labels are {shown}{', …' if len(ids) > 10 else ''}; whole numbers must run from 0 without"
            " gaps; give names, as strings, for other labels"
        )
    return tuple(names) or tuple(f"LABEL_{i}" for i in ids)


def ids_of(texts: Sequence[LabelledText], names: Sequence[str]) -> np.ndarray:
    """The labels' ids: int32 [texts].

    A string is a name. A whole number is a name, if all names are numbers, or else an id.

    Raises:
        DataError: a label is none of the model's.
    """
    by_name = {name: i for i, name in enumerate(names)}
    numbers = all(name.lstrip("-").isdigit() for name in names)
    out = np.zeros(len(texts), np.int32)
    for i, text in enumerate(texts):
        known = text.label if isinstance(text.label, str) or not numbers else str(text.label)
        id_ = by_name.get(known) if isinstance(known, str) else known
        if id_ is None or not 0 <= id_ < len(names):
            raise DataError(
                f"text {i + 1} has the label {text.label!r}, which the model's labels do not include:"
                f" {', '.join(f'{n}={name}' for n, name in enumerate(names[:20]))}"
                f"{', …' if len(names) > 20 else ''}"
            )
        out[i] = id_
    return out


def counted(ids: np.ndarray, names: Sequence[str]) -> str:
    """How many texts have each label, as text: `0=no: 12, 1=yes: 30`."""
    counts = Counter(ids.tolist())
    shown = [f"{i}={name}: {counts[i]:,}" for i, name in enumerate(names[:20])]
    return ", ".join(shown) + (", …" if len(names) > 20 else "")


@dataclass(frozen=True)
class Encoded:
    """Labelled texts as tokens."""

    store: TokenStore
    """A document a text, with what the tokenizer puts around it."""
    labels: np.ndarray
    """int32 [texts]."""
    cut: int
    """Texts that were too long and lost their ends."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of tokens and labels."""
        return hashlib.sha256(self.store.fingerprint.encode() + self.labels.tobytes()).hexdigest()


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[LabelledText],
    names: Sequence[str],
    *,
    length: int,
    vocab_size: int,
) -> Encoded:
    """Tokenize labelled texts in the tokenizer's own form for one text or two.

    A text that is too long is cut at its end; of two the longer one first. What looks like a control token in
    a text is spelled out.

    Args:
        names: of the model's labels.
        length: most tokens of a text with what stands around it.
        vocab_size: V of the model.

    Raises:
        DataError: a label is unknown; the length leaves no room for the text; ids outside the vocabulary.
    """
    labels = ids_of(texts, names)
    first = encode_plain(tokenizer, [text.text for text in texts])
    two = texts[0].pair is not None
    if two:
        before, between, behind = pair_template(tokenizer)
        second = encode_plain(tokenizer, [text.pair or "" for text in texts])
    else:
        (before, behind), between, second = template(tokenizer), [], [[] for _ in texts]
    room = length - len(before) - len(between) - len(behind)
    if room < 1 + two:
        raise DataError(f"--length {length} leaves no room for the text beside the tokenizer's own tokens")
    rows, cut = [], 0
    for a, b in zip(first, second, strict=True):
        keep_a, keep_b = _kept(len(a), len(b), room)
        cut += (keep_a, keep_b) != (len(a), len(b))
        rows.append([*before, *a[:keep_a], *between, *b[:keep_b], *behind])
    store = TokenStore.from_lists(rows)
    if store.num_tokens:
        check_ids(tokenizer, store.tokens, vocab_size)
    return Encoded(store, labels, cut)


def _kept(a: int, b: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept: the longer is cut until both are equal, then both."""
    if a + b <= room:
        return a, b
    if a > b:
        b = min(b, room // 2)
        return room - b, b
    a = min(a, room // 2)
    return a, room - a


class LabelledDataset:
    """Rows of one text each, in a new order each epoch; row i depends on (texts, length, seed, i) alone."""

    def __init__(
        self, encoded: Encoded, length: int, *, seed: int, epochs: int | None, shuffle: bool = True
    ) -> None:
        """
        Args:
            length: T, tokens in a row, at least the longest text's.
            epochs: how often each text is seen; None for no end.
            shuffle: False keeps the texts' order.
        """
        self.encoded, self.length, self.seed, self.shuffle = encoded, length, seed, shuffle
        self.rows_per_epoch = encoded.labels.size
        self._rows = sys.maxsize if epochs is None else self.rows_per_epoch * epochs
        self._order: tuple[int, np.ndarray] = (0, self._ordered(0))

    def __len__(self) -> int:
        """Rows over all epochs."""
        return self._rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`: arrays as PackedDataset gives them, of one segment, with the label as `targets[0]`,
        whose weight is 1 and all others' 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a data set with {len(self)} rows")
        epoch, place = divmod(index, self.rows_per_epoch)
        text = self._of_epoch(epoch)[place]
        store = self.encoded.store
        ids = store.tokens[store.offsets[text] : store.offsets[text + 1]]
        used = ids.size
        row = {
            name: np.zeros(self.length, np.int32)
            for name in ("tokens", "targets", "segment_ids", "positions")
        }
        row["weights"] = np.zeros(self.length, np.float32)
        row["tokens"][:used] = ids
        row["segment_ids"][:used] = 1
        row["positions"][:used] = np.arange(used)
        row["targets"][0], row["weights"][0] = self.encoded.labels[text], 1.0
        return row

    def _of_epoch(self, epoch: int) -> np.ndarray:
        number, order = self._order  # one reference, so that threads see a pair that belongs together
        if number != epoch:
            order = self._ordered(epoch)
            self._order = (epoch, order)
        return order

    def _ordered(self, epoch: int) -> np.ndarray:
        return shuffled(self.rows_per_epoch, self.seed, epoch if self.shuffle else None)
