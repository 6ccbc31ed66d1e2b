"""GGUF import of each architecture: names, norms, config keys; and the settings that are refused by name.

Not here: what all architectures share (test_gguf_reader.py) and tokenizers (test_gguf_tokenizer*.py).
"""

from __future__ import annotations

from dataclasses import fields

import gguf
import ml_dtypes
import numpy as np
import pytest

from shardwise.checkpoints.gguf_architectures import ARCHITECTURES, NEUTRAL
from shardwise.checkpoints.gguf_rope import llama3_divisors
from shardwise.checkpoints.reader import open_checkpoint
from shardwise.errors import CheckpointError

TYPES = gguf.GGMLQuantizationType
HEADS, KV_HEADS, HEAD_DIM, EMBED, MLP, VOCAB, LAYERS = 4, 2, 24, 64, 96, 40, 2
SIZES = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM}
# What converters write for each architecture besides sizes; a window makes a Mistral of a llama.
FILES = {
    "llama": {"rope.dimension_count": HEAD_DIM, "vocab_size": VOCAB},
    "mistral": {"rope.dimension_count": HEAD_DIM, "attention.sliding_window": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {
        "rope.freq_base": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention.sliding_window": 8,
    },
    "gemma3": {"rope.freq_base": 1e6, "attention.sliding_window": 8},
}
GEMMAS = ("gemma2", "gemma3")
every_file = pytest.mark.parametrize("name", FILES)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
PLAIN_ROPE = {"rope_theta": 10000.0, "rope_scaling": None}
CONFIGS = {
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": 8,
        **PLAIN_ROPE,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        **PLAIN_ROPE,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        **PLAIN_ROPE,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        **PLAIN_ROPE,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": HEAD_DIM,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
}


def _weights(name: str) -> dict[str, np.ndarray]:
    """A tiny model under Hugging Face names, tied; norms in steps of 2⁻⁸, so that adding 1 is exact."""
    layer = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, EMBED),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, EMBED),
        "self_attn.o_proj": (EMBED, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, EMBED),
        "mlp.up_proj": (MLP, EMBED),
        "mlp.down_proj": (EMBED, MLP),
        "input_layernorm": (EMBED,),
        "post_attention_layernorm": (EMBED,),
    }
    if name in ("qwen3", "gemma3"):
        layer |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    if name in GEMMAS:
        layer |= {"pre_feedforward_layernorm": (EMBED,), "post_feedforward_layernorm": (EMBED,)}
    shapes = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
        if name == "qwen2":
            qkv = {part: layer[f"self_attn.{part}"][:1] for part in ("q_proj", "k_proj", "v_proj")}
            shapes |= {f"model.layers.{number}.self_attn.{part}.bias": qkv[part] for part in qkv}
    rng = np.random.default_rng(1)
    steps = {key: rng.integers(-256, 256, shape) for key, shape in shapes.items()}
    return {key: (value / 256).astype(np.float32) for key, value in steps.items()}


def _as_converters_write(name: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GGUF's names, as the converters' own table has them; norms and the rows of q and k as converters do."""
    architecture = _architecture(name)
    kind = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    table = gguf.get_tensor_name_map(kind, LAYERS)
    written = {}
    for key, value in weights.items():
        if name in GEMMAS and key.endswith("norm.weight"):
            value = value + np.float32(1)
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = HEADS if "q_proj" in key else KV_HEADS
            value = value.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(value.shape)
        written[table.get_name(key, (".weight", ".bias"))] = value
    return written


def _architecture(name: str) -> str:
    return "llama" if name == "mistral" else name


@pytest.fixture
def open_file(tmp_path, write_gguf):
    """Opens a file of FILES with other settings (None: without it) or tensors."""

    def opened(name, changes=None, tensors=None):
        architecture = _architecture(name)
        settings = {**SIZES, **FILES[name], **(changes or {})}
        settings = {f"{architecture}.{key}": value for key, value in settings.items()}
        if tensors is None:
            tensors = {"output_norm.weight": np.ones(EMBED, np.float32)}
        return open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, settings, architecture))

    return opened


def _all_rows(checkpoint, name):
    return checkpoint.reader.rows(name, 0, checkpoint.reader.tensors()[name].shape[0])


@every_file
def test_weights_come_back_bit_for_bit_under_hf_names(open_file, name):
    weights = _weights(name)
    checkpoint = open_file(name, tensors=_as_converters_write(name, weights))
    assert set(checkpoint.reader.tensors()) == set(weights)
    for key, value in weights.items():
        info = checkpoint.reader.tensors()[key]
        assert (info.shape, info.dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(_all_rows(checkpoint, key), value, err_msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_is_made_from_what_converters_write(open_file, name):
    checkpoint = open_file(name, tensors=_as_converters_write(name, _weights(name)))
    assert checkpoint.hf_config == COMMON | CONFIGS[name]


@every_file
def test_transformers_takes_every_key_of_the_config(open_file, name):
    from transformers import CONFIG_MAPPING

    ours = open_file(name, tensors=_as_converters_write(name, _weights(name))).hf_config
    theirs = CONFIG_MAPPING[ours["model_type"]].from_dict(ours)
    old = {"rope_theta": "rope_parameters", "rope_scaling": "rope_parameters", "torch_dtype": "dtype"}
    known = {field.name for field in fields(theirs)} | {"model_type", "head_dim"}
    assert {old.get(key, key) for key in ours} <= known
    for key in set(ours) - set(old):
        assert getattr(theirs, key) == ours[key], key


@every_file
def test_transformers_reads_the_rotary_settings_as_they_are_meant(open_file, name):
    from transformers import CONFIG_MAPPING

    scaling = {"rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    ours = open_file(name, scaling).hf_config
    theirs = CONFIG_MAPPING[ours["model_type"]].from_dict(ours).rope_parameters
    scaled = {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0}
    # Gemma 3 stretches the layers that see everything, and these alone.
    local = {"rope_theta": 10000.0, "rope_type": "default"}
    assert theirs == ({"full_attention": scaled, "sliding_attention": local} if name == "gemma3" else scaled)


@pytest.mark.parametrize("name", ["llama", "qwen3", *GEMMAS])
def test_biases_of_attention_are_found_by_their_tensors(open_file, name):
    weights = {f"blk.0.attn_{part}.bias": np.ones(KV_HEADS * HEAD_DIM, np.float32) for part in "kv"}
    weights["blk.0.attn_q.bias"] = np.ones(HEADS * HEAD_DIM, np.float32)
    checkpoint = open_file(name, tensors=weights)
    assert checkpoint.hf_config["attention_bias"] is True
    assert "model.layers.0.self_attn.v_proj.bias" in checkpoint.reader.tensors()


def test_a_llama_file_without_a_window_stays_a_llama(open_file):
    for window in (None, 0):
        config = open_file("llama", {"attention.sliding_window": window}).hf_config
        assert config["model_type"] == "llama"
        assert "sliding_window" not in config


def test_mistral_keeps_the_scaling_that_its_divisors_say(open_file):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors = llama3_divisors(HEAD_DIM, 10000.0, scaling).astype(np.float32)
    config = open_file("mistral", tensors={"rope_freqs.weight": divisors}).hf_config
    assert (config["model_type"], config["rope_scaling"]) == ("mistral", scaling)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_models_scale_scores_by_width_and_heads(open_file, name, layers):
    sizes = {"embedding_length": 200, "attention.head_count": 8, "block_count": layers}
    assert open_file(name, sizes).hf_config["query_pre_attn_scalar"] == 25
    assert open_file(name, sizes | {"block_count": 26}).hf_config["query_pre_attn_scalar"] == HEAD_DIM


@pytest.mark.parametrize(
    ("name", "pattern", "full"),
    [
        ("gemma2", None, [1, 3, 5, 7]),
        ("gemma3", None, [5]),
        ("gemma3", 4, [3, 7]),
        ("gemma3", 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("gemma3", 0, []),
        ("gemma2", [True, True, False, True, True, True, True, False], [2, 7]),
    ],
)
def test_layers_that_see_everything_are_as_the_file_says(open_file, name, pattern, full):
    changes = {"block_count": 8, "attention.sliding_window_pattern": pattern}
    kinds = open_file(name, changes).hf_config["layer_types"]
    assert [number for number, kind in enumerate(kinds) if kind == "full_attention"] == full
    assert set(kinds) <= {"full_attention", "sliding_attention"}
    assert len(kinds) == 8


@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window_sees_everything_in_all_layers(open_file, window):
    config = open_file("gemma3", {"attention.sliding_window": window}).hf_config
    assert config["layer_types"] == ["full_attention"] * LAYERS
    assert config["sliding_window"] == 128, "transformers asks for a size even here; the context does no harm"


def test_gemma2_has_its_usual_caps_and_window_where_the_file_is_silent(open_file):
    silent = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"))
    config = open_file("gemma2", silent).hf_config
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["sliding_window"] == 4096


@pytest.mark.parametrize(("stated", "wanted"), [(30.0, 30.0), (0.0, None)])
def test_gemma3_caps_logits_only_where_the_file_says(open_file, stated, wanted):
    config = open_file("gemma3", {"final_logit_softcapping": stated}).hf_config
    assert config["final_logit_softcapping"] == wanted


def test_gemma3_takes_the_local_base_that_the_file_states(open_file):
    rope = open_file("gemma3", {"rope.freq_base_swa": 5000.0}).hf_config["rope_parameters"]
    assert rope["sliding_attention"]["rope_theta"] == 5000.0
    assert rope["full_attention"]["rope_theta"] == 1e6


def test_the_table_has_as_many_rows_as_the_file_holds(open_file):
    # Gemma 3's config.json says more rows than it has tokens; its converter writes those of the tokens alone.
    table = {"token_embd.weight": np.ones((VOCAB, EMBED), np.float32)}
    assert open_file("gemma3", {"vocab_size": 64}, table).hf_config["vocab_size"] == VOCAB


def _norm_through_file(open_file, written):
    tensors = {"output_norm.weight": written}
    checkpoint = open_file("gemma2", {"embedding_length": written.size}, tensors)
    return _all_rows(checkpoint, "model.norm.weight")


def test_bfloat16_norms_come_back_exactly_and_tiny_ones_to_half_a_step(open_file):
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    weights = every[np.abs(every) < 2.0**24]  # leaves out NaN and infinity
    back = _norm_through_file(open_file, weights + np.float32(1))
    exact = (np.abs(weights) >= 2.0**-16) | (weights == 0)
    np.testing.assert_array_equal(back[exact], weights[exact])
    assert np.abs(back - weights)[~exact].max() <= 2.0**-24
    assert np.any(back != weights), "the reader cannot know bits that the file does not hold"


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 2.0**-24), (np.float16, 2.0**-11)])
def test_other_norms_come_back_to_half_a_step_of_the_sum(open_file, dtype, bound):
    weights = np.random.default_rng(0).uniform(-1, 1, 4096).astype(dtype)
    written = (weights + dtype(1)).astype(np.float32)  # converters add in the weight's type
    back = _norm_through_file(open_file, written).astype(np.float64)
    assert np.abs(back - weights).max() <= bound


@pytest.mark.parametrize("kind", [TYPES.F16, TYPES.BF16, TYPES.Q8_0])
def test_norms_of_other_types_are_float32_less_one(open_file, kind):
    values = np.linspace(0.25, 3.0, EMBED, dtype=np.float32)
    blocks = gguf.quants.quantize(values, kind)
    stored = (blocks.view(np.float16), TYPES.F16) if kind == TYPES.F16 else (blocks, kind)
    checkpoint = open_file("gemma3", tensors={"output_norm.weight": stored})
    info = checkpoint.reader.tensors()["model.norm.weight"]
    assert (info.shape, info.dtype) == ((EMBED,), np.float32)
    wanted = gguf.quants.dequantize(blocks, kind) - np.float32(1)
    np.testing.assert_array_equal(_all_rows(checkpoint, "model.norm.weight"), wanted)
    np.testing.assert_array_equal(checkpoint.reader.rows("model.norm.weight", 3, 9), wanted[3:9])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_norms_of_other_architectures_stay_as_they_are(open_file, name):
    checkpoint = open_file(name, tensors={"output_norm.weight": np.full(EMBED, 0.3, np.float32)})
    np.testing.assert_array_equal(_all_rows(checkpoint, "model.norm.weight"), np.float32(0.3))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "blk.0.attn_q_norm.weight"),
        ("qwen2", "blk.0.attn_k_norm.weight"),
        ("qwen2", "rope_freqs.weight"),
        ("qwen3", "blk.0.post_ffw_norm.weight"),
        ("gemma2", "blk.0.attn_q_norm.weight"),
        ("gemma3", "rope_freqs.weight"),
        ("gemma3", "blk.0.ffn_gate_inp.weight"),
    ],
)
def test_a_tensor_of_another_architecture_is_refused_by_name(open_file, name, tensor):
    with pytest.raises(CheckpointError, match=tensor):
        open_file(name, tensors={tensor: np.ones(HEAD_DIM // 2, np.float32)})


# A llama file with a window is a Mistral.
FOREIGN = [
    (name, key)
    for name in FILES
    for key in NEUTRAL
    if key not in ARCHITECTURES[_architecture(name)].keys and key not in FILES[name]
    if (name, key) != ("llama", "attention.sliding_window")
]


@pytest.mark.parametrize(("name", "key"), FOREIGN)
def test_a_setting_of_other_architectures_is_refused_by_name(open_file, name, key):
    other = False if NEUTRAL[key] is True else type(NEUTRAL[key])(3)
    with pytest.raises(CheckpointError, match=rf"{key} = {other}"):
        open_file(name, {key: other})
    open_file(name, {key: NEUTRAL[key]})


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma2", {"rope.freq_base_swa": 5000.0}, r"rope\.freq_base_swa = 5000.*only 10000"),
        ("gemma3", {"rope.freq_base": None}, r"lack gemma3\.rope\.freq_base"),
        ("gemma3", {"attention.sliding_window_pattern": [True] * 3}, "3 entries, but there are 2 layers"),
        ("gemma3", {"rope.local.freq_base": 10000.0}, r"rope\.local\.freq_base.*not understood"),
        ("gemma3", {"vision.block_count": 27}, r"vision\.block_count"),
        ("mistral", {"attention.sliding_window_pattern": 2}, "sliding_window_pattern"),
        ("llama", {"attention.temperature_scale": 0.1}, "temperature_scale"),
        ("qwen3", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "'yarn'"),
        ("qwen3", {"attention.key_length": 32}, r"attention\.value_length = 24"),
        ("qwen2", {"attention.sliding_window_pattern": 2}, "sliding_window_pattern"),
    ],
)
def test_a_setting_that_would_change_the_numbers_is_refused(open_file, name, changes, named):
    with pytest.raises(CheckpointError, match=named):
        open_file(name, changes)
