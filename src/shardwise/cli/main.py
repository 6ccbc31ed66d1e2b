"""The command `shardwise`: finds the verb, reads its options, runs it, and turns a mistake into one line.

Exit codes: 0 done, 2 the user's mistake, 130 interrupted, 141 the reader of the output went away; others are
the verb's own.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from shardwise.errors import ConfigError, ShardwiseError

VERBS: dict[str, tuple[str, str]] = {
    "finetune": ("FinetuneOptions", "train a model further on your own text"),
    "pretrain": ("PretrainOptions", "train a new model from random parameters"),
    "eval": ("EvalOptions", "measure how well a model predicts a text, or labels of texts"),
    "generate": ("GenerateOptions", "continue prompts, or answer them as a chat assistant"),
    "convert": ("ConvertOptions", "write a model of any known format as a Hugging Face folder"),
    "plan": (
        "PlanOptions",
        "say which mesh to take on a machine, whether the model fits, and how fast it is",
    ),
    "explain": ("ExplainOptions", "say how a mesh cuts every tensor, why, and what that costs"),
    "info": ("InfoOptions", "say what a model is made of"),
}
"""Verb → (its class of options in the module of the verb's name, one line for the help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after `shardwise`; None: those of this process.
    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except ShardwiseError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would fail again: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as a line for the reader of the terminal; other libraries' keep the place in their code."""
    text = f"warning: {message}"
    if f"{os.sep}shardwise{os.sep}" not in filename:
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
    print(text, file=file or sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    verb = arguments[0]
    if verb == "--version":
        from importlib.metadata import version

        print(f"shardwise {version('shardwise')}")
        return 0
    from shardwise.cli.parsing import nearest, parse_options

    if verb not in VERBS:
        guess = nearest(verb, VERBS)
        fix = f"did you mean '{guess}'?" if guess else f"known: {', '.join(VERBS)}"
        raise ConfigError(f"unknown command '{verb}'; {fix}")
    module = importlib.import_module(f"shardwise.cli.{verb}")
    options = parse_options(getattr(module, VERBS[verb][0]), arguments[1:], f"shardwise {verb}")
    code: int = module.run(options)
    return code


def _overview() -> str:
    commands = "\n".join(f"  {verb:<10}{text}" for verb, (_, text) in VERBS.items())
    return (
        "usage: shardwise COMMAND ...\n\n"
        "Large language models in JAX on any device mesh.\n\n"
        f"commands:\n{commands}\n\n"
        "'shardwise COMMAND --help' says what a command takes; 'shardwise --version' names the version."
    )


if __name__ == "__main__":
    sys.exit(main())
