"""Commands that predict the next token refuse an encoder in one line, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parity.families import all_cases
from tests.parity.family_cases import write_checkpoint
from tests.tiny import write_jsonl, write_tokenizer

from shardwise.cli.main import main

ROBERTA = next(case for case in all_cases() if case.name == "roberta")


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "{model}", "hello"),
        ("finetune", "{model}", "--data", "{data}", "--out", "{out}", "--steps", "1"),
        ("pretrain", "roberta-base", "--data", "{data}", "--out", "{out}", "--steps", "1",
         "--tokenizer", "{model}"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_an_encoder_is_refused(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(ROBERTA, tmp_path / "model")
    write_tokenizer(model)
    places = {"model": model, "data": write_jsonl(tmp_path / "a.jsonl"), "out": tmp_path / "out"}
    assert main([word.format(**places) for word in command]) == 2
    assert "is an encoder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
