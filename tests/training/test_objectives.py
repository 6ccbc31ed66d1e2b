"""`shardwise finetune --objective mlm|classify` and `pretrain --objective mlm` from start to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny import SENTENCES, read_metrics, write_jsonl, write_llama, write_roberta

import shardwise
from shardwise.cli.main import main
from shardwise.training import jobs

COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without a head."""
    return write_roberta(tmp_path_factory.mktemp("models") / "base", "Model")


@pytest.fixture(scope="module")
def mlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_roberta(tmp_path_factory.mktemp("models") / "mlm")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "texts.jsonl")


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Texts whose label is a word of theirs."""
    rows = [
        {"text": f"{colour}: {SENTENCES[i % 5][:12]}", "label": colour}
        for i in range(8)
        for colour in COLOURS
    ]
    path = tmp_path / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finetune(model: Path, data: Path, out: Path, objective: str, *flags: str, **changes: Any) -> int:
    options = {"length": 48, "global-batch": 8, "steps": 4, "learning-rate": 1e-3, "mesh": "1,4,2"} | {
        name.replace("_", "-"): value for name, value in changes.items()
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return main(
        ["finetune", str(model), "--data", str(data), "--out", str(out), "--objective", objective, *given,
         *flags]
    )  # fmt: skip


def records(out: Path, key: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(Path(f"{out}.metrics.jsonl")) if key in record]


def test_a_classifier_is_learned_and_written(
    mlm: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = finetune(
        mlm, labelled, out, "classify", steps=60, learning_rate=1e-2, eval_data=labelled, log_every=10
    )
    said = capsys.readouterr().out
    assert code == 0
    assert "new head, drawn with --seed 0: classifier/dense/bias, classifier/dense/kernel" in said
    assert "data: 24 texts; labels 0=blue: 8, 1=green: 8, 2=red: 8" in said
    held = records(out, "eval_accuracy")
    assert held[0]["eval_accuracy"] < 0.9
    assert held[-1] == held[-1] | {"eval_accuracy": 1.0, "eval_texts": 24}
    written = json.loads((out / "config.json").read_text())
    assert written["architectures"] == ["RobertaForSequenceClassification"]
    assert written["id2label"] == {"0": "blue", "1": "green", "2": "red"}
    assert not any(name.startswith("lm_head") for name in load_file(out / "model.safetensors"))
    assert main(["eval", str(out), "--classify", str(labelled), "--mesh", "1,8,1", "--length", "48"]) == 0
    assert "accuracy 1.0000 ± 0.0000" in capsys.readouterr().out


def test_a_classifier_keeps_its_labels_when_trained_further(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"0": "red", "1": "green", "2": "blue", "3": "black"}
    model = write_roberta(tmp_path / "model", "ForSequenceClassification", id2label=names)
    out = tmp_path / "out"
    assert finetune(model, labelled, out, "classify") == 0
    said = capsys.readouterr().out
    assert "new head" not in said
    assert "labels 0=red: 8, 1=green: 8, 2=blue: 8, 3=black: 0" in said
    assert json.loads((out / "config.json").read_text())["id2label"] == names


def test_a_head_for_hidden_tokens_is_learned_on_the_base_model(
    base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = finetune(
        base, texts, out, "mlm", steps=60, learning_rate=1e-2, eval_data=texts, mask_probability=0.3,
        log_every=10,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 0
    assert "new head, drawn with --seed 0: head_transform/dense/bias, " in said
    held = records(out, "eval_nll")
    assert held[-1]["eval_nll"] < 0.7 * held[0]["eval_nll"]
    assert held[-1]["eval_tokens"] == held[0]["eval_tokens"] > 20  # the same places each time
    assert json.loads((out / "config.json").read_text())["architectures"] == ["RobertaForMaskedLM"]
    assert main(["eval", str(out), "--perplexity", str(texts), "--mesh", "1,8,1", "--length", "32"]) == 0
    assert "pseudo-perplexity" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["mlm", "classify"])
def test_loss_does_not_depend_on_the_mesh(
    mlm: Path, texts: Path, labelled: Path, tmp_path: Path, objective: str
) -> None:
    data = texts if objective == "mlm" else labelled
    losses = []
    for mesh, accum in (("1,4,2", 1), ("2,2,2", 2), ("1,1,8", 4)):
        out = tmp_path / mesh.replace(",", "-")
        assert finetune(mlm, data, out, objective, mesh=mesh, grad_accum_steps=accum) == 0
        losses.append([record["loss"] for record in records(out, "loss")])
    # Losses of a few nats in float32, summed in other orders, after up to three updates.
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-4)


@pytest.mark.parametrize("objective", ["mlm", "classify"])
def test_a_run_that_stopped_goes_on_to_the_same_weights(
    mlm: Path, texts: Path, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    data = texts if objective == "mlm" else labelled
    assert finetune(mlm, data, tmp_path / "straight", objective, steps=6) == 0
    report = jobs.Reporter.step

    def reported(self: jobs.Reporter, number: int, *args: Any) -> None:
        report(self, number, *args)
        if number == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs.Reporter, "step", reported)
    options = {"steps": 6, "checkpoint_dir": tmp_path / "ck", "checkpoint_every": 2}
    assert finetune(mlm, data, tmp_path / "resumed", objective, **options) == 130
    monkeypatch.undo()
    assert finetune(mlm, data, tmp_path / "resumed", objective, "--resume", **options) == 0
    straight, resumed = (load_file(tmp_path / n / "model.safetensors") for n in ("straight", "resumed"))
    for name, array in straight.items():
        np.testing.assert_array_equal(array, resumed[name], err_msg=name)


@pytest.mark.slow
def test_an_encoder_is_pretrained_from_nothing(mlm: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = main(
        ["pretrain", str(mlm / "config.json"), "--tokenizer", str(mlm), "--data", str(texts), "--out",
         str(out), "--objective", "mlm", "--steps", "3", "--length", "32", "--global-batch", "8", "--mesh",
         "1,8,1"]
    )  # fmt: skip
    assert code == 0
    model = shardwise.load(out, mesh="1,1,1", devices=jax.devices()[:1])
    assert np.isfinite(model.logits(np.arange(8)[None] + 40)).all()


def test_dropout_that_is_not_applied_is_said(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_llama(tmp_path / "model", attention_dropout=0.1, hidden_dropout=0.0)
    assert finetune(model, texts, tmp_path / "out", "causal", length=16, steps=1) == 0
    said = capsys.readouterr().out
    assert "note: config.json asks for attention_dropout 0.1; training here applies none of it" in said


@pytest.mark.parametrize(
    ("model", "objective", "flags", "message"),
    [
        ("mlm", "causal", (), "has no next token to predict; use --objective mlm or --objective classify"),
        ("llama", "mlm", (), "llama models read from left to right"),
        ("llama", "classify", (), "llama models have no classifier here; those that do: roberta"),
        ("mlm", "mlm", ("--label-field", "x"), "--label-field has no effect with --objective mlm"),
        ("mlm", "classify", ("--mask-probability", "0.2"), "has no effect with --objective classify"),
        ("mlm", "mlm", ("--mask-probability", "0"), "--mask-probability is 0.0; it must be more than 0"),
        ("no mask", "mlm", (), "the tokenizer has no mask token"),
        ("mlm", "classify", ("--label-field", "colour"), "no field 'colour'"),
    ],
)
def test_what_cannot_be_learned_is_refused_in_one_line(
    mlm: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str,
    objective: str, flags: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    folder = mlm
    if model == "llama":
        folder = write_llama(tmp_path / "llama")
    if model == "no mask":
        folder = write_roberta(tmp_path / "no mask")
        settings = folder / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace('"mask_token": "<mask>"', '"x": 0'))
    assert finetune(folder, labelled, tmp_path / "out", objective, *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
