"""Opening a model: find out what a path holds, check it, and hand out its tensors row by row.

Not here: how a file format stores tensors (`safetensors_reader`, `gguf_reader`) and what a tensor means to
the model (`families`). Nothing big is read while opening.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from shardwise.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_FOREIGN = ("*.h5", "*.msgpack", "*.onnx", "*.npz")


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    """Shape as in a Hugging Face checkpoint, output dim first."""
    dtype: np.dtype
    """Dtype of what `rows` returns; float32 for a tensor that is dequantised."""
    file: str
    """The file that holds the tensor."""


class TensorReader(Protocol):
    """Tensors by Hugging Face name, in Hugging Face orientation."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the checkpoint."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of dim 0.

        Args:
            name: Hugging Face name.
            start: first row, 0 ≤ start ≤ stop.
            stop: one past the last row, at most `tensors()[name].shape[0]`.

        Returns:
            Array [stop − start, ...] of `tensors()[name].dtype`: a read-only view on the memory-mapped file
            where the file holds the values as they are, else a new array of those rows only.

        Raises:
            CheckpointError: there is no such tensor.
        """
        ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened model folder or file; no tensor has been read."""

    path: Path
    """The folder, `.gguf` file or `config.json` that was named."""
    format: Literal["safetensors", "gguf", "config"]
    """`config`: only a config.json, so shapes but no weights."""
    hf_config: dict[str, Any]
    """As in config.json; for a GGUF file made from its metadata."""
    generation_config: dict[str, Any] | None
    """As in generation_config.json, if there is one."""
    reader: TensorReader | None
    """None where there are no weights."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, a `.gguf` file (or a folder holding just one), or a bare `config.json`.

    Args:
        path: a local folder or file; `~` is expanded.

    Returns:
        The checkpoint, with every file's header checked, so that a missing or truncated file is known by now.

    Raises:
        CheckpointError: nothing there, pickle or quantised weights, or a missing, truncated or corrupt file.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"folder or file not found: {path}{_did_you_mean(path)}")
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path, path)
    if path.suffix.lower() == ".json":
        return Checkpoint(path, "config", _read_config(path), None, None)
    if any(path.match(pattern) for pattern in _PICKLES):
        raise CheckpointError(_pickle_message(path.parent, path.name))
    if path.suffix.lower() == ".safetensors":
        raise CheckpointError(
            f"{path} is one weight file of a model; name its folder, which has config.json too: {path.parent}"
        )
    raise CheckpointError(f"{path} is neither a model folder, nor a .gguf file, nor a config.json")


def find_gguf(path: Path) -> Path:
    """The .gguf file that `path` names, or the only one in the folder `path`.

    Raises:
        CheckpointError: the folder holds several.
    """
    if path.is_file():
        return path
    files = _gguf_files(path)
    if len(files) != 1:
        raise CheckpointError(
            f"{path} holds {len(files)} .gguf files; name one of them:"
            f" {', '.join(file.name for file in files)}"
        )
    return files[0]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: unreadable, no JSON (with line and column), or no object.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: is not UTF-8 text (byte {error.start}); is it a complete download?"
        ) from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}; expected an object {{…}}")
    return value


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / _INDEX).exists() or (folder / _SINGLE).exists():
        return _open_safetensors(folder)
    if _gguf_files(folder):
        return _open_gguf(folder, find_gguf(folder))
    names = sorted({entry.name for pattern in _PICKLES for entry in folder.glob(pattern)})
    if names:
        raise CheckpointError(_pickle_message(folder, names[0]))
    stray = sorted(entry.name for entry in folder.glob("*.safetensors"))
    if stray:
        raise CheckpointError(
            f"{folder} holds {stray[0]} but neither {_SINGLE} nor {_INDEX}; download the missing file"
            " (a folder of LoRA adapters is no model of its own)"
        )
    foreign = sorted({entry.name for pattern in _FOREIGN for entry in folder.glob(pattern)})
    if foreign:
        raise CheckpointError(f"{folder}: {foreign[0]} cannot be read; supported: safetensors, GGUF")
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} holds no model: no config.json, {_SINGLE}, {_INDEX} or .gguf file")
    config = _read_config(folder / "config.json")
    return Checkpoint(folder, "config", config, _read_generation_config(folder), None)


def _open_safetensors(folder: Path) -> Checkpoint:
    from shardwise.checkpoints.safetensors_reader import SafetensorsReader

    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} holds weights but no config.json; copy it from the model's source")
    config = _read_config(folder / "config.json")
    # Where there is an index it decides: a file that it does not name is left over from an earlier download.
    if (folder / _INDEX).exists():
        index = read_json(folder / _INDEX)
        reader = SafetensorsReader.from_index(folder / _INDEX, index.get("weight_map"))
    else:
        reader = SafetensorsReader([folder / _SINGLE])
    return Checkpoint(folder, "safetensors", config, _read_generation_config(folder), reader)


def _open_gguf(path: Path, file: Path) -> Checkpoint:
    from shardwise.checkpoints.gguf_reader import read_gguf

    config, generation_config, reader = read_gguf(file)
    return Checkpoint(path, "gguf", config, generation_config, reader)


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    for holder in (config, config.get("text_config") or {}):
        quantisation = holder.get("quantization_config") or holder.get("compression_config")
        if quantisation:
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
            raise CheckpointError(
                f"{path}: the weights are quantised ({method or 'unnamed method'}), which is not supported;"
                " use the unquantised original or a GGUF file"
            )
    return config


def _read_generation_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else None


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.suffix.lower() == ".gguf")


def _pickle_message(folder: Path, name: str) -> str:
    command = (
        "from transformers import AutoModelForCausalLM as M;"
        f" M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')"
    )
    return (
        f"{folder / name}: pickle weights are refused, because opening a pickle can run any code; if you"
        f' trust their source, convert them to safetensors: python -c "{command}"'
    )


def _did_you_mean(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" ({parent} does not exist either)"
    near = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    return f" (did you mean {parent / near[0]}?)" if near else ""
