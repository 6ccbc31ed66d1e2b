"""A tiny Llama folder with a real tokenizer, and a little text: what tests of whole commands run on.

Not here: the cases of the parity tests (parity/cases.py), which have no tokenizer. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A stitch in time saves nine.",
    "All that glitters is not gold, and not all who wander are lost.",
    "Um 7 Uhr früh fährt die Straßenbahn über die Brücke.",
    "Measure twice, cut once.",
    "She sells sea shells by the sea shore; the shells she sells are sea shells for sure.",
    "Two roads diverged in a wood, and I took the one less travelled by.",
    "Rain, rain, go away; come again another day.",
    "The early bird catches the worm, but the second mouse gets the cheese.",
    "Better late than never, but never late is better.",
    "Still waters run deep.",
    "A watched pot never boils, and a rolling stone gathers no moss.",
    "Naïve café owners résumé at noon.",
)
"""13 documents of different lengths."""

BOS, EOS, PAD, START, END = "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"
VOCAB = 290
"""Tokens of the tokenizer: 5 special ones, 256 bytes, 29 merges."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_llama(
    folder: Path, *, vocab: int = VOCAB, tokenizer: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """Write a one-layer Llama (float32) with 4 query and 2 kv heads and return its folder.

    Args:
        vocab: rows of the embedding table.
        tokenizer: whether the folder has one.
        changes: keys of config.json.
    """
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        write_tokenizer(folder)
    return folder


MASK = "<mask>"


def write_roberta(folder: Path, head: str = "ForMaskedLM", **changes: Any) -> Path:
    """Write a one-layer RoBERTa (float32), whose tokenizer has a mask token and puts `<s> … </s>` around a
    text and `<s> … </s></s> … </s>` around two, and return its folder.

    Args:
        head: behind `Roberta` in the name of the architecture.
        changes: keys of config.json.
    """
    from tests.parity.family_cases import FamilyCase, write_checkpoint

    config = {
        "architectures": [f"Roberta{head}"], "model_type": "roberta", "vocab_size": VOCAB + 1,
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48,
        "hidden_act": "gelu", "max_position_embeddings": 67, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
        "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, **changes,
    }  # fmt: skip
    write_checkpoint(FamilyCase("roberta", config, 0), folder)
    write_tokenizer(folder, (MASK,), encoder=True)
    return folder


def write_tokenizer(folder: Path, extra_tokens: Sequence[str] = (), encoder: bool = False) -> None:
    """Write a byte-level BPE tokenizer trained on SENTENCES; BOS in front of texts, and a ChatML template.

    Args:
        encoder: BOS in front of texts and EOS behind them instead, and MASK as the mask token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in extra_tokens])
    single, pair = f"{BOS} $A", f"{BOS} $A {BOS} $B"
    if encoder:
        single, pair = f"{BOS} $A {EOS}", f"{BOS} $A {EOS} {EOS} $B {EOS}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(text, tokenizer.token_to_id(text)) for text in (BOS, EOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    settings |= {"mask_token": MASK} if encoder else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_jsonl(path: Path, texts: Sequence[str] = SENTENCES) -> Path:
    """Write one JSON line a text and return the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    embed, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or embed // heads
    q_dim, kv_dim = heads * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], embed),
        "lm_head.weight": (config["vocab_size"], embed),
        "model.norm.weight": (embed,),
    }
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (q_dim, embed),
            f"{block}self_attn.k_proj.weight": (kv_dim, embed),
            f"{block}self_attn.v_proj.weight": (kv_dim, embed),
            f"{block}self_attn.o_proj.weight": (embed, q_dim),
            f"{block}mlp.gate_proj.weight": (mlp, embed),
            f"{block}mlp.up_proj.weight": (mlp, embed),
            f"{block}mlp.down_proj.weight": (embed, mlp),
            f"{block}input_layernorm.weight": (embed,),
            f"{block}post_attention_layernorm.weight": (embed,),
        }
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    # RandomState's stream is frozen by NumPy.
    random = np.random.RandomState(seed)
    return {
        name: random.normal(1.0 if "norm" in name else 0.0, 0.2, shape).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }
