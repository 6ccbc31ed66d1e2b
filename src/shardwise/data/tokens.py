"""Turns documents into one flat array of token ids with document offsets, the form that packing reads.

Not here: reading files (text.py), loading a tokenizer (checkpoints/), rows of a training batch (packing.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import DataError

if TYPE_CHECKING:  # transformers takes a second to import, and only its objects are used here
    from transformers import PreTrainedTokenizerBase

# Bounds on what the tokenizer gets at once: it keeps some 100 bytes (offsets, a string) for every token.
_CHUNK_DOCUMENTS = 1024
_CHUNK_CHARACTERS = 1 << 22


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Tokenized documents, one after the other; either array may be a memory map."""

    tokens: np.ndarray
    """int32 [N]: the ids of all documents."""
    offsets: np.ndarray
    """int64 [documents + 1]: document d is tokens[offsets[d] : offsets[d + 1]]."""
    fingerprint: str
    """SHA-256 (hex) of both arrays: equal fingerprints mean equal data, so a resumed run can check it."""

    @staticmethod
    def build(tokens: np.ndarray, offsets: np.ndarray) -> TokenStore:
        """Checks the two arrays, takes their fingerprint and wraps them without a copy.

        Args:
            tokens: int32 [N].
            offsets: int64 [documents + 1], from 0 to N, never falling.
        """
        for array, dtype in ((tokens, np.int32), (offsets, np.int64)):
            assert (array.ndim, array.dtype) == (1, np.dtype(dtype)), (array.shape, array.dtype)
        assert (offsets[0], offsets[-1]) == (0, tokens.size), (offsets[0], offsets[-1], tokens.size)
        assert np.all(np.diff(offsets) >= 0)
        digest = hashlib.sha256(np.int64(tokens.size).tobytes())
        digest.update(np.ascontiguousarray(tokens).data)
        digest.update(np.ascontiguousarray(offsets).data)
        return TokenStore(tokens, offsets, digest.hexdigest())

    @staticmethod
    def from_lists(documents: Iterable[Sequence[int]]) -> TokenStore:
        """Builds a store from one list of token ids per document."""
        arrays = [np.asarray(document, dtype=np.int32) for document in documents]
        tokens = np.concatenate([np.empty(0, np.int32), *arrays])
        return TokenStore.build(tokens, _offsets([array.size for array in arrays]))

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return self.offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """N: how many tokens all documents have together."""
        return self.tokens.size


def tokenize_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], *, vocab_size: int
) -> TokenStore:
    """Tokenizes documents as training data: [BOS] text EOS each.

    What the tokenizer itself puts in front of a text (BOS for Llama, nothing for GPT-2 or SmolLM2) is put in
    front of each document; the tokenizer's EOS always ends it, once. Text is data: a string such as
    `<|endoftext|>` inside a document is spelled out in ordinary tokens and never becomes the control id. No
    document is cut.

    Args:
        tokenizer: a Hugging Face tokenizer with an EOS token.
        documents: at least one string; the whole of one is tokenized at once.
        vocab_size: V of the model; every id must be below it.

    Returns:
        The token store, in the order of the documents.

    Raises:
        DataError: there is no EOS token or no document, an id is not one of the model's, or a document's text
            cannot be kept apart from a control token.
    """
    assert not isinstance(documents, str), "documents is a list of strings, not one string"
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no EOS token, so documents would run into each other; set "
            "tokenizer.eos_token, or eos_token in tokenizer_config.json, to the token that ends a text"
        )
    prefix, suffix = _template(tokenizer, tokenizer.eos_token_id)
    control = control_tokens(tokenizer)
    sizes: list[int] = []
    chunks: list[np.ndarray] = []
    for chunk in _chunks(documents):
        bodies = _encode_bodies(tokenizer, chunk, control, first=len(sizes))
        rows = [[*prefix, *body, *suffix] for body in bodies]
        sizes += map(len, rows)
        ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        check_ids(tokenizer, ids, vocab_size)
        chunks.append(ids.astype(np.int32))
    if not sizes:
        raise DataError("there is no document to tokenize; give at least one")
    return TokenStore.build(np.concatenate(chunks), _offsets(sizes))


def _offsets(sizes: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, dtype=np.int64))])


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document)
        if len(chunk) == _CHUNK_DOCUMENTS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool = False
) -> list[list[int]]:
    return tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        split_special_tokens=True,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no "sequence length is longer than…": rows are cut later
    )["input_ids"]


def _template(tokenizer: PreTrainedTokenizerBase, eos: int) -> tuple[list[int], list[int]]:
    """The ids in front of and behind every document; the last one behind is EOS."""
    before, behind = template(tokenizer)
    return before, [token for token in behind if token != eos] + [eos]


def template(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts in front of and behind a text of its own accord.

    Raises:
        DataError: it cannot encode plain letters.
    """
    for probe in _PROBES:  # a vocabulary may lack one of them and give no token at all
        (bare,) = _encode(tokenizer, [probe])
        (full,) = _encode(tokenizer, [probe], add_special_tokens=True)
        at = _find(bare, full)
        if at is not None:
            return full[:at], full[at + len(bare) :]
    raise DataError(
        f"the tokenizer ({type(tokenizer).__name__}) cannot encode plain letters; is it complete?"
    )


def pair_template(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    """The ids that a tokenizer puts in front of, between and behind two texts.

    Raises:
        DataError: it does not tell two texts apart.
    """
    before, _ = template(tokenizer)
    for probe in _PROBES:
        (bare,) = _encode(tokenizer, [probe])
        full = tokenizer([probe], [probe], add_special_tokens=True, return_attention_mask=False)
        ids = list(full["input_ids"][0])
        first = _find(bare, ids[len(before) :])
        if not bare or first != 0 or ids[: len(before)] != before:
            continue
        rest = ids[len(before) + len(bare) :]
        second = _find(bare, rest)
        if second is not None:
            return before, rest[:second], rest[second + len(bare) :]
    raise DataError(
        f"the tokenizer ({type(tokenizer).__name__}) has no form for two texts; join them into one field"
    )


_PROBES = ("a", "1", "the")


def _find(part: list[int], whole: list[int]) -> int | None:
    """Where `part`, if it has anything, first stands in `whole`."""
    starts = range(len(whole) - len(part) + 1) if part else ()
    return next((start for start in starts if whole[start : start + len(part)] == part), None)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids, with their text, that plain text must never turn into."""
    control = {id_: added.content for id_, added in tokenizer.added_tokens_decoder.items() if added.special}
    control |= zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    allowed = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    # Plain text does turn into the unknown token. And some people declare a letter such as "!" as padding: in
    # a text it stays a letter.
    return {id_: text for id_, text in control.items() if id_ not in allowed and len(text) > 1}


def _encode_bodies(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], control: dict[int, str], first: int
) -> list[list[int]]:
    """Tokens of each text, nothing around them, no control id; `first` is the number of texts[0]."""
    bodies = _encode(tokenizer, texts)
    control_ids = frozenset(control)
    for index, body in enumerate(bodies):
        if control_ids.isdisjoint(body):
            continue
        # split_special_tokens only stops the search for added tokens. A vocabulary (Unigram, for one) may
        # also list "</s>" as an ordinary piece, and then the model itself finds it.
        bodies[index] = body = _encode_apart(tokenizer, texts[index], control)
        leaked = control_ids.intersection(body)
        if leaked:
            raise DataError(
                f"document {first + index}: its text becomes the control token {control[min(leaked)]!r}, and "
                "this tokenizer cannot spell it out; remove that string from the document"
            )
    return bodies


def _encode_apart(tokenizer: PreTrainedTokenizerBase, text: str, control: dict[int, str]) -> list[int]:
    """Encodes a text in pieces, cut inside every control string, so that no piece holds a whole one.

    Tokenizers that mark the start of a text put that mark in front of each piece too: a decoded document may
    show a space inside such a string.
    """
    strings = "|".join(map(re.escape, sorted(control.values())))
    cuts = [match.start() + 1 for match in re.finditer(f"(?={strings})", text)]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return list(chain.from_iterable(_encode(tokenizer, pieces)))


def check_ids(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, vocab_size: int) -> None:
    """Raise DataError if an id is outside the model's vocabulary; `ids` has at least one."""
    highest = int(ids.max())
    if highest >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(highest)
        raise DataError(
            f"token id {highest} ({token!r}) is outside the model's vocab_size {vocab_size}; use the "
            f"tokenizer that belongs to the model, or a model with vocab_size > {highest}"
        )


def encode_plain(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text with nothing around them; what looks like a control token is spelled out.

    Raises:
        DataError: a text cannot be kept apart from a control token.
    """
    return _encode_bodies(tokenizer, list(texts), control_tokens(tokenizer), first=0)
