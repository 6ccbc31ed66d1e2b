"""`shardwise plan`: what it prints and writes, its exit codes, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.planner.make_chip_table import DOCS
from tests.planner.make_rules_tables import written

from shardwise.cli.main import main
from shardwise.cli.plan import count, seconds
from shardwise.errors import ConfigError


def test_the_table_says_machine_job_meshes_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-70b", "--on", "v5p-512", "--batch-tokens", "4M", "--seq", "4096"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "note: v5p-512 counts TensorCores: 256 chips, 4x8x8" in out
    assert "4,194,304 tokens a step = 1,024 sequences of 4,096" in out
    assert "dp:1,fsdp:256,tp:1 is the fastest of" in out
    assert "The best with tp, " in out
    assert "no torus axes make up tp 2, with 4x8x8 left" in out


def test_json_holds_every_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8b", "--on", "h100:8", "--batch", "32", "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)
    file = tmp_path / "plan.json"
    assert main(["plan", "llama3-8b", "--on", "h100:8", "--batch", "32", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == printed
    assert (
        len(printed["candidates"]) + len(printed["impossible"]) == 10
    )  # factorings of eight over three axes
    first = printed["candidates"][0]
    assert first["fits"] and first["memory"]["total"] <= 0.92 * printed["machine"]["hbm_bytes"]
    assert set(printed) == {"model", "machine", "request", "candidates", "impossible"}


def test_a_model_that_does_not_fit_names_the_machine_on_which_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "llama3-70b", "--on", "h100:8"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits this machine" in out
    assert "the smallest h100 machine for this job: h100, 2 nodes of 8 GPUs" in out


def test_the_fewest_devices(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3-8b", "--on", "h100", "--objective", "devices", "--batch", "64"]
    assert main(command) == 0
    assert "on h100, one node of 2 GPUs" in capsys.readouterr().out


def test_decoding_under_a_latency(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "plan",
        "llama3-8b",
        "--on",
        "v5e:4x4",
        "--task",
        "decode",
        "--batch",
        "64",
        "--context",
        "8192",
    ]
    assert main([*command, "--max-latency", "15ms"]) == 0
    assert "decode: 64 sequences, caches of 8,192 tokens" in capsys.readouterr().out
    assert main([*command, "--max-latency", "1ms"]) == 1
    told = capsys.readouterr().out
    assert "nothing is quick enough; the quickest is dp:" in told and "more than 1 ms" in told


def test_tokens_that_are_no_whole_sequences_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "smollm2-135m", "--on", "v5e:1x1", "--seq", "512", "--batch-tokens"]
    assert main([*command, "1000"]) == 0
    told = capsys.readouterr().out
    assert (
        "note: --batch-tokens 1000 is no multiple of 512; planned for 512 tokens, 1 whole sequences" in told
    )
    assert main([*command, "1K"]) == 0
    assert "note: --batch-tokens" not in capsys.readouterr().out


def test_an_unknown_model_with_nothing_near_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "foo", "--on", "v5e:1x1"]) == 2
    assert "no preset is called 'foo'; there are bloom-176b, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--on", "h10:8"), "unknown chip 'h10'; did you mean h100?"),
        (("--on", "v5e:5x5"), "v5e has no slice of 5x5; nearest: v5e:4x4"),
        (
            ("--on", "h100:8", "--batch-tokens", "4Q"),
            "--batch-tokens is '4Q'; give a number of tokens, such as 4M",
        ),
        (("--on", "h100:8", "--max-latency", "soon"), "--max-latency is 'soon'; give a time, such as 30ms"),
        (("--on", "h100:8", "--batch", "4", "--batch-tokens", "4M"), "say the same twice; give one"),
        (("--on", "h100:8", "--task", "decode", "--seq", "8"), "--seq has no effect with --task decode"),
        (("--on", "h100:8", "--context", "8"), "--context has no effect with --task train"),
        (
            ("--on", "h100:8", "--task", "decode", "--remat", "full"),
            "--remat has no effect with --task decode",
        ),
        (("--on", "h100:8", "--seq", "9000"), "--seq is 9000, more than the model's context of 8192"),
        (("--on", "h100:8", "--batch-tokens", "1K"), "is less than one sequence of 4096"),
        (("--on", "h100:8", "--measure", "1"), "--on h100:8 names others: leave --on out, or give cpu:N"),
        (("--on", "h100:8", "--chips", "nowhere.yaml"), "--chips: file not found: nowhere.yaml"),
        (("--on", "h100:8", "--json", "-", "--verify", "1"), "--json - prints JSON alone"),
        (("--on", "h100:8", "--json", "-", "--plot", "a.png"), "--json - prints JSON alone"),
    ],
)
def test_mistakes_are_one_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama3-8b", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_model_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-8", "--on", "h100:8"]) == 2
    assert "nearest: llama3-8b" in capsys.readouterr().err


def test_an_encoder_does_not_decode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "roberta-base", "--on", "h100:1", "--task", "decode"]) == 2
    assert "is an encoder and does not decode" in capsys.readouterr().err


def test_numbers_of_tokens_and_times() -> None:
    assert [count(text) for text in ("4M", "512k", "1000", "1.5K")] == [2**22, 2**19, 1000, 1536]
    assert [seconds(text) for text in ("30ms", "1.5s", "2")] == [0.03, 1.5, 2.0]
    with pytest.raises(ConfigError):
        count("0")


@pytest.mark.slow
def test_the_page_on_planning_holds_the_planners_own_tables() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.planner.make_rules_tables writes them anew"


@pytest.mark.slow
def test_the_best_meshes_are_compiled_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "plan",
        "smollm2-135m",
        "--on",
        "cpu:8",
        "--batch",
        "8",
        "--seq",
        "32",
        "--compute-dtype",
        "float32",
    ]
    assert main([*command, "--verify", "1", "--measure", "2"]) == 0
    out = capsys.readouterr().out
    assert "for 8 simulated devices, compiled" in out or "compiled by an earlier call" in out
    assert "memory: unverified" in out
    assert "bytes unexplained: 0.00%" in out
    assert "measured fastest: dp:" in out


def test_a_picture_needs_matplotlib_or_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.png"
    code = main(["plan", "llama3-8b", "--on", "h100:8", "--batch", "32", "--plot", str(file)])
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert code == 2
        assert "pip install 'shardwise[plot]'" in capsys.readouterr().err
        return
    assert code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
