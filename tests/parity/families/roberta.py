"""RoBERTa and XLM-RoBERTa: masked-LM heads tied and untied, classifiers, padding tokens, activations."""

from __future__ import annotations

from typing import Any

from ..family_cases import FamilyCase


def _case(name: str, seed: int, architecture: str, **changes: Any) -> FamilyCase:
    config = {
        "architectures": [architecture], "model_type": "roberta", "vocab_size": 61, "hidden_size": 48,
        "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 90, "hidden_act": "gelu",
        "max_position_embeddings": 258, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 2, **changes,
    }  # fmt: skip
    return FamilyCase(name, config, seed)


_NAMES = {"0": "entailment", "1": "neutral", "2": "contradiction"}

CASES = (
    _case("roberta", 2100, "RobertaForMaskedLM"),
    _case(
        "roberta_untied_pad_0_relu", 2110, "RobertaForMaskedLM", tie_word_embeddings=False, pad_token_id=0,
        num_attention_heads=6, num_hidden_layers=3, hidden_act="relu", type_vocab_size=2,
        layer_norm_eps=1e-12,
    ),  # the head's own activation stays gelu
    _case(
        "roberta_classifier_gelu_new", 2120, "RobertaForSequenceClassification", hidden_act="gelu_new",
        id2label=_NAMES, label2id={name: int(i) for i, name in _NAMES.items()},
    ),
    _case(
        "xlm_roberta", 2130, "XLMRobertaForMaskedLM", model_type="xlm-roberta", num_attention_heads=3,
        pad_token_id=4, type_vocab_size=2,
    ),
    _case(
        "xlm_roberta_classifier_5_labels", 2140, "XLMRobertaForSequenceClassification",
        model_type="xlm-roberta", num_labels=5, num_attention_heads=6,
    ),
)  # fmt: skip
