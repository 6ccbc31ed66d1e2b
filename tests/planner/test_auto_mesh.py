"""`--mesh auto`: the planner's choice for the devices that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tiny import write_jsonl, write_llama, write_roberta

from shardwise.cli.main import main
from shardwise.planner import search
from shardwise.planner.search import Ranking


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("auto") / "model")


def finetune(model: Path, tmp_path: Path, batch: int) -> int:
    data = write_jsonl(tmp_path / "a.jsonl")
    return main(
        ["finetune", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--steps", "1",
         "--length", "16", "--global-batch", str(batch), "--mesh", "auto"]
    )  # fmt: skip


def test_training_takes_the_planners_mesh_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(model, tmp_path, 8) == 0
    out = capsys.readouterr().out
    chosen = next(line for line in out.splitlines() if line.startswith("mesh auto: "))
    assert "predicted the fastest of" in chosen and "8 simulated devices" in chosen
    assert f"mesh {chosen.split()[2].rstrip(',')}" in out.splitlines()


def test_a_batch_that_does_not_divide_leaves_meshes_that_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(model, tmp_path, 1) == 0
    assert "mesh auto: dp:1,fsdp:1,tp:8" in capsys.readouterr().out


def test_the_planner_plans_with_the_rules_and_the_head_layout_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked: list[Ranking] = []
    original = search.search

    def spy(*given: Any) -> Ranking:
        ranked.append(original(*given))
        return ranked[-1]

    monkeypatch.setattr(search, "search", spy)
    data = write_jsonl(tmp_path / "a.jsonl")
    command = ["eval", str(model), "--perplexity", str(data), "--length", "16", "--batch", "8"]
    assert main([*command, "--mesh", "auto", "--rules", "tp", "--head-layout", "hidden"]) == 0
    (ranking,) = ranked
    plans = [c.plan for c in (*ranking.fitting, *ranking.refused)]
    assert plans and {plan.rules.name for plan in plans} == {"tp"}
    assert {plan.head_layout for plan in plans if plan.mesh.tp > 1} == {"hidden"}


def test_evaluation_and_generation_take_it_too(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl")
    assert main(["eval", str(model), "--perplexity", str(data), "--length", "16", "--mesh", "auto"]) == 0
    assert main(["generate", str(model), "hello", "--max-new-tokens", "2", "--mesh", "auto"]) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("mesh auto: dp:") == 2


def test_an_encoder_has_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", ["Still waters run deep."])
    model = str(write_roberta(tmp_path / "roberta"))
    assert main(["eval", model, "--perplexity", str(data), "--length", "16", "--mesh", "auto"]) == 0
    assert "mesh auto: dp:" in capsys.readouterr().out


def test_explain_sends_it_to_plan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(model), "--mesh", "auto"]) == 2
    assert "use `shardwise plan`" in capsys.readouterr().err
