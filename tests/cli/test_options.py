"""Values out of range, contradictions, options without effect and absent files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.convert import ConvertOptions
from shardwise.cli.eval import EvalOptions
from shardwise.cli.finetune import FinetuneOptions
from shardwise.cli.generate import GenerateOptions
from shardwise.cli.info import InfoOptions
from shardwise.cli.options import Options
from shardwise.cli.pretrain import PretrainOptions
from shardwise.errors import CheckpointError, ConfigError, DataError


def finetune(**given: Any) -> FinetuneOptions:
    base: dict[str, Any] = {"model": "m", "data": ("a.txt",), "out": "o"}
    return FinetuneOptions(**(base | given))


def generate(**given: Any) -> GenerateOptions:
    return GenerateOptions(**({"model": "m", "prompt": ("p",)} | given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0), ("steps", 2**31), ("epochs", 0), ("epochs", 2**31), ("learning_rate", 1e39),
        ("weight_decay", 1e300), ("max_grad_norm", 1e39), ("z_loss", 1e39), ("warmup_steps", 2**31),
        ("length", 1), ("global_batch", 0), ("grad_accum_steps", 0),
        ("learning_rate", 0.0), ("learning_rate", float("inf")), ("learning_rate", float("nan")),
        ("warmup_steps", -1), ("lr_end_ratio", 1.5),
        ("weight_decay", -0.1), ("beta1", 1.0), ("beta2", -0.1), ("adam_eps", 0.0),
        ("max_grad_norm", -1.0), ("z_loss", -1.0), ("seed", -1), ("seed", 2**32), ("checkpoint_every", 0),
        ("keep_last", 0), ("eval_every", 0), ("log_every", 0), ("data", ()), ("num_processes", 0),
        ("process_id", -1),
    ],
)  # fmt: skip
def test_a_training_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        finetune(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
    ],
)
def test_a_generation_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        generate(**{name: value})


def test_no_prompt_and_too_much_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="PROMPT"):
        generate(prompt=())
    with pytest.raises(ConfigError, match="must be less than --length 8"):
        EvalOptions(model="m", perplexity="f", length=8, context=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (finetune(), "--steps N or --epochs N"),
        (finetune(steps=1, epochs=1), "--steps 1 and --epochs 1 contradict"),
        (finetune(steps=5, warmup_steps=6), "--warmup-steps is 6"),
        (finetune(steps=1, global_batch=6, grad_accum_steps=4), "does not divide --global-batch 6"),
        (finetune(steps=1, resume=True), "--resume has no effect without --checkpoint-dir"),
        (finetune(steps=1, checkpoint_every=5), "--checkpoint-every has no effect without --checkpoint-dir"),
        (finetune(steps=1, keep_last=5), "--keep-last has no effect without --checkpoint-dir"),
        (finetune(steps=1, eval_every=5), "--eval-every has no effect without --eval-data"),
        (finetune(steps=1, coordinator="h:1"), "--num-processes and --process-id missing"),
        (finetune(steps=1, coordinator="h:1", num_processes=2, process_id=2), "it must be 0 to 1"),
        (generate(top_p=0.5), "--top-p has no effect with --temperature 0"),
        (generate(min_p=0.5), "--min-p has no effect with --temperature 0"),
        (generate(top_k=5), "--top-k has no effect with --temperature 0"),
        (generate(seed=5), "--seed has no effect with --temperature 0"),
        (ConvertOptions(model="m", out="o", devices="cpu:8"), "--devices has no effect without --mesh"),
        (ConvertOptions(model="m", out="o", rules="tp"), "--rules has no effect without --mesh"),
        (
            ConvertOptions(model="m", out="o", head_layout="vocab"),
            "--head-layout has no effect without --mesh",
        ),
    ],
)
def test_a_combination_without_sense_is_refused_with_the_flags(options: Options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.validate()


@pytest.mark.parametrize(
    "options",
    [
        finetune(steps=5, warmup_steps=5),
        finetune(epochs=1, checkpoint_dir="c", checkpoint_every=5, resume=True, keep_last=1),
        finetune(steps=1, eval_data="e", eval_every=2, global_batch=8, grad_accum_steps=4),
        finetune(steps=1, coordinator="h:1", num_processes=2, process_id=1),
        PretrainOptions(model="m", tokenizer="t", data=("d",), out="o", steps=1),
        EvalOptions(model="m", perplexity="f", length=8, context=7),
        generate(temperature=0.5, top_p=0.5, min_p=0.1, top_k=3, seed=1),
        ConvertOptions(model="m", out="o", mesh="1,1,2", devices="cpu:2"),
        ConvertOptions(model="m", out="o", plan="p.json", devices="cpu:2"),
    ],
)
def test_a_sensible_combination_passes(options: Options) -> None:
    options.validate()


def test_an_option_given_with_its_default_value_still_counts_as_given() -> None:
    with pytest.raises(ConfigError, match="--top-p has no effect"):
        generate(top_p=1.0).validate(given={"top_p"})


def test_pretrain_has_its_own_defaults() -> None:
    options = PretrainOptions(model="m", tokenizer="t", data=("d",), out="o", steps=1)
    assert options.weight_decay == 0.1
    assert finetune().weight_decay == 0.0


def test_absent_input_and_present_output_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").touch()
    Path("dossier été").mkdir()
    finetune(data=("a.txt", "dossier été"), model="./dossier été").check_paths()
    with pytest.raises(DataError, match="--data: file not found: b.txt"):
        finetune(data=("a.txt", "b.txt")).check_paths()
    with pytest.raises(DataError, match="--eval-data: file or folder not found: e"):
        finetune(eval_data="e").check_paths()
    with pytest.raises(DataError, match="--perplexity: file not found: f.txt"):
        EvalOptions(model="m", perplexity="f.txt").check_paths()
    with pytest.raises(CheckpointError, match="--out: dossier été exists already"):
        finetune(out="dossier été").check_paths()
    with pytest.raises(CheckpointError, match="OUT: a.txt exists already"):
        ConvertOptions(model="m", out="a.txt").check_paths()
    with pytest.raises(CheckpointError, match="--save-plan: a+ cannot be made: File name too long"):
        EvalOptions(model="m", perplexity="a.txt", save_plan="a" * 300).check_paths()
    with pytest.raises(DataError, match="--plan: file or folder not found: a+$"):
        EvalOptions(model="m", perplexity="a.txt", plan="a" * 300).check_paths()
    with pytest.raises(CheckpointError, match="--resume: folder not found: c"):
        finetune(resume=True, checkpoint_dir="c").check_paths()


@pytest.mark.parametrize("model", ["./m", "/no/m", "m/", "a/b/c", "../m"])
def test_an_absent_model_that_is_a_path_is_not_taken_for_a_hub_id(model: str) -> None:
    with pytest.raises(CheckpointError, match=f"folder not found: {model}"):
        InfoOptions(model=model).check_paths()


@pytest.mark.parametrize("model", ["m.gguf", "a/config.json"])
def test_an_absent_model_file_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match=f"file not found: {model}"):
        InfoOptions(model=model).check_paths()


@pytest.mark.parametrize("model", ["gpt2", "org/name-1.5"])
def test_what_may_be_a_hub_id_passes(model: str) -> None:
    InfoOptions(model=model).check_paths()
