"""Perplexity against a NumPy sum over the model's logits, on any mesh, in any batches; and `shardwise eval`.

Not here: how a text is cut into windows (test_windows.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.tiny import SENTENCES, write_jsonl, write_llama

import shardwise
from shardwise.cli.main import main
from shardwise.evaluation.perplexity import Perplexity, measure, tokenize_texts
from shardwise.evaluation.windows import Window, rolling_windows

LENGTH = 16
MESHES = {"one": (1, 1, 1), "fsdp 2": (1, 2, 1), "tp 2": (1, 1, 2), "tp 3, all padded": (1, 1, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 291 ids, 3 kv heads of 3 and mlp 50 are divided by neither 2 nor by 4.
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 50}
    return write_llama(tmp_path_factory.mktemp("models") / "model", vocab=291, **sizes)


def load(folder: Path, mesh: tuple[int, int, int]) -> shardwise.Model:
    devices = jax.devices()[: math.prod(mesh)]
    return shardwise.load(folder, mesh=",".join(map(str, mesh)), devices=devices, stacked=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> shardwise.Model:
    return load(folder, (1, 1, 1))


@pytest.fixture(scope="module")
def texts(model: shardwise.Model) -> list[np.ndarray]:
    """The longest has 52 tokens, more than three windows of 16; one is empty."""
    return [*tokenize_texts(model.tokenizer, SENTENCES), np.zeros(0, np.int32)]


def measured(
    model: shardwise.Model, texts: list[np.ndarray], *, length: int = LENGTH, batch: int = 4, context: int = 1
) -> Perplexity:
    return measure(
        model.plan, model.mesh, model.params, texts, prefix_token=0, length=length, batch=batch,
        compute_dtype="float32", param_dtype="float32", context=context,
    )  # fmt: skip


def by_hand(model: shardwise.Model, windows: list[Window]) -> tuple[float, float, int]:
    """Mean NLL, accuracy and scored tokens from logits of each window, padded on the right; in float64."""
    nll, right, tokens = 0.0, 0, 0
    for start in range(0, len(windows), 8):
        some = windows[start : start + 8]
        ids = np.zeros((8, LENGTH), np.int32)
        for row, window in enumerate(some):
            ids[row, : len(window.inputs)] = window.inputs
        logits = model.logits(ids).astype(np.float64)
        for row, window in enumerate(some):
            for place, target in enumerate(window.targets, start=len(window.inputs) - len(window.targets)):
                scores = logits[row, place]
                nll += np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[target]
                right += scores.argmax() == target
                tokens += 1
    return nll / tokens, right / tokens, tokens


@pytest.mark.parametrize("context", [1, 6])
def test_it_is_the_sum_over_the_models_logits_in_every_window(
    model: shardwise.Model, texts: list[np.ndarray], context: int
) -> None:
    windows = [window for text in texts for window in rolling_windows(text, 0, LENGTH, context)]
    nll, accuracy, tokens = by_hand(model, windows)
    result = measured(model, texts, context=context)
    assert (result.tokens, result.accuracy, result.windows) == (tokens, accuracy, len(windows))
    assert result.tokens == sum(map(len, texts))
    # A float32 sum of 291 powers: √291 · 2⁻²⁴ = 1e-6 relative, for an NLL of about 6.
    assert result.nll == pytest.approx(nll, abs=1e-5)
    assert result.perplexity == math.exp(result.nll)


def test_more_context_changes_the_windows_but_not_which_tokens_count(
    model: shardwise.Model, texts: list[np.ndarray]
) -> None:
    short, long = measured(model, texts), measured(model, texts, context=6)
    assert long.tokens == short.tokens
    assert long.windows > short.windows
    assert long.nll != short.nll


def test_the_batch_size_does_not_change_it(model: shardwise.Model, texts: list[np.ndarray]) -> None:
    four, seven = measured(model, texts), measured(model, texts, batch=7)
    # The same windows in another shape of batch: a product may be summed in another order.
    assert seven.nll == pytest.approx(four.nll, abs=1e-6)
    assert replace(seven, nll=0) == replace(four, nll=0)


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "one"])
def test_the_mesh_does_not_change_it(
    folder: Path, model: shardwise.Model, texts: list[np.ndarray], mesh: str
) -> None:
    one, cut = measured(model, texts), measured(load(folder, MESHES[mesh]), texts)
    assert cut.nll == pytest.approx(one.nll, abs=1e-5)  # as above
    assert replace(cut, nll=0) == replace(one, nll=0)


def test_short_texts_are_not_computed_at_the_whole_windows_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shardwise.evaluation.scores as module

    lengths: list[int] = []
    build = module.build_step

    def note(plan: shardwise.Plan, workload: shardwise.Workload, *rest: Any) -> Any:
        lengths.append(workload.length)
        return build(plan, workload, *rest)

    monkeypatch.setattr(module, "build_step", note)
    wide = load(write_llama(folder.parent / "wide", max_position_embeddings=256), (1, 1, 1))
    text = [np.arange(40, dtype=np.int32)]
    short, long = measured(wide, text, length=250), measured(wide, [np.arange(80) + 1], length=250)
    assert lengths == [64, 128]
    assert (short.tokens, short.windows, long.tokens, long.windows) == (40, 1, 80, 1)
    assert short == measured(wide, text, length=64)


def test_the_key_of_the_text_can_be_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, plain = tmp_path / "d.jsonl", tmp_path / "d.txt"
    data.write_text('{"body": "It rains."}\n')
    plain.write_text("It rains.")
    command = ["eval", str(folder), "--length", "16", "--mesh", "1,8,1", "--perplexity"]
    assert main([*command, str(data)]) == 2
    assert "no field 'text'; this line has 'body'" in capsys.readouterr().err
    assert main([*command, str(data), "--text-field", "body"]) == 0
    assert f"{data}: nll " in capsys.readouterr().out
    assert main([*command, str(plain), "--text-field", "body"]) == 2
    assert "--text-field has no effect without JSON lines" in capsys.readouterr().err


def test_an_infinite_perplexity_is_said_not_raised() -> None:
    assert Perplexity(nll=1e4, tokens=1, accuracy=0.0, windows=1).perplexity == math.inf


def test_text_that_looks_like_a_control_token_is_spelled_out(model: shardwise.Model) -> None:
    (ids,) = tokenize_texts(model.tokenizer, ["a</s>b"])
    assert 1 not in ids
    assert model.tokenizer.decode(ids) == "a</s>b"


def test_the_command_says_mesh_tokens_and_what_it_measured(
    folder: Path,
    model: shardwise.Model,
    texts: list[np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_jsonl(tmp_path / "held out.jsonl")
    assert (
        main(
            [
                "eval",
                str(folder),
                "--perplexity",
                str(data),
                "--length",
                "16",
                "--batch",
                "8",
                "--mesh",
                "1,8,1",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    result = measured(model, texts)
    assert lines[0] == "mesh dp:1,fsdp:8,tp:1"
    wanted = f"{data}: nll {result.nll:.4f}  perplexity {result.perplexity:.3f}  on {result.tokens} tokens  ("
    assert lines[1].startswith(wanted), (lines[1], wanted)
    assert f"({result.windows} windows of up to 16, " in lines[1]
    assert lines[2] == f"first choice right: {result.accuracy:.1%}"


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "the file is empty or only white space"), ('{"text": ""}', "has no token to score")],
)
def test_a_text_with_nothing_to_score_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    data = tmp_path / f"empty.{'jsonl' if content else 'txt'}"
    data.write_text(content)
    assert main(["eval", str(folder), "--perplexity", str(data), "--length", "16"]) == 2
    error = capsys.readouterr().err
    assert str(data) in error
    assert message in error


def test_a_length_above_the_models_context_is_lowered_aloud(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shardwise.evaluation.perplexity as module

    asked: list[int] = []

    def note(*_: object, length: int, **__: object) -> Perplexity:
        asked.append(length)
        return Perplexity(1.0, 1, 1.0, 1)

    monkeypatch.setattr(module, "measure", note)
    data = write_jsonl(tmp_path / "d.jsonl")
    assert main(["eval", str(folder), "--perplexity", str(data), "--length", "100"]) == 0
    assert asked == [64]
    assert "--length 100 is above the model's context: windows of 64 tokens" in capsys.readouterr().out
    assert main(["eval", str(folder), "--perplexity", str(data), "--length", "100", "--context", "70"]) == 2
    assert "--context 70 is above the model's context of 64" in capsys.readouterr().err
