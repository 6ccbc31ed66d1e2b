"""Export to a Hugging Face folder: bitwise, sharded, and all or nothing."""

from __future__ import annotations

import errno
import json
import os
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open

from shardwise.checkpoints import hf_writer
from shardwise.checkpoints.hf_writer import write_hf_folder
from shardwise.checkpoints.reader import open_checkpoint
from shardwise.checkpoints.tokenizer import load_tokenizer
from shardwise.errors import CheckpointError

CONFIG = {"model_type": "llama", "vocab_size": 40, "torch_dtype": "bfloat16", "note": "é"}


def _tensors():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (8, 4), dtype=np.uint16)  # NaN payloads and subnormals too
    return {
        "a": bits.view(ml_dtypes.bfloat16),
        "b": rng.standard_normal((16, 4)).astype(np.float32),
        "c": rng.standard_normal((4,)).astype(np.float16),
        "d": rng.standard_normal((4, 8)).astype(np.float32).T,  # not contiguous
    }


def _bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("max_shard_bytes", [1, 150, 1 << 30])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, max_shard_bytes):
    out, tensors = tmp_path / "out", _tensors()
    write_hf_folder(
        out,
        hf_config=CONFIG,
        tensors=tensors.items(),
        generation_config={"eos_token_id": [2, 7]},
        max_shard_bytes=max_shard_bytes,
    )
    checkpoint = open_checkpoint(out)
    assert checkpoint.hf_config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    assert set(checkpoint.reader.tensors()) == set(tensors)
    for name, value in tensors.items():
        rows = checkpoint.reader.rows(name, 0, value.shape[0])
        assert (rows.dtype, rows.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(_bits(rows), _bits(value))


def test_one_shard_needs_no_index_and_is_marked_for_transformers(tmp_path):
    write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=_tensors().items(), metadata={"source": "x"})
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt", "source": "x"}


def test_shards_are_numbered_and_indexed_with_the_true_size(tmp_path):
    tensors = _tensors()
    write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=tensors.items(), max_shard_bytes=150)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    # a has 64 bytes, b 256, c 8, d 128: b is too big for any shard and gets one of its own.
    assert index["weight_map"] == {"a": shards[0], "b": shards[1], "c": shards[2], "d": shards[2]}
    for shard in shards:
        with safe_open(tmp_path / "out" / shard, framework="np") as file:
            assert file.metadata() == {"format": "pt"}


def test_no_more_than_one_shard_is_held(tmp_path):
    alive: list[weakref.ref] = []
    most = 0

    def produce():
        nonlocal most
        for number in range(12):
            array = np.zeros(256, np.float32)
            alive.append(weakref.ref(array))
            yield f"t{number}", array
            del array
            most = max(most, sum(ref() is not None for ref in alive))

    write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=produce(), max_shard_bytes=3 * 1024)
    assert most == 3


def test_an_existing_folder_is_refused_before_anything_is_consumed(tmp_path):
    def produce():
        pytest.fail("consumed")
        yield

    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists already; name another folder or remove it"):
        write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=produce())
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        write_hf_folder(tmp_path / "dangling", hf_config=CONFIG, tensors=produce())


@pytest.mark.parametrize("failure", [RuntimeError("lost a device"), KeyboardInterrupt()])
def test_a_failing_source_leaves_nothing_behind(tmp_path, failure):
    def produce():
        for number in range(3):
            yield f"t{number}", np.zeros(256, np.float32)
        raise failure

    out = tmp_path / "new" / "deeper" / "out"
    with pytest.raises(type(failure)):
        write_hf_folder(out, hf_config=CONFIG, tensors=produce(), max_shard_bytes=1024)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_a_full_disk_leaves_nothing_behind_and_says_so(tmp_path, monkeypatch, error):
    calls = []

    def save_file(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise error
        return original(*args, **kwargs)

    original = hf_writer.save_file
    monkeypatch.setattr(hf_writer, "save_file", save_file)
    with pytest.raises(CheckpointError, match=r"out could not be written.*No space left"):
        write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=_tensors().items(), max_shard_bytes=1)
    assert os.listdir(tmp_path) == []


def test_a_tensor_written_twice_is_refused(tmp_path):
    pair = ("a", np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match="'a' is to be written twice"):
        write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=[pair, pair])
    assert os.listdir(tmp_path) == []


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file"):
        write_hf_folder(tmp_path / "file" / "out", hf_config=CONFIG, tensors=[])


def test_files_get_the_users_permissions(tmp_path):
    write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=_tensors().items())
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").write_text("x")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    for entry in (tmp_path / "out").iterdir():
        assert entry.stat().st_mode == (tmp_path / "plain" / "file").stat().st_mode, entry.name


TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_the_tokenizer_keeps_its_ids_template_and_added_tokens(tmp_path, place):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate("abcdefgh ")}}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    source = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    source.add_tokens(["<tool>"])
    source.chat_template = TEMPLATE
    folder = tmp_path / "source"
    source.save_pretrained(folder)
    if place == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    original = load_tokenizer(open_checkpoint(folder))
    write_hf_folder(tmp_path / "out", hf_config=CONFIG, tensors=_tensors().items(), tokenizer=original)
    again = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert again.get_vocab() == original.get_vocab()
    assert again.convert_tokens_to_ids("<tool>") == 11
    text = "a <tool>bad face</s>"
    assert again.encode(text) == original.encode(text)
    chat = [{"role": "a", "content": "b"}]
    assert again.apply_chat_template(chat, tokenize=False) == "<s><a>b"
    assert original.apply_chat_template(chat, tokenize=False) == "<s><a>b"
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 reads this name too
