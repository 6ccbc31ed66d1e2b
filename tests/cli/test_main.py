"""The command line as a person meets it: exit codes, one line for a mistake, a start without big imports."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cli import main as main_module
from shardwise.cli.eval import EvalOptions
from shardwise.cli.main import VERBS, main
from shardwise.cli.startup import start
from shardwise.errors import MeshError

SOURCE = str(Path(main_module.__file__).parents[2])


def run(*argv: str, **keywords: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


EVAL = ["eval", "m", "--perplexity", __file__]


@pytest.fixture
def fake_eval(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[object], int]], None]:
    """Function: puts `work` in the place of what `shardwise eval` does."""

    def replace(work: Callable[[object], int]) -> None:
        module = types.ModuleType("shardwise.evaluation.command")
        module.run = work  # type: ignore[attr-defined]
        import shardwise.evaluation

        monkeypatch.setitem(sys.modules, "shardwise.evaluation.command", module)
        monkeypatch.setattr(shardwise.evaluation, "command", module, raising=False)

    return replace


def test_the_verbs_exit_code_is_the_commands(fake_eval, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    fake_eval(lambda options: seen.append(options) or 7)
    assert main([*EVAL, "--mesh", "1,1,2"]) == 7
    assert (seen[0].model, seen[0].mesh) == ("m", "1,1,2")


def test_devices_are_chosen_before_the_verb_works(fake_eval, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr("shardwise.runtime.memory.tune_malloc", lambda: order.append("malloc"))
    monkeypatch.setattr("shardwise.runtime.devices.configure_devices", lambda spec: order.append(spec))
    monkeypatch.setattr("shardwise.runtime.distributed.initialize", lambda *given: order.append(given))
    monkeypatch.setattr("shardwise.runtime.compile_cache.enable_compile_cache", lambda: order.append("cache"))
    fake_eval(lambda options: order.append("work") or 0)
    assert main([*EVAL, "--mesh", "1,1,8", "--devices", "cpu:8"]) == 0
    assert order == ["malloc", "cpu:8", (None, None, None), "cache", "work"]
    order.clear()
    start(EvalOptions(model="m", perplexity="f", coordinator="h:1", num_processes=2, process_id=1))
    assert order == ["malloc", None, ("h:1", 2, 1), "cache"]


def test_an_unused_accelerator_is_warned_of_unless_devices_were_named(
    fake_eval, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_eval(lambda options: 0)
    monkeypatch.setattr("shardwise.runtime.devices.accelerator_hint", lambda: "a GPU is idle")
    monkeypatch.setattr("shardwise.runtime.compile_cache.enable_compile_cache", lambda: None)
    monkeypatch.setattr("shardwise.runtime.memory.tune_malloc", lambda: None)
    main(EVAL)
    assert capsys.readouterr().err == "warning: a GPU is idle\n"
    main([*EVAL, "--mesh", "1,1,8", "--devices", "cpu:8"])
    assert capsys.readouterr().err == ""


def test_a_users_mistake_is_one_line_and_exit_code_2(fake_eval, capsys: pytest.CaptureFixture[str]) -> None:
    def work(options: object) -> int:
        raise MeshError("3 devices do not make 2 rows; use --mesh 1,3,1")

    fake_eval(work)
    assert main(EVAL) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: 3 devices do not make 2 rows; use --mesh 1,3,1\n"
    assert main([*EVAL, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback(fake_eval) -> None:
    def work(options: object) -> int:
        raise AssertionError("broken invariant")

    fake_eval(work)
    with pytest.raises(AssertionError, match="broken invariant"):
        main(EVAL)


def test_an_interrupt_is_exit_code_130(fake_eval, capsys: pytest.CaptureFixture[str]) -> None:
    def work(options: object) -> int:
        raise KeyboardInterrupt

    fake_eval(work)
    assert main(EVAL) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetun"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'finetun'; did you mean 'finetune'?\n"
    assert main(["xyzzy"]) == 2
    assert "known: finetune, pretrain" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb}" in text for verb in VERBS)


def test_a_mistake_in_the_options_is_found_before_anything_big_is_imported() -> None:
    code = """
import sys
from shardwise.cli.main import main
code = main(["finetune", "m", "--data", "x.txt", "--learning-rat", "1"])
print(code, [name for name in ("jax", "transformers", "tokamax", "flax", "numpy") if name in sys.modules])
"""
    done = run("-c", code)
    assert done.stdout == "2 []\n"
    assert "Traceback" not in done.stderr
    assert "did you mean --learning-rate" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_help_imports_nothing_big(verb: str) -> None:
    code = f"""
import sys
from shardwise.cli.main import main
try:
    main(["{verb}", "--help"])
except SystemExit as end:
    big = [name for name in ("jax", "transformers", "tokamax", "flax", "numpy") if name in sys.modules]
    print("END", end.code, big)
"""
    done = run("-c", code)
    assert done.stdout.splitlines()[0].startswith(f"usage: shardwise {verb} "), done.stderr
    assert done.stdout.splitlines()[-1] == "END 0 []"


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break otherwise on Windows")
def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    worker = subprocess.run(
        [sys.executable, "-m", "shardwise.cli.main"],
        env=os.environ | {"PYTHONPATH": SOURCE},
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert worker.returncode == 141
    assert worker.stderr == ""
