"""`shardwise generate`: prompts in, text out, as it is made for a single prompt.

Not here: the generation itself (generate.py).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shardwise.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from shardwise.api import Model
    from shardwise.cli.generate import GenerateOptions


def run(options: GenerateOptions) -> int:
    """Generate; returns the exit code."""
    import sys

    from shardwise.api import load, open_model
    from shardwise.families import config_from_hf
    from shardwise.partition.padding import round_up
    from shardwise.planner.choose import plan_for
    from shardwise.runtime.distributed import is_main_process
    from shardwise.serving.generate import Sampling, stream
    from shardwise.steps.workload import Workload

    quiet = not is_main_process()

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr)

    config = config_from_hf(open_model(options.model).hf_config)
    the_plan = plan_for(
        options, config, "decode",
        lambda mesh: Workload(
            "decode", round_up(len(options.prompt), mesh.dp * mesh.fsdp), 1, capacity=config.max_position,
            compute_dtype=options.compute_dtype, choose="sample" if options.temperature else "greedy",
        ),
        say,
    )  # fmt: skip
    say(
        f"mesh {the_plan.mesh}{' (default: all tp)' if options.mesh is None and options.plan is None else ''}"
    )
    model = load(options.model, plan=the_plan, compute_dtype=options.compute_dtype)
    prompts = [encode_prompt(model.tokenizer, text, options.chat) for text in options.prompt]
    stops = stop_ids(model, options.stop_token)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed, options.min_p)
    rows: list[list[int]] = [[] for _ in prompts]
    start, first, shown = time.perf_counter(), 0.0, ""
    for ids in stream(model, prompts, options.max_new_tokens, sampling, stops):
        first = first or time.perf_counter()
        for row, token in ids:
            rows[row].append(token)
        if len(rows) == 1 and not quiet:
            text = model.tokenizer.decode([t for t in rows[0] if t not in stops])
            if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
                print(text[len(shown) :], end="", flush=True)
                shown = text
    if quiet:
        return 0
    texts = [model.tokenizer.decode([t for t in row if t not in stops]) for row in rows]
    if len(rows) == 1:
        print(texts[0][len(shown) :], flush=True)
    else:
        for number, text in enumerate(texts):
            print(f"--- {number + 1}: {options.prompt[number]}\n{text}")
    made, end = sum(map(len, rows)), time.perf_counter()
    later = (made - len(rows)) / (end - first) if end > first and made > len(rows) else 0.0
    print(
        f"[{made} tokens; first after {first - start:.1f} s with compilation, then {later:.1f} tokens/s]",
        file=sys.stderr,
    )
    return 0


def encode_prompt(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Ids of a prompt: raw text as the tokenizer gives it, or a user's message in the chat template."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8 arrive as lone surrogates
        raise ConfigError(f"the prompt {text!r} is not UTF-8; give it in that encoding") from None
    if chat:
        ids = _chat_ids(tokenizer, text)
    else:
        ids = tokenizer(text)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]  # some tokenizers end every text, which would end the answer before it begins
    if not ids:
        bos = tokenizer.bos_token_id
        if bos is None:
            raise ConfigError(
                "the prompt is empty and the tokenizer has no BOS token to start from; give some text"
            )
        ids = [bos]
    return list(ids)


def _chat_ids(tokenizer: Any, text: str) -> list[int]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError("--chat: this model has no chat template; leave --chat out")
    message = [{"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    except (TemplateError, TypeError, ValueError) as error:
        kind = type(error).__name__
        raise CheckpointError(
            f"--chat: the model's chat template refuses the message: {error} ({kind}); leave --chat out, or"
            " mend the template"
        ) from error


def stop_ids(model: Model, extra: tuple[str, ...] = ()) -> set[int]:
    """Ids that end a generation: each EOS that tokenizer, generation config or config name, and `extra`."""
    source, found = model.checkpoint, set()
    for config in (source.generation_config or {}, source.hf_config):
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise CheckpointError(
                f"eos_token_id is {value!r} in the model's config or generation config; it must be an integer"
                " or a list of them"
            )
        found |= set(ids)
    if model.tokenizer.eos_token_id is not None:
        found.add(model.tokenizer.eos_token_id)
    vocabulary = model.tokenizer.get_vocab()
    for token in extra:
        if token not in vocabulary:
            ids = model.tokenizer(token, add_special_tokens=False)["input_ids"]
            if len(ids) != 1:
                raise ConfigError(
                    f"--stop-token {token!r} is {len(ids)} tokens for this model; give a single token"
                )
            found.add(ids[0])
        else:
            found.add(vocabulary[token])
    if any(not 0 <= i < model.config.vocab_size for i in found):
        raise CheckpointError(
            f"eos ids {sorted(found)} go beyond the vocabulary of {model.config.vocab_size}"
        )
    return found
