"""Pseudo-perplexity and accuracy of encoders against NumPy sums over the model's logits; `shardwise eval`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.tiny import SENTENCES, write_jsonl, write_llama, write_roberta

import shardwise
from shardwise.cli.main import main
from shardwise.data.labelled import LabelledText, encode
from shardwise.evaluation import labels, masked
from shardwise.evaluation.perplexity import tokenize_texts

MASK_ID, BOS, EOS = 290, 0, 1
FRAME = masked.Frame((BOS,), (EOS,), MASK_ID)
LENGTH = 14
MESHES = {"one": (1, 1, 1), "fsdp 2": (1, 2, 1), "tp 3, all padded": (1, 1, 3)}
TOLERANCE = 1e-5
"""Of a mean of float32 logs between 0 and about 10, whose own error is some 1e-6."""
LABELS = {"0": "no", "1": "yes", "2": "perhaps"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roberta(tmp_path_factory.mktemp("models") / "mlm")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "classifier"
    return write_roberta(folder, "ForSequenceClassification", id2label=LABELS)


def load(folder: Path, mesh: str = "one") -> shardwise.Model:
    sizes = MESHES[mesh]
    devices = jax.devices()[: math.prod(sizes)]
    return shardwise.load(folder, mesh=",".join(map(str, sizes)), devices=devices, stacked=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def pseudo(model: shardwise.Model, texts: list[np.ndarray], batch: int = 5) -> masked.Perplexity:
    return masked.measure(
        model.plan, model.mesh, model.params, texts, frame=FRAME, length=LENGTH, batch=batch,
        compute_dtype="float32", param_dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_each_token_is_hidden_by_itself_and_scored_once(folder: Path, mesh: str) -> None:
    model = load(folder, mesh)
    texts = [*tokenize_texts(model.tokenizer, SENTENCES[:4]), np.zeros(0, np.int32)]
    one, nll, right, windows = load(folder), [], 0, 0
    for text in texts:
        room = LENGTH - 2
        pieces = np.array_split(text, -(-len(text) // room)) if len(text) else []
        windows += len(pieces)
        for piece in pieces:
            whole = np.array([BOS, *piece, EOS])
            for place in range(1, len(whole) - 1):
                hidden = np.where(np.arange(len(whole)) == place, MASK_ID, whole)
                scores = log_softmax(one.logits(hidden[None])[0, place])
                nll.append(-scores[whole[place]])
                right += int(scores.argmax() == whole[place])
    found = pseudo(model, texts)
    assert found.nll == pytest.approx(np.mean(nll), abs=TOLERANCE)
    assert (found.tokens, found.windows) == (sum(map(len, texts)), windows)
    assert found.accuracy == right / found.tokens
    assert str(found).startswith(f"nll {found.nll:.4f}  pseudo-perplexity {math.exp(found.nll):.3f}  on ")


def test_the_batch_does_not_change_it(folder: Path) -> None:
    model = load(folder)
    texts = tokenize_texts(model.tokenizer, SENTENCES[:3])
    assert pseudo(model, texts, 1).nll == pytest.approx(pseudo(model, texts, 64).nll, abs=TOLERANCE)


@pytest.mark.parametrize("mesh", MESHES)
def test_accuracy_is_the_part_of_texts_whose_label_is_likeliest(classifier: Path, mesh: str) -> None:
    model = load(classifier, mesh)
    names = model.config.labels
    texts = [LabelledText(text, None, i % 3) for i, text in enumerate(SENTENCES)]
    encoded = encode(model.tokenizer, texts, names, length=64, vocab_size=model.config.vocab_size)
    found = labels.measure(
        model.plan, model.mesh, model.params, encoded, length=64, batch=4, compute_dtype="float32",
        param_dtype="float32",
    )  # fmt: skip
    one = load(classifier)
    scores = [
        log_softmax(one.logits(np.array([model.tokenizer(text)["input_ids"]]))[0]) for text in SENTENCES
    ]
    nll = np.mean([-s[i % 3] for i, s in enumerate(scores)])
    right = np.mean([s.argmax() == i % 3 for i, s in enumerate(scores)])
    assert (found.accuracy, found.texts) == (right, len(SENTENCES))
    assert found.nll == pytest.approx(nll, abs=TOLERANCE)
    assert 0 < right < 1
    assert found.standard_error == pytest.approx(
        np.std([s.argmax() == i % 3 for i, s in enumerate(scores)], ddof=1) / len(SENTENCES) ** 0.5
    )


def test_the_command_says_what_it_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", SENTENCES[:2])
    command = ["eval", str(folder), "--perplexity", str(data), "--mesh", "1,8,1", "--length", str(LENGTH)]
    assert main(command) == 0
    out = capsys.readouterr().out
    model = load(folder)
    found = pseudo(model, tokenize_texts(model.tokenizer, SENTENCES[:2]))
    assert f"{found.tokens} tokens, each hidden once by itself" in out
    assert f"{data}: {found}  ({found.windows} windows of up to {LENGTH}, " in out
    assert f"first choice right: {found.accuracy:.1%}" in out


def test_the_command_classifies(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "a.jsonl"
    rows = [{"s": text, "y": ("no", "yes", "perhaps")[i % 3]} for i, text in enumerate(SENTENCES)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", str(classifier), "--classify", str(data), "--mesh", "1,8,1", "--length", "12"]
    assert main([*command, "--text-field", "s", "--label-field", "y"]) == 0
    out = capsys.readouterr().out
    assert "labels: 0=no: 5, 1=yes: 4, 2=perhaps: 4" in out
    assert "of 13 texts are longer than 12 tokens: their ends are cut" in out
    assert f"{data}: accuracy 0." in out


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("mlm", ("--classify", "{data}"), "is no classifier; make it one with `shardwise finetune"),
        ("classifier", ("--perplexity", "{data}"), "is a classifier; measure it with --classify"),
        ("base", ("--perplexity", "{data}"), "is the base model alone"),
        ("base", ("--classify", "{data}"), "is no classifier"),
        ("mlm", ("--perplexity", "{data}", "--context", "3"), "--context has no effect on roberta"),
        ("mlm", ("--perplexity", "{data}", "--length", "2"), "2 tokens stand around each text; raise it"),
        ("llama", ("--classify", "{data}"), "is no classifier"),
        ("mlm", (), "what to measure? Give --perplexity FILE, or --classify"),
        ("mlm", ("--perplexity", "{data}", "--classify", "{data}"), "give one"),
        ("mlm", ("--perplexity", "{data}", "--label-field", "y"), "has no effect without --classify"),
        ("classifier", ("--classify", "{data}", "--context", "2"), "--context has no effect with --classify"),
        (
            "classifier",
            ("--classify", "{data}"),
            "text 1 has the label 'blue', which the model's labels do not",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    folder: Path, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str,
    flags: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    models = {"mlm": folder, "classifier": classifier, "base": tmp_path / "base", "llama": tmp_path / "llama"}
    if model == "base":
        write_roberta(models["base"], "Model")
    if model == "llama":
        write_llama(models["llama"])
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "a", "label": "blue"}\n')
    assert main(["eval", str(models[model]), *(flag.format(data=data) for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
