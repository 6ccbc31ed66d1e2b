"""Parsing GGUF files: metadata and where tensors lie, with checks that come before any array is made.

The `gguf` package parses. Not here: what the tensors and the settings mean (`gguf_reader`, `gguf_config`).
"""

from __future__ import annotations

import itertools
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from shardwise.errors import CheckpointError

NATIVE_DTYPES = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
"""Types whose values are in the file as they are."""
# Magic number, version, numbers of tensors and of metadata.
_HEADER_BYTES = 24


def parse(file: Path) -> tuple[list[gguf.ReaderTensor], dict[str, Any]]:
    """The file's tensors, unread, and its metadata, arrays as lists.

    Raises:
        CheckpointError: the file is truncated or corrupt, or has a tensor that cannot be dequantised.
    """
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


def read_metadata(file: Path) -> dict[str, Any]:
    """All metadata of a GGUF file, arrays as lists.

    Raises:
        CheckpointError: the file is truncated or corrupt.
    """
    return parse(file)[1]


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
        if kind not in NATIVE_DTYPES:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError, KeyError):
        return False
    return True
