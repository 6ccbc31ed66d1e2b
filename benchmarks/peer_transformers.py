"""Peer program: transformers + torch in eager mode on the CPU; prints one line of JSON.

    python benchmarks/peer_transformers.py --model FOLDER --what decode --dtype bfloat16 --batch 8

Runs in an interpreter of its own that has torch and transformers, so that neither side's libraries,
threads or allocator touch the other's. Not for torch.compile or serving; imports nothing of shardwise.

What is measured is wall-clock time per repeat, median and least; the first `--warmup` are left out.
- train: forward, backward and a torch.optim.AdamW step (defaults) over `batch` × `length` random tokens.
  Weights and moments are float32; `--dtype bfloat16` computes under torch.autocast.
- prefill: one forward over `batch` × `prompt` tokens that fills the cache; only the last row is projected.
- decode: greedy steps after such a prefill, in a plain loop over model.forward; `generate` beside it.
- load: from_pretrained in a fresh process, then one forward, since weights are mapped lazily.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Parse the options, run one measurement, print its JSON."""
    options = _options()
    started = time.perf_counter()
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import_s = time.perf_counter() - started
    rss_before = _peak_rss_mb()

    measure = {"train": _train, "decode": _decode, "prefill": _prefill, "load": _load}[options.what]
    result = {
        "peer": "transformers",
        "what": options.what,
        "dtype": options.dtype,
        "batch": options.batch,
        "threads": options.threads,
        "attention": options.attention,
        **measure(options),
        "import_s": round(import_s, 3),
        "rss_after_import_mb": rss_before,
        "peak_rss_mb": _peak_rss_mb(),
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="config.json and safetensors of the model"
    )
    parser.add_argument("--what", required=True, choices=["train", "decode", "prefill", "load"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, help="rows (default: 4 for train, 1 otherwise)")
    parser.add_argument("--length", type=int, default=256, help="train: tokens a row")
    parser.add_argument("--prompt", type=int, default=128, help="decode, prefill: prompt tokens a row")
    parser.add_argument("--new-tokens", type=int, default=32, help="decode: steps timed after the prefill")
    parser.add_argument("--steps", type=int, default=5, help="train, prefill: repeats that are timed")
    parser.add_argument("--warmup", type=int, default=2, help="repeats or decode steps left out first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--attention", default="sdpa", choices=["sdpa", "eager"], help="sdpa is transformers' default"
    )
    parser.add_argument("--no-generate", action="store_true", help="decode: leave generate() out")
    options = parser.parse_args()
    for name, least in (
        ("length", 2),
        ("prompt", 1),
        ("new_tokens", 1),
        ("steps", 1),
        ("warmup", 0),
        ("threads", 1),
    ):
        if getattr(options, name) < least:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least {least}"
            )
    if options.batch is None:
        options.batch = 4 if options.what == "train" else 1
    elif options.batch < 1:
        parser.error(f"--batch is {options.batch}; it must be at least 1")
    return options


def _train(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    model = _load_model(options, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = _random_tokens(model, options.batch, options.length)
    losses = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    seconds = _repeat(step, options.steps, options.warmup)
    count = options.batch * options.length
    return {
        "length": options.length,
        **_milliseconds("step", seconds),
        "tokens_per_s_median": round(count / statistics.median(seconds), 1),
        "tokens_per_s_max": round(count / min(seconds), 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


def _prefill(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import DynamicCache

    model = _load_model(options).eval()
    tokens = _random_tokens(model, options.batch, options.prompt)
    keyword = _cache_keyword(model)

    def once() -> None:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{keyword: cache})

    seconds = _repeat(once, options.steps, options.warmup)
    rate = options.batch * options.prompt / statistics.median(seconds)
    return {
        "prompt": options.prompt,
        **_milliseconds("prefill", seconds),
        "tokens_per_s_median": round(rate, 1),
    }


def _decode(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import DynamicCache

    model = _load_model(options).eval()
    tokens = _random_tokens(model, options.batch, options.prompt)
    keyword = _cache_keyword(model)
    seconds, chosen = [], []
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits
        for _ in range(options.warmup + options.new_tokens):
            started = time.perf_counter()
            last = logits[:, -1].argmax(-1, keepdim=True)
            logits = model(input_ids=last, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits
            seconds.append(time.perf_counter() - started)
            chosen.append(last)
    seconds = seconds[options.warmup :]
    result = {
        "prompt": options.prompt,
        "new_tokens": options.new_tokens,
        **_milliseconds("step", seconds),
        "tokens_per_s_median": round(options.batch / statistics.median(seconds), 1),
    }
    if not options.no_generate:
        per_step, generated = _generate(model, tokens, options.new_tokens)
        # False only if generate() was kept from a stop token that the plain loop chose.
        manual = torch.cat(chosen, 1)[:, : generated.shape[1]]
        same = bool((manual == generated[:, : manual.shape[1]]).all())
        result |= {"generate_ms_per_step": round(1e3 * per_step, 3), "generate_same_tokens": same}
    return result


def _generate(model: Any, tokens: Any, new_tokens: int) -> tuple[float, Any]:
    """Seconds per step of greedy generate(), best of three, prefill taken off; and the ids it appended."""
    import torch

    def timed(count: int) -> tuple[float, Any]:
        started = time.perf_counter()
        with torch.inference_mode():
            ids = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=count,  # random prompts may end early otherwise
                max_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - started, ids[:, tokens.shape[1] :]

    timed(2)
    prefill = min(timed(1)[0] for _ in range(3))
    whole, ids = min((timed(new_tokens + 1) for _ in range(3)), key=lambda result: result[0])
    return (whole - prefill) / new_tokens, ids


def _load(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    started = time.perf_counter()
    model = _load_model(options).eval()
    loaded = time.perf_counter() - started
    with torch.inference_mode():
        model(input_ids=_random_tokens(model, 1, 1), use_cache=False)
    return {"load_s": round(loaded, 3), "load_and_first_logits_s": round(time.perf_counter() - started, 3)}


def _load_model(options: argparse.Namespace, dtype: Any = None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = dtype or getattr(torch, options.dtype)
    return AutoModelForCausalLM.from_pretrained(
        options.model, dtype=dtype, attn_implementation=options.attention
    )


def _cache_keyword(model: Any) -> str:
    """What this release of transformers calls the cache argument of forward()."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _random_tokens(model: Any, rows: int, length: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (rows, length), generator=generator)


def _repeat(work: Callable[[], None], repeats: int, warmup: int) -> list[float]:
    """Seconds of each repeat after `warmup` untimed ones."""
    seconds = []
    for _ in range(warmup + repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds[warmup:]


def _milliseconds(name: str, seconds: list[float]) -> dict[str, float]:
    return {
        f"{name}_ms_median": round(1e3 * statistics.median(seconds), 3),
        f"{name}_ms_min": round(1e3 * min(seconds), 3),
    }


def _peak_rss_mb() -> float:
    """Peak resident memory of this process in MB (10⁶ bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e6, 1)


if __name__ == "__main__":
    main()
