"""GGUF files as Hugging Face checkpoints: names, orientation, order of rows; dequantised when asked for.

The `gguf` package dequantises. Not here: parsing the file (`gguf_parser`), config.json (`gguf_config`) and
the tokenizer (`gguf_tokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from shardwise.checkpoints.gguf_architectures import TOP_NAMES, Architecture
from shardwise.checkpoints.gguf_config import (
    complete_from_tensors,
    config_from_metadata,
    find_architecture,
    generation_config_from_metadata,
)
from shardwise.checkpoints.gguf_metadata import Metadata
from shardwise.checkpoints.gguf_parser import NATIVE_DTYPES, parse
from shardwise.checkpoints.gguf_rope import ROPE_FREQS, add_llama3_scaling
from shardwise.checkpoints.reader import TensorInfo
from shardwise.errors import CheckpointError

# Rows dequantised at a time: `gguf` joins its results at the end, which would double a big tensor.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file."""

    data: np.ndarray
    """View on the mapped file: values of the native dtype, or [rows, bytes of a row]."""
    kind: gguf.GGMLQuantizationType
    """How the values are stored."""
    permuted_heads: int | None
    """Number of heads whose rows are re-ordered; None: in order."""
    plus_one: bool
    """Whether 1 has been added to the values."""
    info: TensorInfo
    """What callers see."""


class GgufReader:
    """A `TensorReader` over a GGUF file."""

    def __init__(self, stored: Mapping[str, _Stored], metadata: Mapping[str, Any]) -> None:
        """Not for callers: see `read_gguf`."""
        self._stored = dict(stored)
        self.metadata = metadata
        """The file's key-value pairs, arrays as lists."""

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the file under their Hugging Face names."""
        return {name: stored.info for name, stored in self._stored.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """See `TensorReader.rows`.

        Norms stored as w + 1 come back as float32 w: bit for bit where the converter's sum was exact, as it
        is for 0 and for bfloat16 weights of a size from 2⁻¹⁶ to below 2²⁴. Where the sum was rounded, that
        error stays: for weights between -1 and 1 at most 2⁻²⁴ if they were float32, and 2⁻¹¹ if they were
        float16, to which converters add in float16.
        """
        if name not in self._stored:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        stored = self._stored[name]
        shape = stored.info.shape
        assert 0 <= start <= stop <= shape[0], (name, start, stop, shape)
        values = _values(stored, start, stop)
        return values.astype(np.float32) - np.float32(1) if stored.plus_one else values


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Any] | None, GgufReader | None]:
    """Open a GGUF file.

    Args:
        file: path of the file.

    Returns:
        config.json's content, generation_config.json's content if the file has any, and the reader: None for
        a file without tensors, which has only a vocabulary.

    Raises:
        CheckpointError: truncated or corrupt file, unsupported architecture, tensor type, tensor or setting.
    """
    tensors, values = parse(file)
    meta = Metadata(file, values)
    architecture = find_architecture(meta)
    config = config_from_metadata(meta, architecture)
    stored: dict[str, _Stored] = {}
    for tensor in tensors:
        if tensor.name == ROPE_FREQS and architecture.rope_freqs:
            add_llama3_scaling(config, np.asarray(tensor.data), file)
        else:
            name = _hf_name(file, tensor.name, config["num_hidden_layers"], architecture)
            stored[name] = _store(file, name, tensor, config, architecture)
    generation_config = generation_config_from_metadata(meta, config)
    if not stored:
        return config, generation_config, None
    infos = {name: tensor.info for name, tensor in stored.items()}
    complete_from_tensors(config, infos, architecture)
    return config, generation_config, GgufReader(stored, values)


def _hf_name(file: Path, name: str, num_layers: int, architecture: Architecture) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in architecture.layer_names and int(block[1]) < num_layers:
        return f"model.layers.{int(block[1])}.{architecture.layer_names[block[2]]}.{block[3]}"
    top, _, kind = name.rpartition(".")
    if top in TOP_NAMES and kind in ("weight", "bias"):
        return f"{TOP_NAMES[top]}.{kind}"
    raise CheckpointError(
        f"{file}: tensor {name!r} is no part of a model of this architecture with {num_layers} layers; not"
        " supported"
    )


def _store(
    file: Path,
    name: str,
    tensor: gguf.ReaderTensor,
    config: Mapping[str, Any],
    architecture: Architecture,
) -> _Stored:
    """A tensor of the file; `name` is Hugging Face's."""
    data, kind = np.asarray(tensor.data), tensor.tensor_type
    shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    dtype = NATIVE_DTYPES.get(kind, np.dtype(np.float32))
    if kind in NATIVE_DTYPES:
        data = data.view(dtype).reshape(shape)
    heads = None
    projection = re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", tensor.name)
    if projection and architecture.permuted_qk:
        heads = config["num_attention_heads" if projection[1] == "q" else "num_key_value_heads"]
        head_dim = config["head_dim"]
        if shape[0] != heads * head_dim or head_dim % 2:
            raise CheckpointError(
                f"{file}: tensor {tensor.name!r} has {shape[0]} rows, not {heads} heads of {head_dim}"
            )
    plus_one = architecture.norms_plus_one and name.endswith("norm.weight")
    info = TensorInfo(shape, np.dtype(np.float32) if plus_one else dtype, str(file))
    return _Stored(data, kind, heads, plus_one, info)


def _values(stored: _Stored, start: int, stop: int) -> np.ndarray:
    """Rows as stored, in Hugging Face's order: a view if they can be, else dequantised to float32."""
    shape = stored.info.shape
    where: slice | np.ndarray = slice(start, stop)
    if stored.permuted_heads is not None:
        where = _rows_in_file(start, stop, shape[0] // stored.permuted_heads)
    if stored.kind in NATIVE_DTYPES:
        return np.require(stored.data[where], requirements="A")
    if len(shape) == 1:  # blocks run along the only dim, so that rows cannot be cut out of it
        return gguf.quants.dequantize(stored.data, stored.kind)[where]
    rows = np.empty((stop - start, *shape[1:]), np.float32)
    for first in range(0, stop - start, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, stop - start)
        part = where[first:last] if isinstance(where, np.ndarray) else slice(start + first, start + last)
        rows[first:last] = gguf.quants.dequantize(stored.data[part], stored.kind)
    return rows


def _rows_in_file(start: int, stop: int, head_dim: int) -> np.ndarray:
    """Where rows `start` to `stop` of q_proj or k_proj lie in the file.

    Hugging Face rotates element i with i + E/2 of a head; llama.cpp rotates neighbours, so converters write
    the two as 2i and 2i + 1.
    """
    head, element = np.divmod(np.arange(start, stop), head_dim)
    half, pair = np.divmod(element, head_dim // 2)
    return head * head_dim + 2 * pair + half
