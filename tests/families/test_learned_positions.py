"""Positions beyond a learned table are refused with one line, by every command and in Python.

The model: OPT, whose table has two rows more than it has positions, with the tokenizer of tests/tiny.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.parity.conftest import load_on
from tests.parity.families.opt import CASES
from tests.parity.family_cases import FamilyCase, write_checkpoint
from tests.tiny import VOCAB, write_jsonl, write_tokenizer

from shardwise.cli.main import main
from shardwise.errors import ConfigError, ContextError

CONTEXT = 64
CASE = FamilyCase(
    "opt_64_positions",
    {**CASES[0].config, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "num_hidden_layers": 1},
    5190,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(CASE, tmp_path_factory.mktemp("opt") / "model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_on(folder)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, lines
    return lines[0]


def test_generate_refuses_a_prompt_with_more_new_tokens_than_there_are_positions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(folder), "a b c", "--mesh", "1,1,8", "--max-new-tokens", str(CONTEXT)]
    assert main(words) == 2
    assert f"exceed the model's context of {CONTEXT}" in one_line(capsys)


def test_finetune_refuses_a_length_of_more_than_there_are_positions(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "d.jsonl")
    words = ["finetune", str(folder), "--data", str(data), "--out", str(tmp_path / "out"), "--mesh", "1,4,2"]
    assert main([*words, "--length", str(CONTEXT + 1), "--steps", "1", "--global-batch", "8"]) == 2
    assert f"--length is 65, more than the model's context of {CONTEXT}" in one_line(capsys)


def test_eval_scores_no_window_of_more_than_there_are_positions(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows are an option with a default: they are shortened, aloud, and give what that length gives."""
    found = []
    data = write_jsonl(tmp_path / "d.jsonl")
    for length in (CONTEXT + 36, CONTEXT):
        words = ["eval", str(folder), "--perplexity", str(data), "--length", str(length), "--mesh", "1,1,8"]
        assert main(words) == 0
        said = capsys.readouterr().out
        shortened = f"--length {length} is above the model's context: windows of {CONTEXT} tokens" in said
        assert shortened == (length > CONTEXT)
        found += [line for line in said.splitlines() if "perplexity" in line]
    assert len(found) == 2
    assert found[0].split("(")[0] == found[1].split("(")[0]


def test_explain_refuses_a_sequence_of_more_than_there_are_positions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(folder), "--mesh", "1,2,2", "--seq", str(CONTEXT + 1)]) == 2
    assert f"--seq is 65, more than the model's context of {CONTEXT}" in one_line(capsys)


def test_whole_sequences_and_cached_ones_are_refused_in_python(model: Any) -> None:
    tokens = np.zeros((1, CONTEXT + 1), np.int32)
    for ask in (model.logits, model.hidden_states, lambda tokens: model.cached_logits(tokens, 3)):
        with pytest.raises(ContextError, match=f"65 tokens are more than the model's context of {CONTEXT}"):
            ask(tokens)


def test_the_last_position_is_computed_and_differs_from_the_one_before(model: Any) -> None:
    """That the table's last row is used: clipping to a shorter table would make the two alike."""
    logits = model.logits(np.full((1, CONTEXT), 7, np.int32))[0]
    assert np.abs(logits[-1] - logits[-2]).max() > 0.01 * np.abs(logits).max()


@pytest.mark.parametrize("task", ["train", "score", "logits", "hidden", "prefill", "decode"])
def test_a_step_for_more_positions_than_there_are_is_not_built(model: Any, task: Any) -> None:
    cached = {"capacity": CONTEXT + 1} if task in ("prefill", "decode") else {}
    length = 1 if task == "decode" else CONTEXT if cached else CONTEXT + 1
    with pytest.raises(
        ConfigError, match=rf"^task '{task}': 65 tokens .* learned positions, {CONTEXT}[^\n]*$"
    ):
        model.step(task, 1, length, **cached)
