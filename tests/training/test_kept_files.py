"""A fine-tuned folder keeps what stood beside the weights: chat template, added tokens, generation settings
(case C130; merging adapters is not there yet)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiny import CHATML, write_jsonl, write_llama, write_tokenizer

from shardwise.cli.main import main

CHAT = [{"role": "user", "content": "Hello </s> there"}, {"role": "assistant", "content": "Hi."}]
GENERATION = {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True}


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_template_tokens_and_generation_settings_survive_a_step(tmp_path: Path, place: str) -> None:
    from transformers import AutoTokenizer

    model = write_llama(tmp_path / "model", vocab=292, tokenizer=False)
    write_tokenizer(model, ("<extra>", "<other>"))
    if place == "chat_template.jinja":
        settings = json.loads((model / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        (model / place).write_text(CHATML)
    (model / "generation_config.json").write_text(json.dumps(GENERATION))
    out = tmp_path / "out"
    code = main(
        ["finetune", str(model), "--data", str(write_jsonl(tmp_path / "a.jsonl")), "--out", str(out),
         "--steps", "1", "--length", "16", "--global-batch", "8", "--mesh", "1,4,2"]
    )  # fmt: skip
    assert code == 0
    before, after = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(out)
    for add in (False, True):
        assert after.apply_chat_template(
            CHAT, tokenize=False, add_generation_prompt=add
        ) == before.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=add)
    assert after.get_vocab() == before.get_vocab()
    assert after.convert_tokens_to_ids(["<extra>", "<other>"]) == [290, 291]
    written = json.loads((out / "generation_config.json").read_text())
    assert {key: written[key] for key in GENERATION} == GENERATION
