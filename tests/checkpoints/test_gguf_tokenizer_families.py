"""GGUF tokenizers of Gemma, Qwen and Mistral, on tiny vocabularies: the ids of transformers' own classes.

Not here: what all tokenizers share (test_gguf_tokenizer.py).
"""

from __future__ import annotations

import json

import pytest

from shardwise.checkpoints.reader import open_checkpoint
from shardwise.checkpoints.tokenizer import check_tokenizer_fits, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
IN_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
GEMMA_CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
GEMMA_WHOLE = ["\n", "\n\n", "<table>"]
# As the original spells them; better merges come first.
GEMMA_PIECES = ["▁▁", "▁▁▁", "▁a", "ab", "▁ab", "▁", "a", "b", "c"]
GEMMA_MERGES = [("▁", "▁"), ("▁", "▁▁"), ("▁▁", "▁"), ("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁a", "b")]
GEMMA_TOKENS = [*GEMMA_CONTROL, *GEMMA_WHOLE, *IN_BYTES, *GEMMA_PIECES]
GEMMA_TEXTS = [
    "ab", " ab", "  ab", "   ab", "a    b", " a  ", "ab\n\nab\n", "<table>ab", "é日", "▁▁a", "", "<bos>ab",
    "<start_of_turn>user\nab<end_of_turn>\n",
]  # fmt: skip
# «Ġ» stands for a space in a byte-level vocabulary, «Ã» and «©» for the bytes of «é», «Ì» and «ģ» for those
# of the accent alone.
QWEN_PIECES = [*"abcdeghrst0123456789'ÃÌ©ģĠĊ", "Ġa", "ab", "Ġab", "12", "ĠĠ", "'s", "Ã©"]
QWEN_MERGES = [("Ġ", "a"), ("a", "b"), ("Ġ", "ab"), ("1", "2"), ("Ġ", "Ġ"), ("'", "s"), ("Ã", "©")]
QWEN_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_THINK = ["<think>", "</think>"]
QWEN_TOKENS = [*QWEN_PIECES, *QWEN_CONTROL, *QWEN_THINK]
QWEN_TEXTS = [
    "ab", " ab  ab", "a1234 12", "ab's the", "<|im_start|>a\nab<|im_end|>", "<think>a</think>", "\n\n ab",
    "é", "e\u0301", "",
]  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}{% endfor %}"


def _gemma(**changes):
    """What Gemma's converter writes: pieces of spaces as spaces, user-defined."""
    spelled = [token.replace("▁", " ") if set(token) == {"▁"} else token for token in GEMMA_TOKENS]
    spelled[GEMMA_TOKENS.index("▁")] = "▁"
    kinds = [CONTROL] * len(GEMMA_CONTROL) + [USER_DEFINED] * len(GEMMA_WHOLE) + [BYTE] * len(IN_BYTES)
    kinds += [USER_DEFINED if token.isspace() else NORMAL for token in spelled[len(kinds) :]]
    kinds[GEMMA_TOKENS.index("<unk>")] = UNKNOWN
    settings = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": spelled,
        "ggml.scores": [float(-number) for number in range(len(spelled))],
        "ggml.token_type": kinds,
        "ggml.bos_token_id": 2,
        "ggml.eos_token_id": 1,
        "ggml.unknown_token_id": 3,
        "ggml.padding_token_id": 0,
        "ggml.add_bos_token": True,
        "ggml.add_eos_token": False,
        "ggml.add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.{key}": value for key, value in settings.items()}


def _qwen():
    kinds = [NORMAL] * len(QWEN_PIECES) + [CONTROL] * len(QWEN_CONTROL) + [USER_DEFINED] * len(QWEN_THINK)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": QWEN_TOKENS,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in QWEN_MERGES],
        "tokenizer.ggml.bos_token_id": QWEN_TOKENS.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": QWEN_TOKENS.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": QWEN_TOKENS.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture
def from_file(tmp_path, write_gguf):
    """The tokenizer of a GGUF file of this architecture with these settings."""

    def load(architecture, settings):
        return load_tokenizer(open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, settings, architecture)))

    return load


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_gives_the_ids_of_transformers_own_class(from_file, architecture):
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer

    theirs = GemmaTokenizer(vocab={t: n for n, t in enumerate(GEMMA_TOKENS)}, merges=GEMMA_MERGES)
    theirs.add_special_tokens({"additional_special_tokens": GEMMA_CONTROL[5:]})
    theirs.add_tokens([AddedToken(token, normalized=False) for token in GEMMA_WHOLE])
    ours = from_file(architecture, _gemma())
    for text in GEMMA_TEXTS:
        assert ours.encode(text) == [2, *theirs.encode(text, add_special_tokens=False)], text


def test_gemma_spaces_become_pieces_and_come_back_as_spaces(from_file):
    tokenizer = from_file("gemma2", _gemma())
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("  ab    b"))
    # Not [«▁», «▁ab»], which merging by length would give.
    assert pieces == ["<bos>", "▁▁", "ab", "▁▁", "▁▁", "b"]
    for text in GEMMA_TEXTS[:9]:
        assert tokenizer.decode(tokenizer.encode(text)[1:]) == text


def test_gemma_has_the_files_special_tokens_and_template(from_file):
    tokenizer = from_file("gemma3", _gemma(chat_template=TEMPLATE))
    assert tokenizer.special_tokens_map == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    chat = [{"role": "user", "content": "ab"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<bos><start_of_turn>user\nab"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["<bos>", "<start_of_turn>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nab"
    check_tokenizer_fits(tokenizer, len(GEMMA_TOKENS))


@pytest.mark.parametrize("adds", [True, False])
def test_gemma_adds_its_first_token_as_the_file_says(from_file, adds):
    tokenizer = from_file("gemma2", _gemma(**{"ggml.add_bos_token": adds}))
    assert tokenizer.encode("ab") == [2] * adds + [GEMMA_TOKENS.index("ab")]


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_gives_the_ids_of_transformers_own_class(from_file, architecture):
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    theirs = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(QWEN_TOKENS)},
        merges=QWEN_MERGES,
        unk_token=None,
    )
    theirs.add_special_tokens({"additional_special_tokens": QWEN_CONTROL[1:]})
    theirs.add_tokens([AddedToken(token, normalized=False) for token in QWEN_THINK])
    ours = from_file(architecture, _qwen())
    for text in QWEN_TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_qwen_composes_accents_and_takes_digits_one_by_one(from_file):
    tokenizer = from_file("qwen3", _qwen())
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é") == [QWEN_TOKENS.index("Ã©")]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12")) == ["1", "2"]


def test_qwen_thinking_survives_where_special_tokens_are_left_out(from_file):
    tokenizer = from_file("qwen3", _qwen())
    ids = tokenizer.encode("<|im_start|><think>ab</think><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>ab</think>"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_mistral_takes_whole_words_and_adds_its_first_token(from_file):
    # A byte-level vocabulary of Mistral's, which llama.cpp calls tekken; no merge makes «abc».
    tokens = ["<unk>", "<s>", "</s>", "[INST]", *"abc1Ġ", "ab", "abc"]
    settings = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "llama.attention.sliding_window": 8,
    }
    tokenizer = from_file("llama", settings)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("[INST]abc 11"))
    assert pieces == ["<s>", "[INST]", "abc", "Ġ", "1", "1"]


@pytest.mark.parametrize(("architecture", "model_type"), [("gemma2", "gemma2"), ("gemma3", "gemma3_text")])
def test_gemma_saved_and_loaded_again_is_the_same(tmp_path, from_file, architecture, model_type):
    from transformers import AutoTokenizer

    tokenizer = from_file(architecture, _gemma(chat_template=TEMPLATE))
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=True)
    for text in GEMMA_TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert again.chat_template == TEMPLATE
    assert again.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_saved_and_loaded_again_is_the_same(tmp_path, from_file, model_type):
    from transformers import AutoTokenizer

    tokenizer = from_file(model_type, _qwen())
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=True)
    for text in QWEN_TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
    # For model type qwen2 transformers takes its own class, which also names an unknown token.
    assert tokenizer.special_tokens_map.items() <= again.special_tokens_map.items()
