"""A person's mistakes in a training command: one readable line, before weights are read or steps compiled.

Not here: resuming with other options (test_jobs.py), parsing of flags (tests/cli).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny import SENTENCES, VOCAB, write_jsonl, write_llama, write_tokenizer

from shardwise.steps.build import Step
from shardwise.training import jobs, objectives

from .conftest import Site

Refused = Callable[..., str]


@pytest.fixture
def refused(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Function: runs finetune, checks that it ends with one line before any work, and returns that line."""

    def work(*_: Any, **__: Any) -> None:
        pytest.fail("reads weights or computes before the mistake is found")

    monkeypatch.setattr(objectives, "load_params", work)
    monkeypatch.setattr(Step, "__call__", work)

    def run(*flags: str, **changes: Any) -> str:
        before = sorted(site.folder.rglob("*"))
        assert site.finetune("run", *flags, **changes) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1, error
        assert sorted(site.folder.rglob("*")) == before
        return error

    return run


def test_an_existing_out_is_refused_and_not_touched(refused: Refused, site: Site) -> None:
    out = site.folder / "run"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    assert "--out: " in (error := refused())
    assert "exists already" in error
    assert (out / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("option", ["out", "metrics", "checkpoint_dir"])
def test_a_place_that_cannot_be_written_is_found_before_training(
    refused: Refused, site: Site, option: str
) -> None:
    file = site.folder / "file"
    file.write_text("")
    error = refused(**{option: file / "deeper" / "still"})
    assert f"--{option.replace('_', '-')}: " in error
    assert f"{file} is a file" in error


def test_metrics_in_the_place_of_a_folder_are_refused(refused: Refused, site: Site) -> None:
    assert "--metrics: " in refused(metrics=site.folder)


def test_a_length_above_the_models_context_is_refused(refused: Refused) -> None:
    assert "--length is 65, more than the model's context of 64" in refused(length=65)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"global_batch": 6},
            "a global batch of 6 cannot be split over dp×fsdp = 4; it must be a multiple, such as 4 or 8",
        ),
        ({"global_batch": 2}, "such as 4"),
        ({"global_batch": 8, "grad_accum_steps": 4}, "dp×fsdp = 4 times grad_accum_steps = 4"),
    ],
)
def test_a_batch_that_the_mesh_does_not_divide_is_refused(
    refused: Refused, changes: dict[str, int], message: str
) -> None:
    assert message in refused(**changes)


def test_a_mesh_of_another_number_of_devices_is_refused(refused: Refused) -> None:
    error = refused(mesh="1,3,1")
    assert "mesh dp:1,fsdp:3,tp:1 needs 3 devices, but there are 8 cpu devices" in error


def test_a_broken_line_is_named_by_file_and_line(refused: Refused, site: Site) -> None:
    data = site.folder / "broken.jsonl"
    data.write_text('{"text": "good"}\n\n{"text": "cut\n{"text": "good"}\n')
    assert f"{data}:3: not valid JSON" in refused(data=data)


def test_with_skip_a_broken_line_is_left_out_and_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": text}) for text in SENTENCES]
    data = site.folder / "broken.jsonl"
    data.write_text("\n".join([*lines[:6], '{"text": "cut', *lines[6:], "7", ""]))
    # The mistake after it ends the command before it trains.
    assert site.finetune("run", data=data, on_bad_line="skip", global_batch=2) == 2
    out = capsys.readouterr().out
    assert f"2 lines skipped: {data}:7, {data}:15" in out
    assert "data: 13 documents, 477 tokens" in out
    assert "fewer than two tokens" not in out


def test_documents_that_give_no_loss_token_are_counted(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(site.folder / "short.jsonl", [*SENTENCES, "", ""])
    model = write_llama(site.folder / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))  # no BOS
    # The mistake after it ends the command before it trains.
    assert site.finetune("run", data=data, model=model, global_batch=2) == 2
    assert "warning: 2 of the documents have fewer than two tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "the file is empty or only white space"),
        ("blank.jsonl", "\n\n", "the file holds no line of JSON"),
        ("field.jsonl", '{"txt": "a"}\n', "did you mean --text-field txt"),
        ("data.parquet", "PAR1", "convert it to .jsonl"),
    ],
)
def test_data_without_text_is_refused(
    refused: Refused, site: Site, name: str, content: str, message: str
) -> None:
    path = site.folder / name
    path.write_text(content)
    assert message in refused(data=path)


def test_held_out_data_without_a_token_are_refused(refused: Refused, site: Site) -> None:
    path = site.folder / "empty.jsonl"
    path.write_text('{"text": ""}\n')
    assert f"--eval-data: {path} has no token" in refused(eval_data=path)


def test_a_typo_in_a_path_is_not_taken_for_the_name_of_a_model_on_the_hub(
    refused: Refused, site: Site
) -> None:
    error = refused(model=site.model.with_name("modle"))
    assert f"folder not found: {site.model.with_name('modle')}" in error
    assert f"--data: file not found: {site.folder / 'dta.jsonl'}" in refused(data=site.folder / "dta.jsonl")


def test_a_missing_tokenizer_is_named_with_what_to_copy(refused: Refused, site: Site) -> None:
    model = write_llama(site.folder / "model", tokenizer=False)
    assert f"{model} holds no tokenizer; copy tokenizer.json" in refused(model=model)


def test_a_tokenizer_larger_than_the_embedding_is_refused(refused: Refused, site: Site) -> None:
    model = write_llama(site.folder / "model", tokenizer=False)
    write_tokenizer(model, extra_tokens=["<|extra|>"])
    error = refused(model=model)
    assert f"needs a vocabulary of {VOCAB + 1}, but the model's embedding table has {VOCAB} rows" in error


def test_a_model_without_weights_is_sent_to_pretrain(refused: Refused, site: Site) -> None:
    assert "no weights to fine-tune" in (error := refused(model=site.model / "config.json"))
    assert "pretrain" in error


def test_an_override_that_matches_nothing_is_refused(refused: Refused) -> None:
    assert "matches no parameter" in refused("--override", "q_porj=(None, 'tp')")


def test_a_non_finite_loss_stops_the_run_and_is_never_saved(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_llama(site.folder / "model")
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    checkpoints = site.folder / "c"
    assert site.finetune("run", model=model, log_every=5, checkpoint_dir=checkpoints, checkpoint_every=2) == 2
    error = capsys.readouterr().err
    assert "error: step 2: loss is nan, gradient norm nan; lower --learning-rate" in error
    assert not checkpoints.exists()
    assert not (site.folder / "run").exists()


def test_an_out_that_came_to_exist_meanwhile_is_kept_and_the_training_state_too(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = site.folder / "run"
    loop = jobs._loop

    def train(*args: Any) -> Any:
        state = loop(*args)
        out.mkdir()
        return state

    monkeypatch.setattr(jobs, "_loop", train)
    checkpoints = site.folder / "c"
    assert site.finetune("run", checkpoint_dir=checkpoints) == 2
    assert f"--out {out} has come to exist meanwhile" in capsys.readouterr().err
    assert list(out.iterdir()) == []
    monkeypatch.undo()
    assert site.finetune("second", "--resume", checkpoint_dir=checkpoints) == 0
    assert (site.folder / "second" / "model.safetensors").exists()


def test_several_files_and_folders_are_read_in_order(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site.folder / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("The second.")
    write_jsonl(folder / "a.jsonl", SENTENCES[:2])
    assert site.finetune("run", "--data", str(site.data), data=folder, global_batch=2) == 2
    assert "data: 16 documents" in capsys.readouterr().out


def test_a_wrong_model_type_is_refused(refused: Refused, site: Site) -> None:
    model = write_llama(site.folder / "model", model_type="mamba", state_size=16)
    assert "mamba" in refused(model=model)


def test_a_missing_tensor_is_named(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_llama(site.folder / "model")
    file = Path(model / "model.safetensors")
    weights = load_file(file)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert site.finetune("run", model=model) == 2
    assert "1 missing: model.layers.0.mlp.up_proj.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": "run"}, "--metrics"),
        ({"metrics": "run/metrics.jsonl"}, "--metrics"),
        ({"checkpoint_dir": "run"}, "--checkpoint-dir"),
        ({"checkpoint_dir": "run/states/here"}, "--checkpoint-dir"),
    ],
)
def test_outputs_inside_the_place_of_the_model_are_refused(
    refused: Refused, site: Site, changes: dict[str, str], words: str
) -> None:
    error = refused(**{name: site.folder / place for name, place in changes.items()})
    assert f"{words} {site.folder}" in error
    assert f"lies in --out {site.folder / 'run'}, which must not exist" in error


def test_a_model_below_the_metrics_file_is_refused(refused: Refused, site: Site) -> None:
    error = refused(metrics=site.folder / "m", out=site.folder / "m" / "model")
    assert f"lies below --metrics {site.folder / 'm'}, a file" in error


def test_a_warm_up_longer_than_the_epochs_is_refused(refused: Refused) -> None:
    error = refused(steps=None, epochs=1, warmup_steps=100)
    assert "--warmup-steps is 100, more than the 4 steps of --epochs 1" in error


def test_more_steps_than_can_be_counted_are_refused(refused: Refused) -> None:
    assert "steps are too many" in refused(steps=None, epochs=2**31 - 1)


def test_options_for_json_lines_without_any_are_refused(refused: Refused, site: Site) -> None:
    data = site.folder / "plain.txt"
    data.write_text("It rains. " * 30)
    assert "--text-field has no effect without JSON lines" in refused(data=data, text_field="body")
    assert f"{data} has none" in refused(data=data, on_bad_line="skip")


def test_parameters_that_the_last_update_broke_are_not_kept(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = site.folder / "c"
    options = {"steps": 1, "warmup_steps": 0, "learning_rate": 3e38, "weight_decay": 3e38}
    assert site.finetune("run", checkpoint_dir=checkpoints, **options) == 2
    error = capsys.readouterr().err
    assert "error: step 1 made parameters that are not finite" in error
    assert not (site.folder / "run").exists()
    assert not checkpoints.exists()


def test_without_training_state_a_model_goes_beside_an_out_that_came_to_exist(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = jobs._loop

    def train(*args: Any) -> Any:
        state = loop(*args)
        (site.folder / "run").mkdir()
        (site.folder / "run-2").mkdir()
        return state

    monkeypatch.setattr(jobs, "_loop", train)
    assert site.finetune("run") == 0
    output = capsys.readouterr().out
    assert f"the model goes to {site.folder / 'run-3'} instead" in output
    assert f"wrote {site.folder / 'run-3'}" in output
    assert (site.folder / "run-3" / "model.safetensors").exists()
    assert list((site.folder / "run").iterdir()) == []


def test_metrics_are_written_beside_the_model_without_being_asked_for(site: Site) -> None:
    assert site.finetune("run", metrics=None, steps=4) == 0
    records = [json.loads(line) for line in (site.folder / "run.metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
