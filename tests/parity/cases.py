"""Tiny Llama-form checkpoints and token batches that the parity tests share; NumPy and safetensors only.

Not here: the reference logits (make_goldens.py) and the comparisons (test_goldens.py, test_live.py).
Weights come from `numpy.random.RandomState`, whose stream NumPy has frozen, so that stored logits stay valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"

LOGIT_BOUND = 1e-4
"""Allowed max|ours - reference| as a part of max|reference|, float32 against float32. In these cases
transformers' own float32 is within 1.5e-6 of its float64, so that almost two decades are left for another
order of summation, while dropping the least of the tensors (a layer's k_proj.bias) changes logits by 6e-2."""


@dataclass(frozen=True)
class Case:
    """One tiny model: what its config.json says and from which seed its weights come."""

    name: str
    config: Mapping[str, Any] = field(repr=False)
    """The content of config.json."""
    seed: int
    """Seed of the weights; the token batches use it too."""
    golden: str
    """Name of the file of stored logits; cases that must agree share one."""
    head: Literal["untied", "other", "absent", "copy"] = "untied"
    """lm_head.weight in the file: `untied`: there unless the config ties it; `other`: there, with its own
    values; `absent`; `copy`: there, equal to the embedding table."""

    @property
    def tied(self) -> bool:
        """Whether the config says, at any depth, that the head is the embedding table."""
        inner = self.config.get("text_config", {})
        return bool(self.config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))


@dataclass(frozen=True)
class Batch:
    """Token ids to feed and the positions whose logits are compared."""

    name: str
    tokens: np.ndarray
    """int32 [B, T]; padding holds random ids, so that a leak from padding shows."""
    attention_mask: np.ndarray | None
    """int32 [B, T], 1 at real tokens; None where all are real."""
    keep: np.ndarray
    """bool [B, T]: positions whose logits are stored; never padding."""


def write_checkpoint(case: Case, folder: Path) -> Path:
    """Write `config.json` and `model.safetensors` (float32) of the case into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(case.config), indent=2) + "\n")
    # transformers refuses a safetensors file that does not say which framework wrote it.
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights(case: Case) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face name: matrices N(0, 0.15), norm scales N(1, 0.3), biases N(0, 0.5)."""
    random = np.random.RandomState(case.seed)
    tensors = {name: _draw(random, name, shape) for name, shape in _shapes(case.config).items()}
    # Drawn last, so that cases that differ only in their head share every other tensor.
    if case.head == "other" or (case.head == "untied" and not case.tied):
        tensors["lm_head.weight"] = _draw(
            random, "lm_head.weight", tensors["model.embed_tokens.weight"].shape
        )
    elif case.head == "copy":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    return tensors


def weight_sums(case: Case) -> np.ndarray:
    """float64 [tensors]: sum of |w| of each tensor in order of name; shows that a golden is of these."""
    return np.array([np.abs(w, dtype=np.float64).sum() for _, w in sorted(weights(case).items())])


def inputs(case: Case) -> tuple[Batch, ...]:
    """The case's token batches: 2 × 20 plain, left padded and right padded, and one row of 200 positions."""
    return draw_batches(case.seed + 1, int(case.config["vocab_size"]))


def draw_batches(seed: int, vocab: int) -> tuple[Batch, ...]:
    """Those batches of random ids below `vocab`."""
    random = np.random.RandomState(seed)

    def draw(rows: int, length: int) -> np.ndarray:
        return random.randint(0, vocab, size=(rows, length)).astype(np.int32)

    rows, length = 2, 20
    real = np.array([13, length])[:, None]  # real tokens of each row
    left = np.arange(length)[None] >= length - real
    right = np.arange(length)[None] < real
    long_keep = (np.arange(200) % 8 == 0) | (
        np.arange(200) == 199
    )  # a few positions, to keep the goldens small
    return (
        Batch("plain", draw(rows, length), None, np.ones((rows, length), bool)),
        Batch("left_padded", draw(rows, length), left.astype(np.int32), left),
        Batch("right_padded", draw(rows, length), right.astype(np.int32), right),
        Batch("long", draw(1, 200), None, long_keep[None]),
    )


def golden_logits(case: Case) -> dict[str, np.ndarray]:
    """The stored reference: batch name → float32 [kept positions, V]; also `weight_sums`."""
    with np.load(GOLDENS / f"{case.golden}.npz") as stored:
        return {name: stored[name] for name in stored.files}


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor but the head's."""
    embed, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or embed // heads
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], embed)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        for name, out_dim, in_dim, bias in (
            ("self_attn.q_proj", heads * head_dim, embed, attention_bias),
            ("self_attn.k_proj", kv_heads * head_dim, embed, attention_bias),
            ("self_attn.v_proj", kv_heads * head_dim, embed, attention_bias),
            ("self_attn.o_proj", embed, heads * head_dim, attention_bias),
            ("mlp.gate_proj", mlp, embed, mlp_bias),
            ("mlp.up_proj", mlp, embed, mlp_bias),
            ("mlp.down_proj", embed, mlp, mlp_bias),
        ):
            shapes[f"{block}{name}.weight"] = (out_dim, in_dim)
            if bias:
                shapes[f"{block}{name}.bias"] = (out_dim,)
        shapes[f"{block}input_layernorm.weight"] = (embed,)
        shapes[f"{block}post_attention_layernorm.weight"] = (embed,)
    shapes["model.norm.weight"] = (embed,)
    return shapes


def _draw(random: np.random.RandomState, name: str, shape: tuple[int, ...]) -> np.ndarray:
    mean, deviation = (0.0, 0.15)
    if name.endswith(".bias"):
        deviation = 0.5
    elif "norm" in name:
        mean, deviation = 1.0, 0.3
    return random.normal(mean, deviation, size=shape).astype(np.float32)


def _case(name: str, seed: int, *, golden: str | None = None, **changes: Any) -> Case:
    """A case that differs from GQA 4/2 with an untied head in `changes`; a value of `...` removes the key."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    config = {key: value for key, value in config.items() if value is not ...}
    return Case(name, config, seed, golden or name)


# The llama3 scaling of case C103: 200 positions go beyond its original context.
LLAMA3_SCALING: Mapping[str, Any] = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = dict(LLAMA3_SCALING)

CASES: tuple[Case, ...] = (
    _case("mha", 100, num_key_value_heads=..., tie_word_embeddings=True),
    _case("gqa_4_2", 200),
    _case("gqa_9_3", 300, hidden_size=54, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=3),
    _case(
        "mqa_5_1", 400, hidden_size=60, num_attention_heads=5, num_key_value_heads=1, tie_word_embeddings=True
    ),
    _case("rope_linear", 500, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    # Three spellings of one model: they share weights and stored logits.
    _case("rope_llama3", 600, rope_scaling={"rope_type": "llama3", **_LLAMA3}),
    _case("rope_llama3_legacy_type", 600, golden="rope_llama3", rope_scaling={"type": "llama3", **_LLAMA3}),
    _case(
        "rope_llama3_rope_parameters",
        600,
        golden="rope_llama3",
        rope_theta=...,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **_LLAMA3},
    ),
    _case("rope_theta_500000", 700, rope_theta=500000.0),
    _case("attention_bias", 800, attention_bias=True),
    _case("mlp_bias", 900, mlp_bias=True, num_hidden_layers=3),
    _case("both_biases_tied", 950, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    _case("head_dim_20", 1000, hidden_size=48, head_dim=20),
    _case("head_dim_null", 1100, head_dim=None),
    # Head counts that tensor parallelism does not divide (cases C207 and C208).
    _case("mha_6", 1200, hidden_size=48, num_attention_heads=6, num_key_value_heads=6),
    _case("gqa_6_3", 1300, hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
    _case("gqa_8_2", 1400, num_attention_heads=8, num_key_value_heads=2, head_dim=16),
    _case("mqa_8_1", 1500, num_attention_heads=8, num_key_value_heads=1, head_dim=16),
)

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}

# Heads that contradict the config (case C110). `golden` names the logits that are right if the folder loads.
_TIED, _UNTIED = BY_NAME["mha"], BY_NAME["gqa_4_2"]
_NESTED = {key: value for key, value in _TIED.config.items() if key != "tie_word_embeddings"}
TIED_WITH_OTHER_HEAD = replace(
    _UNTIED, name="tied_with_other_head", config={**_UNTIED.config, "tie_word_embeddings": True}, head="other"
)
UNTIED_WITHOUT_HEAD = replace(
    _TIED, name="untied_without_head", config={**_TIED.config, "tie_word_embeddings": False}, head="absent"
)
TIED_WITH_COPY = replace(_TIED, name="tied_with_copy", head="copy")
TIED_IN_TEXT_CONFIG = replace(
    _TIED, name="tied_in_text_config", config={**_NESTED, "text_config": {"tie_word_embeddings": True}}
)
