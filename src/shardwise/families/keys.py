"""A config.json that knows which of its keys were looked at, so that none is passed over in silence.

Not here: what a family makes of the keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any


class ConfigKeys(Mapping[str, Any]):
    """A config.json's content that knows which of its keys have been looked at."""

    def __init__(self, content: Mapping[str, Any]):
        self._content, self.read = content, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return key in self._content

    def unread(self) -> dict[str, Any]:
        """What nobody asked for and what is not known to be without effect on the computation."""
        return {
            key: value
            for key, value in self._content.items()
            if key not in self.read and key not in NO_MATHS and not NO_MATHS_LIKE.fullmatch(key)
        }


NO_MATHS = frozenset((
    "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "cls_token_id", "custom_pipelines",
    "decoder_start_token_id", "dtype", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder",
    "is_encoder_decoder", "label2id", "mask_token_id", "max_length", "model_type", "name_or_path",
    "output_attentions", "output_hidden_states", "output_past", "pad_token_id", "prefix", "problem_type",
    "pruned_heads", "remove_invalid_values", "return_dict", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
    "use_return_dict", "vocab_file", "xla_device",
))  # fmt: skip
"""Keys of config.json that say nothing of a forward pass."""
NO_MATHS_LIKE = re.compile(
    r"_.*|summary_.*|unsloth_.*|.*drop(out)?(_prob|_rate|_p)?|.*pdrop|layerdrop|num_beam.*|.*_penalty"
    r"|.*_token_ids?|.*ngram.*|(min|max)_(new_)?(length|tokens)|do_sample|early_stopping|gradient_checkpointing"
    r"|output_router_logits|router_aux_loss_coef|router_jitter_noise"
)
"""Others, by pattern: private ones, dropout (which acts in training alone, where commands say so), settings
of generation."""


def of_training_alone(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json asks of training beyond the loss, which training here does not do: dropout, noise in
    a router, a loss that balances experts."""
    found = {}
    for key, value in {**hf_config, **(hf_config.get("text_config") or {})}.items():
        asked = isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0
        if key == "router_aux_loss_coef" and not hf_config.get("output_router_logits"):
            continue
        if asked and _OF_TRAINING.fullmatch(key):
            found[key] = value
    return found


_OF_TRAINING = re.compile(
    r".*drop(out)?(_prob|_rate|_p)?|.*pdrop|layerdrop|router_(jitter_noise|aux_loss_coef)"
)
