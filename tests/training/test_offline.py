"""Local paths need no network: training, evaluation, export and generation connect to nothing (C603)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny import read_metrics, write_jsonl, write_llama

from shardwise.cli import main as main_module

# Runs command lines in a process where every way out is refused and noted.
WORKER = """
import json, socket, sys

attempts = []

def refuse(*args, **keywords):
    attempts.append(repr(args[-1] if args else keywords))
    raise ConnectionRefusedError("the network is refused in this test")

for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
for name in ("create_connection", "getaddrinfo", "gethostbyname"):
    setattr(socket, name, refuse)

from shardwise.cli.main import main

codes = []
for argv in json.loads(sys.argv[1]):
    print("=====", argv[0], flush=True)
    codes.append(main(argv))
print("RESULT", json.dumps({"codes": codes, "attempts": attempts, "hub": "huggingface_hub" in sys.modules}))
"""


def run_without_network(cwd: Path, *commands: list[str]) -> tuple[list[int], list[str], str]:
    """Exit codes, connection attempts and all output of command lines run in one process, in `cwd`."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))
    }
    environment |= {
        "PYTHONPATH": str(Path(main_module.__file__).parents[2]),
        "HF_HOME": str(cwd / "empty cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(commands)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.rsplit("RESULT ", 1)[1])
    return result["codes"], result["attempts"], done.stdout + done.stderr


@pytest.mark.slow
def test_training_evaluation_export_and_generation_make_no_connection_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "Dossier été 模型"
    write_llama(folder / "mon modèle")
    write_jsonl(folder / "Wörter.jsonl")
    device = ["--devices", "cpu:1", "--mesh", "1,1,1"]
    model, data = "Dossier été 模型/mon modèle", "./Dossier été 模型/Wörter.jsonl"  # relative
    tuned, exported = "Dossier été 模型/neu trainiert", str(folder / "export ✓")
    finetune = [
        "finetune", model, "--data", data, "--length", "16", "--global-batch", "2", "--steps", "2",
        "--out", tuned, "--checkpoint-dir", "Dossier été 模型/états",
        "--metrics", "Dossier été 模型/mesures.jsonl",
        "--eval-data", data,
    ]  # fmt: skip
    codes, attempts, output = run_without_network(
        tmp_path,
        [*finetune, *device],
        ["eval", tuned, "--perplexity", data, "--length", "16", "--batch", "2", *device],
        ["convert", tuned, exported, "--dtype", "bfloat16"],
        ["generate", exported, "Better late", "--max-new-tokens", "2", *device],
    )
    assert codes == [0, 0, 0, 0], output
    assert attempts == []
    assert [r["step"] for r in read_metrics(folder / "mesures.jsonl")] == [0, 1, 2, 2]
    assert (folder / "neu trainiert" / "tokenizer.json").exists()
    assert (folder / "états" / "step_00000002").is_dir()
    assert "[2 tokens;" in output
    assert not (tmp_path / "empty cache").exists()


def test_a_path_with_a_typo_is_not_found_without_asking_a_hub(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", tokenizer=False)
    (tmp_path / "text.txt").write_text("text")
    codes, attempts, output = run_without_network(
        tmp_path,
        ["generate", "./modle", "hi"],
        ["eval", "modle", "--perplexity", "text.txt"],
        ["eval", "org/modle", "--perplexity", "text.txt"],
        ["finetune", "model", "--data", "txet.txt", "--steps", "1", "--out", "o"],
        ["convert", str(tmp_path / "model.gguf"), "o"],
    )
    assert codes == [2] * 5
    assert attempts == []
    for line in (
        "error: folder not found: ./modle\n",
        "error: folder or file not found: modle (did you mean model?)",
        "error: folder or file not found: org/modle",
        "error: --data: file not found: txet.txt\n",
        f"error: file not found: {tmp_path / 'model.gguf'}\n",
    ):
        assert line in output
