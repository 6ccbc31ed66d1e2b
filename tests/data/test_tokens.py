"""What `tokenize_documents` promises: exact ids, and control tokens only where the policy puts them."""

import logging

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shardwise.data import TokenStore, tokenize_documents
from shardwise.data import tokens as tokens_module
from shardwise.errors import DataError

BOS, EOS, MASK, MERGED = range(256, 260)  # ids behind the 256 bytes


def byte_tokenizer(template: str | None = None, eos: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with one merge: a token per UTF-8 byte, <bos>, <eos>, <mask>, and "<e"."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"<bos>": BOS, "<eos>": EOS, "<mask>": MASK, "<e": MERGED}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<mask>")])
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS), ("<mask>", MASK)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, model_max_length=8
    )


def piece_tokenizer(bos: str = "<s>") -> PreTrainedTokenizerFast:
    """A Unigram tokenizer whose vocabulary lists <s> and </s> as ordinary pieces, as SentencePiece does."""
    pieces = ["<unk>", bos, "</s>", "\u2581", *"abs</>"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token="</s>", unk_token="<unk>"
    )


def documents_of(store: TokenStore) -> list[list[int]]:
    return [store.tokens[a:b].tolist() for a, b in zip(store.offsets, store.offsets[1:], strict=False)]


@pytest.mark.parametrize(
    ("template", "front", "behind"),
    [
        (None, [], [EOS]),
        ("<bos> $A", [BOS], [EOS]),
        ("$A <eos>", [], [EOS]),
        ("<bos> $A <eos>", [BOS], [EOS]),
        ("<bos> <mask> $A <mask> <eos>", [BOS, MASK], [MASK, EOS]),
    ],
)
def test_bos_only_if_the_tokenizer_adds_it_and_eos_once_always(
    template: str | None, front: list[int], behind: list[int]
) -> None:
    tokenizer = byte_tokenizer(template)
    texts = ["a", "", "bé c"]
    plain = tokenizer(texts, add_special_tokens=False)["input_ids"]
    store = tokenize_documents(tokenizer, texts, vocab_size=260)
    assert documents_of(store) == [front + ids + behind for ids in plain]
    assert store.tokens.dtype == np.int32 and store.offsets.dtype == np.int64
    assert (store.num_documents, store.num_tokens) == (3, store.tokens.size)


@pytest.mark.parametrize("template", [None, "<bos> $A <eos>"])
def test_control_strings_in_a_document_stay_text(template: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    text = "x<eos>y <bos><mask>"
    assert EOS in tokenizer(text)["input_ids"]  # without care it would become a control token
    (document,) = documents_of(tokenize_documents(tokenizer, [text], vocab_size=260))
    body = document[1:-1] if template else document[:-1]
    assert document == ([BOS] if template else []) + body + [EOS]
    assert not {BOS, EOS, MASK} & set(body)
    assert MERGED in body  # spelled as any other text would be, not letter by letter
    assert tokenizer.decode(body) == text


def test_the_tokenizer_is_left_as_it_was() -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer("a<eos>")["input_ids"]
    tokenize_documents(tokenizer, ["a<eos>"], vocab_size=260)
    assert tokenizer("a<eos>")["input_ids"] == before == [*before[:1], EOS]


@pytest.mark.parametrize("text", ["a</s>b", "<s></s>", "<s<s>>", "a<unk>b", "</s></s>"])
def test_control_strings_that_are_pieces_of_the_vocabulary_stay_text_too(text: str) -> None:
    tokenizer = piece_tokenizer()
    split = tokenizer("a</s>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.eos_token_id in split  # so split_special_tokens alone does not keep text apart
    (document,) = documents_of(tokenize_documents(tokenizer, [text, "a"], vocab_size=20))[:1]
    assert document[-1] == tokenizer.eos_token_id
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(document[:-1])
    if "unk" not in text:
        assert tokenizer.decode(document[:-1]) == text


def test_overlapping_control_strings_stay_text() -> None:
    tokenizer = piece_tokenizer(bos="ss")
    (document,) = documents_of(tokenize_documents(tokenizer, ["asssb"], vocab_size=20))
    assert tokenizer.convert_ids_to_tokens(document) == [*"asssb", "</s>"]


def test_a_control_token_that_cannot_be_spelled_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_encode_apart", lambda *_: [2])
    monkeypatch.setattr(tokens_module, "_CHUNK_DOCUMENTS", 1)
    with pytest.raises(DataError, match="document 1: its text becomes the control token '</s>'"):
        tokenize_documents(piece_tokenizer(), ["a", "b</s>"], vocab_size=20)


def test_a_letter_declared_as_padding_stays_a_letter() -> None:
    tokenizer = byte_tokenizer()
    plain = tokenizer("a!b", add_special_tokens=False)["input_ids"]
    tokenizer.pad_token = "!"
    assert documents_of(tokenize_documents(tokenizer, ["a!b"], vocab_size=260)) == [[*plain, EOS]]


def test_the_unknown_token_is_no_control_token() -> None:
    tokenizer = piece_tokenizer()
    (document,) = documents_of(tokenize_documents(tokenizer, ["aZb"], vocab_size=20))
    assert document[1] == tokenizer.unk_token_id


def test_a_tokenizer_written_in_python_follows_the_same_policy() -> None:
    tokenizer = ByT5Tokenizer()  # adds EOS (1) itself; a byte is its value + 3
    store = tokenize_documents(tokenizer, ["ab</s>", ""], vocab_size=384)
    assert documents_of(store) == [[byte + 3 for byte in b"ab</s>"] + [1], [1]]


def test_documents_longer_than_the_model_are_kept_whole_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = byte_tokenizer("<bos> $A")
    tokenizer("a" * 100)  # longer than model_max_length 8: shows that the warning would be seen here
    assert "longer than" in caplog.text
    caplog.clear()
    tokenizer = byte_tokenizer("<bos> $A")
    store = tokenize_documents(tokenizer, ["a" * 300_000], vocab_size=260)
    assert store.num_tokens == 300_002 and not caplog.records


def test_padding_and_truncation_stored_in_the_tokenizer_are_not_applied() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<mask>"
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert tokenize_documents(tokenizer, ["abcdef", "a"], vocab_size=260).offsets.tolist() == [0, 7, 9]


def test_the_result_does_not_depend_on_how_documents_are_handed_to_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [f"document {number} " * (number % 7) for number in range(40)]
    whole = tokenize_documents(byte_tokenizer("<bos> $A"), iter(texts), vocab_size=260)
    monkeypatch.setattr(tokens_module, "_CHUNK_DOCUMENTS", 3)
    monkeypatch.setattr(tokens_module, "_CHUNK_CHARACTERS", 50)
    chunked = tokenize_documents(byte_tokenizer("<bos> $A"), texts, vocab_size=260)
    assert documents_of(chunked) == documents_of(whole)
    assert chunked.fingerprint == whole.fingerprint


def test_the_fingerprint_tells_tokens_and_document_borders_apart() -> None:
    variants = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2, 3]], [[1, 2], [3], []]]
    fingerprints = [TokenStore.from_lists(variant).fingerprint for variant in variants]
    assert len(set(fingerprints)) == len(variants)
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)
    # Golden: the same data must be recognised by a later release.
    assert fingerprints[0].startswith("a8b76f25bf368229")


def test_an_id_outside_the_model_is_named_with_the_fix() -> None:
    with pytest.raises(DataError) as caught:
        tokenize_documents(byte_tokenizer(), ["abc"], vocab_size=257)
    assert str(caught.value) == (
        "token id 257 ('<eos>') is outside the model's vocab_size 257; use the tokenizer that belongs to the "
        "model, or a model with vocab_size > 257"
    )


def test_a_tokenizer_without_eos_is_refused_with_a_hint() -> None:
    with pytest.raises(DataError, match=r"no EOS token.* set tokenizer\.eos_token"):
        tokenize_documents(byte_tokenizer(eos=None), ["abc"], vocab_size=260)


def test_no_document_is_refused() -> None:
    with pytest.raises(DataError, match="no document to tokenize"):
        tokenize_documents(byte_tokenizer(), [], vocab_size=260)


def test_a_tokenizer_that_encodes_nothing_is_refused() -> None:
    empty: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>"
    )
    with pytest.raises(DataError, match="cannot encode plain letters"):
        tokenize_documents(empty, ["abc"], vocab_size=10)
