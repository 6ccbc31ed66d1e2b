"""GGUF files as Hugging Face checkpoints: names, orientation, order of rows; dequantised when asked for.

The `gguf` package parses the file and dequantises. Not here: config.json (`gguf_config`) and the tokenizer
(`gguf_tokenizer`).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from shardwise.checkpoints import gguf_config
from shardwise.checkpoints.reader import TensorInfo
from shardwise.errors import CheckpointError

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NATIVE_DTYPES = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Magic number, version, numbers of tensors and of metadata.
_HEADER_BYTES = 24
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
        """See `TensorReader.rows`."""
        if name not in self._stored:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        stored = self._stored[name]
        shape = stored.info.shape
        assert 0 <= start <= stop <= shape[0], (name, start, stop, shape)
        where: slice | np.ndarray = slice(start, stop)
        if stored.permuted_heads is not None:
            where = _rows_in_file(start, stop, shape[0] // stored.permuted_heads)
        if stored.kind in _NATIVE_DTYPES:
            return np.require(stored.data[where], requirements="A")
        if len(shape) == 1:  # blocks run along the only dim, so that rows cannot be cut out of it
            return gguf.quants.dequantize(stored.data, stored.kind)[where]
        rows = np.empty((stop - start, *shape[1:]), np.float32)
        for first in range(0, stop - start, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, stop - start)
            part = where[first:last] if isinstance(where, np.ndarray) else slice(start + first, start + last)
            rows[first:last] = gguf.quants.dequantize(stored.data[part], stored.kind)
        return rows


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
    tensors, values = _parse(file)
    meta = gguf_config.Metadata(file, values)
    architecture = gguf_config.find_architecture(meta)
    config = gguf_config.config_from_metadata(meta, architecture)
    stored: dict[str, _Stored] = {}
    for tensor in tensors:
        if tensor.name == gguf_config.ROPE_FREQS:
            gguf_config.add_llama3_scaling(config, np.asarray(tensor.data), file)
        else:
            name = _hf_name(file, tensor.name, config["num_hidden_layers"])
            stored[name] = _store(file, tensor, config, architecture)
    generation_config = gguf_config.generation_config_from_metadata(meta, config)
    if not stored:
        return config, generation_config, None
    gguf_config.complete_from_tensors(config, {name: tensor.info for name, tensor in stored.items()})
    return config, generation_config, GgufReader(stored, values)


def read_metadata(file: Path) -> dict[str, Any]:
    """All metadata of a GGUF file, arrays as lists.

    Raises:
        CheckpointError: the file is truncated or corrupt.
    """
    return _parse(file)[1]


class _UnsupportedTypeError(ValueError):
    """A sound file that holds what cannot be dequantised."""


class _Parser(gguf.GGUFReader):
    """`gguf.GGUFReader` that checks types and extents first, and is quick on a vocabulary's long arrays.

    These are overrides of internals. Should a later `gguf` rename them, long arrays are slow and messages
    plain; results stay right.
    """

    @property
    def data(self) -> np.ndarray:
        """The file's bytes; a plain array, as slicing a memmap is several times slower."""
        return self._plain_data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._plain_data = np.asarray(value)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind = gguf.GGUFValueType(int(item_type[0]))
        offset, total = orig_offs + 12, int(count[0])
        parts, types = [item_type, count], [gguf.GGUFValueType.ARRAY, kind]
        if total > len(self.data):
            raise ValueError(f"array of {total} items in a file of {len(self.data)} bytes")
        if kind == gguf.GGUFValueType.STRING and self.byte_order == "I":
            for _ in range(total):
                end = offset + 8 + int.from_bytes(self.data[offset : offset + 8], "little")
                if end > len(self.data):
                    raise ValueError(f"string at byte {offset} runs past the end of the file")
                parts.append(self.data[offset + 8 : end])
                offset = end
            return offset - orig_offs, parts, list(range(2, 2 + total)), types
        if kind in self.gguf_scalar_to_np:
            values = self._get(offset, self.gguf_scalar_to_np[kind], total)
            if len(values) != total:
                raise ValueError(f"array at byte {orig_offs} runs past the end of the file")
            return 12 + values.nbytes, [*parts, values], [2], types
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        extents = []
        for field in fields:
            _, _, _, dims, raw_type, offset = field.parts
            size = _byte_size(field.name, dims.tolist(), int(raw_type[0]))
            first = start_offs + int(offset[0])
            extents.append((first, first + size, field.name))
            if first + size > len(self.data):
                raise ValueError(
                    f"truncated: tensor {field.name!r} ends at byte {first + size}, the file at"
                    f" {len(self.data)}"
                )
        for (_, end, name), (after, _, other) in itertools.pairwise(sorted(extents)):
            if after < end:
                raise ValueError(f"tensors {name!r} and {other!r} overlap")
        super()._build_tensors(start_offs, fields)


def _parse(file: Path) -> tuple[list[gguf.ReaderTensor], dict[str, Any]]:
    """The file's tensors, unread, and its metadata."""
    try:
        if file.stat().st_size < _HEADER_BYTES:
            raise ValueError(f"it has {file.stat().st_size} bytes, less than the header")
        parsed = _Parser(os.fspath(file))
        metadata = {key: field.contents() for key, field in parsed.fields.items()}
    except _UnsupportedTypeError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise CheckpointError(f"{file}: not a complete GGUF file: {error}; download it again") from error
    if parsed.byte_order != "I":
        raise CheckpointError(f"{file}: is in the other byte order; run gguf-convert-endian on it first")
    return parsed.tensors, metadata


def _byte_size(name: str, dims: list[int], number: int) -> int:
    """Bytes of a tensor, once its type and shape have been checked."""
    if not _can_dequantise(number):
        names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
        supported = ", ".join(name for number, name in names.items() if _can_dequantise(number))
        raise _UnsupportedTypeError(
            f"tensor {name!r} has type number {number} ({names.get(number, 'unknown')}), which is not"
            f" supported; supported: {supported}"
        )
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    if not dims or dims[0] % block:
        raise ValueError(f"tensor {name!r} of shape {dims[::-1]} does not consist of whole blocks of {block}")
    return math.prod(dims) // block * size


@lru_cache
def _can_dequantise(number: int) -> bool:
    try:
        kind = gguf.GGMLQuantizationType(number)
        if kind not in _NATIVE_DTYPES:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError, KeyError):
        return False
    return True


def _hf_name(file: Path, name: str, num_layers: int) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _BLOCK_NAMES and int(block[1]) < num_layers:
        return f"model.layers.{int(block[1])}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
    top, _, kind = name.rpartition(".")
    if top in _TOP_NAMES and kind in ("weight", "bias"):
        return f"{_TOP_NAMES[top]}.{kind}"
    raise CheckpointError(
        f"{file}: tensor {name!r} is no part of a model of this architecture with {num_layers} layers; not"
        " supported"
    )


def _store(
    file: Path, tensor: gguf.ReaderTensor, config: Mapping[str, Any], architecture: gguf_config.Architecture
) -> _Stored:
    data, kind = np.asarray(tensor.data), tensor.tensor_type
    shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    dtype = _NATIVE_DTYPES.get(kind, np.dtype(np.float32))
    if kind in _NATIVE_DTYPES:
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
    return _Stored(data, kind, heads, TensorInfo(shape, dtype, str(file)))


def _rows_in_file(start: int, stop: int, head_dim: int) -> np.ndarray:
    """Where rows `start` to `stop` of q_proj or k_proj lie in the file.

    Hugging Face rotates element i with i + E/2 of a head; llama.cpp rotates neighbours, so converters write
    the two as 2i and 2i + 1.
    """
    head, element = np.divmod(np.arange(start, stop), head_dim)
    half, pair = np.divmod(element, head_dim // 2)
    return head * head_dim + 2 * pair + half
