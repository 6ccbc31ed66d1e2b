"""`shardwise generate` with prompts, stop ids and chat templates that are not as they should be.

Not here: what is generated (test_generate.py), options out of range (tests/cli).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiny import write_llama

from shardwise.cli.main import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert main(["generate", str(folder), *words, "--max-new-tokens", "2", "--mesh", "1,1,8"]) == 2
    error = [
        line
        for line in capsys.readouterr().err.splitlines()
        if not line.startswith(("mesh ", "head layout "))
    ]
    assert len(error) == 1, error
    return error[0]


def test_a_prompt_that_is_no_utf8_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argument = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python hands over such bytes
    assert "is not UTF-8" in refused(capsys, folder, argument)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system message') }}", "no system message (TemplateError)"),
        ("{% if %}", "(TemplateSyntaxError)"),
        ("{{ messages + 1 }}", "(TypeError)"),
    ],
)
def test_a_chat_template_that_fails_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], template: str, words: str
) -> None:
    change(folder / "tokenizer_config.json", chat_template=template)
    error = refused(capsys, folder, "--chat", "hello")
    assert "--chat: the model's chat template refuses the message" in error
    assert words in error


@pytest.mark.parametrize("value", [["</s>"], "</s>", 1.5, True])
def test_an_end_of_sequence_that_is_no_id_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert f"eos_token_id is {value!r}" in refused(capsys, folder, "hello")


def test_a_config_that_transformers_refuses_is_not_blamed_on_the_tokenizer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder / "config.json", use_cache="maybe")
    error = refused(capsys, folder, "hello")
    assert f"{folder}: config.json cannot be read" in error
    assert "use_cache" in error
