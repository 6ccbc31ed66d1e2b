"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-RoBERTa (Conneau et al. 2020, arXiv:1911.02116).

Encoders with a head over the vocabulary, with a classifier, or alone, as `architectures` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardwise.errors import ConfigError
from shardwise.families.base import (
    KEY,
    QUERY,
    Family,
    Head,
    TensorName,
    activation_from_hf,
    head_dim_from,
    linear,
    norm,
    optional,
    refuse_unsupported,
    require,
)
from shardwise.models.config import ModelConfig

_NEUTRAL = {
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "position_embedding_type": (None, "absolute"),
    "pruned_heads": (None, {}, []),
}


def _heads(prefix: str) -> dict[Head, str]:
    """The class of transformers for each head."""
    return {
        "vocab": f"{prefix}ForMaskedLM",
        "labels": f"{prefix}ForSequenceClassification",
        "none": f"{prefix}Model",
    }


def _head(hf: Mapping[str, Any], prefix: str) -> Head:
    """The head that `architectures` names; the masked-LM head where it names nothing."""
    names = hf.get("architectures") or [_heads(prefix)["vocab"]]
    found: list[Head] = [head for head, name in _heads(prefix).items() if name == names[0]]
    if not found:
        raise ConfigError(
            f"config.json: architectures {names} is not supported; supported:"
            f" {', '.join(_heads(prefix).values())} (the last takes the encoder alone out of any)"
        )
    return found[0]


def _labels(hf: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the labels: id2label's, or LABEL_0, LABEL_1, … as transformers calls them."""
    id2label, number = hf.get("id2label"), optional(hf, "num_labels", 2)
    if id2label is None:
        return tuple(f"LABEL_{i}" for i in range(number))
    names = {str(key): str(name) for key, name in id2label.items()}
    ids = [str(i) for i in range(len(names))]
    if not names or set(names) != set(ids):
        raise ConfigError(f"config.json: id2label has the ids {', '.join(names)}; expected 0, 1, 2, …")
    if hf.get("num_labels") not in (None, len(names)):
        raise ConfigError(f"config.json: num_labels is {number}, but id2label has {len(names)}; keep one")
    labels = tuple(names[i] for i in ids)
    label2id = {str(name): int(i) for name, i in (hf.get("label2id") or {}).items()}
    odd = [name for i, name in enumerate(labels) if labels.index(name) != i or label2id.get(name, i) != i]
    if odd:
        raise ConfigError(f"config.json: id2label and label2id give {odd[0]!r} more than one id; give it one")
    return labels


def _config_from_hf(hf: Mapping[str, Any], family: str, prefix: str) -> ModelConfig:
    refuse_unsupported(hf, _NEUTRAL, family)
    heads, head = require(hf, "num_attention_heads"), _head(hf, prefix)
    if "pad_token_id" in hf and hf["pad_token_id"] is None:
        raise ConfigError(
            "config.json: pad_token_id is null, but positions are counted from behind it; set it (usually 1)"
        )
    # The table's rows up to the padding's own are never reached: positions of tokens start behind it.
    offset = optional(hf, "pad_token_id", 1) + 1
    hf.get("num_labels")  # which only a classifier has
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        embed_dim=require(hf, "hidden_size"),
        num_layers=require(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim_from(hf),
        mlp_dim=require(hf, "intermediate_size"),
        max_position=optional(hf, "max_position_embeddings", 512) - offset,
        norm="layer",
        norm_eps=optional(hf, "layer_norm_eps", 1e-12),
        norm_order="post",
        final_norm=False,
        gated_mlp=False,
        activation=activation_from_hf(hf, "hidden_act", "gelu"),
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        positions="learned",
        position_offset=offset,
        causal=False,
        head=head,
        labels=_labels(hf) if head == "labels" else (),
        tie_embeddings=optional(hf, "tie_word_embeddings", True),
        head_bias=head == "vocab",
        head_transform=head == "vocab",
        embed_norm=True,
        token_types=optional(hf, "type_vocab_size", 2),
        initializer_range=optional(hf, "initializer_range", 0.02),
        family=family,
    )


def _config_to_hf(config: ModelConfig, prefix: str) -> dict[str, Any]:
    names = {"gelu_tanh": "gelu_new", "gelu_quick": "quick_gelu"}
    keys = {
        "architectures": [_heads(prefix)[config.head]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_position + config.position_offset,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": names.get(config.activation, config.activation),
        "pad_token_id": config.position_offset - 1,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initializer_range,
    }
    if config.labels:
        keys["id2label"] = {str(i): name for i, name in enumerate(config.labels)}
        keys["label2id"] = {name: i for i, name in enumerate(config.labels)}
    return keys


def _tensor_names(config: ModelConfig) -> tuple[TensorName, ...]:
    embeddings, block = "roberta.embeddings.", "roberta.encoder.layer.{layer}."
    attn, d, f = block + "attention.", ("embed",), ("mlp",)
    names = [
        TensorName("embed/table", embeddings + "word_embeddings.weight", (("vocab",), d)),
        TensorName("embed/positions", embeddings + "position_embeddings.weight", (("positions",), d)),
        TensorName(
            "embed/token_types", embeddings + "token_type_embeddings.weight", (("token_types",), ("vector",))
        ),
        *norm("embed/norm", embeddings + "LayerNorm", bias=True),
        *linear("layers/attn/q_proj", attn + "self.query", QUERY, d, True),
        *linear("layers/attn/k_proj", attn + "self.key", KEY, d, True),
        *linear("layers/attn/v_proj", attn + "self.value", KEY, d, True),
        *linear("layers/attn/o_proj", attn + "output.dense", d, QUERY, True),
        *norm("layers/attn_norm", attn + "output.LayerNorm", bias=True),
        *linear("layers/mlp/up_proj", block + "intermediate.dense", f, d, True),
        *linear("layers/mlp/down_proj", block + "output.dense", d, f, True),
        *norm("layers/mlp_norm", block + "output.LayerNorm", bias=True),
    ]
    if config.head == "labels":
        names += linear("classifier/dense", "classifier.dense", ("vector",), d, True)
        names += linear("classifier/out_proj", "classifier.out_proj", ("labels",), d, True)
    if config.head == "vocab":
        names += linear("head_transform/dense", "lm_head.dense", ("vector",), d, True)
        names += norm("head_transform/norm", "lm_head.layer_norm", bias=True)
        own, copy, vocab = "lm_head.bias", "lm_head.decoder.bias", (("vocab",),)
        names.append(TensorName("lm_head/bias", own, vocab, copies=(copy,)))
        if not config.tie_embeddings:
            names.append(TensorName("lm_head/kernel", "lm_head.decoder.weight", (("vocab",), d)))
            # Of the two names transformers 5 computes with this one where nothing is tied, and wants both.
            names.append(TensorName("lm_head/bias", copy, vocab, copies=(own,)))
    return tuple(names)


def _family(name: str, prefix: str) -> Family:
    return Family(
        name=name,
        model_types=(name,),
        config_from_hf=partial(_config_from_hf, family=name, prefix=prefix),
        config_to_hf=partial(_config_to_hf, prefix=prefix),
        tensor_names=_tensor_names,
        ignored_tensors=(r"(roberta\.)?embeddings\.(position|token_type)_ids",),
        unused_tensors=(r"(roberta\.)?pooler\..*",),
        bases=("roberta.", ""),
        head_tensor="lm_head.decoder.weight",
        heads=_heads(prefix),
        head_tensors=(r"(lm_head|classifier)\..*",),
    )


FAMILY = _family("roberta", "Roberta")
XLM = _family("xlm-roberta", "XLMRoberta")
