"""Writing a Hugging Face folder: config, sharded safetensors, tokenizer; all of it or nothing.

Not here: which tensors a model has and what they are called (`families`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_hf_folder(
    out: str | Path,
    *,
    hf_config: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 2 << 30,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model folder that transformers, vLLM and llama.cpp's converter read.

    It is written beside `out` under a hidden name and renamed when complete.

    Args:
        out: the folder to make; must not exist.
        hf_config: content of config.json.
        tensors: name and array of each tensor, in Hugging Face orientation; consumed one at a time, never
            holding more than one shard and the next tensor.
        tokenizer: saved along with its chat template.
        generation_config: content of generation_config.json.
        max_shard_bytes: a file holds at most this much, or a single bigger tensor.
        metadata: further strings for the safetensors headers.

    Raises:
        CheckpointError: `out` exists, a name occurs twice, or the disk refuses; nothing is left behind.
    """
    out = Path(out).expanduser().absolute()
    _refuse_existing(out)
    made = _make_parents(out.parent)
    partial = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
        _write_json(partial / "config.json", hf_config)
        if generation_config is not None:
            _write_json(partial / "generation_config.json", generation_config)
        if tokenizer is not None:
            _save_tokenizer(partial, tokenizer)
        _write_tensors(partial, tensors, max_shard_bytes, {"format": "pt", **(metadata or {})})
        for entry in [*partial.rglob("*"), partial]:
            fsync(entry)
        _refuse_existing(out)
        partial.rename(out)
        fsync(out.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{out} could not be written: {error}; nothing was left behind") from error
        raise


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already; name another folder or remove it first")


def _make_parents(parent: Path) -> list[Path]:
    """Make `parent`; returns the folders that were missing, innermost first."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be made: {error.strerror}") from error
    return missing


def _save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        # The name that transformers 4 knows this class by; 5 takes both.
        _write_json(path, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int, metadata: dict[str, str]
) -> None:
    """Write the shards, then give them names that say how many there are."""
    shards: list[list[str]] = []
    seen: set[str] = set()
    shard: dict[str, np.ndarray] = {}
    total = filled = 0

    def flush() -> None:
        nonlocal shard, filled
        file = folder / f"shard-{len(shards)}"
        save_file(shard, file, metadata=metadata)
        # The library's files are for their owner alone; config.json has what the user's umask allows.
        file.chmod(stat.S_IMODE((folder / "config.json").stat().st_mode))
        shards.append(list(shard))
        shard, filled = {}, 0

    for name, value in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name!r} is to be written twice")
        seen.add(name)
        array = np.asarray(value, order="C")
        if shard and filled + array.nbytes > max_shard_bytes:
            flush()
        shard[name] = array
        filled += array.nbytes
        total += array.nbytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def fsync(path: Path) -> None:
    """Make the kernel write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
