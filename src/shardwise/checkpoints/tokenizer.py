"""The tokenizer that belongs to a checkpoint, from local files only.

Not here: how a GGUF file describes its tokenizer (`gguf_tokenizer`). transformers is imported when used: it
takes a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoints.reader import Checkpoint, find_gguf
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any of these holds a vocabulary; without one AutoTokenizer makes an empty tokenizer for some model types.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with its chat template and special tokens.

    Files in a named folder come first; a GGUF file's metadata are used where there are none. The network is
    never used, and code that a folder brings is never run.

    Args:
        checkpoint: from `open_checkpoint`.

    Returns:
        A transformers tokenizer that can be saved and loaded again.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be read.
    """
    with _no_advice():
        return _load(checkpoint)


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether there is a tokenizer to load, sound or broken; a GGUF file is taken to have one."""
    return checkpoint.format == "gguf" or _vocabulary_in(checkpoint) is not None


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer that has ids beyond the embedding table.

    Args:
        tokenizer: the tokenizer in use.
        vocab_size: rows of the embedding table.

    Raises:
        CheckpointError: there is such an id.
    """
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > vocab_size:
        raise CheckpointError(
            f"the tokenizer has ids up to {needed - 1}, so it needs a vocabulary of {needed}, but the model's"
            f" embedding table has {vocab_size} rows; use the tokenizer that the model was trained with, or"
            " remove the tokens added to it"
        )


def _load(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    folder = _vocabulary_in(checkpoint)
    if folder is not None:
        return _from_files(folder)
    path = checkpoint.path
    if checkpoint.format == "gguf":
        from shardwise.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(find_gguf(path), getattr(checkpoint.reader, "metadata", None))
    raise CheckpointError(
        f"{path if path.is_dir() else path.parent} holds no tokenizer; copy tokenizer.json and"
        " tokenizer_config.json of the model into it"
    )


def _vocabulary_in(checkpoint: Checkpoint) -> Path | None:
    """The folder of the checkpoint, if it has files of a tokenizer."""
    path = checkpoint.path
    if not path.is_dir() and checkpoint.format != "config":
        return None
    folder = path if path.is_dir() else path.parent
    return folder if any((folder / name).exists() for name in _VOCABULARIES) else None


def _from_files(folder: Path) -> PreTrainedTokenizerBase:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries below raise anything, even bare Exception for a broken file
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # AutoTokenizer reads config.json first and checks the types of its values.
        what = "config.json" if isinstance(error, StrictDataclassError) else "the tokenizer"
        raise CheckpointError(
            f"{folder}: {what} cannot be read: {' '.join([*lines[:3], f'({type(error).__name__})'])}"
        ) from error


@contextmanager
def _no_advice() -> Iterator[None]:
    """Without transformers' remark, when it is first imported, that there is no torch: we need none."""
    key = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
