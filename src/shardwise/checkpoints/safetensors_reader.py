"""Tensors of safetensors files as read-only views on the memory-mapped files.

The library checks each header (`safe_open`); its NumPy tensors are copies (0.8), so the views are made here
from the offsets in the header. Not here: which files make up a model (`reader`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from shardwise.checkpoints.reader import TensorInfo
from shardwise.errors import CheckpointError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsReader:
    """A `TensorReader` over one or more safetensors files whose headers have been checked."""

    def __init__(self, files: Iterable[Path], weight_map: Mapping[str, str] | None = None) -> None:
        """Check and map the files.

        Args:
            files: the model's files.
            weight_map: tensor name → file name as the index says; None for a single file.

        Raises:
            CheckpointError: a file is missing, truncated or corrupt, holds a dtype that cannot be used, or
                disagrees with `weight_map`.
        """
        self._tensors: dict[str, TensorInfo] = {}
        self._views: dict[str, np.ndarray] = {}
        for file in files:
            for name, view in _map_file(file).items():
                wanted = file.name if weight_map is None else weight_map.get(name)
                if name in self._tensors or wanted not in (file.name, None):
                    other = self._tensors[name].file if name in self._tensors else file.parent / str(wanted)
                    raise CheckpointError(
                        f"{file}: tensor {name!r} is in {other} too; download both files again"
                    )
                if wanted is None:
                    raise CheckpointError(
                        f"{file}: tensor {name!r} is not in the index; they are of different versions:"
                        " download both again"
                    )
                self._tensors[name] = TensorInfo(view.shape, view.dtype, str(file))
                self._views[name] = view
        for name, file_name in (weight_map or {}).items():
            if name not in self._tensors:
                raise CheckpointError(f"{file_name}: has no tensor {name!r}, which the index says it holds")

    @classmethod
    def from_index(cls, index_file: Path, weight_map: Any) -> SafetensorsReader:
        """The reader of a sharded model.

        Args:
            index_file: path of `model.safetensors.index.json`.
            weight_map: the value of its key of that name.

        Raises:
            CheckpointError: as the constructor, or the map is malformed.
        """
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_file}: 'weight_map' must be an object of tensor name: file name")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(
                    f"{index_file}: tensor {name!r} is said to be in {file_name!r}; expected the name of a"
                    " file beside the index"
                )
        files = [index_file.parent / file_name for file_name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"{index_file.parent}: {', '.join(missing)}, named in {index_file.name}, not found;"
                " download again"
            )
        return cls(files, weight_map)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors of the files."""
        return self._tensors

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """See `TensorReader.rows`."""
        if name not in self._views:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        view = self._views[name]
        assert view.ndim > 0, f"{name} is a scalar"
        assert 0 <= start <= stop <= view.shape[0], (name, start, stop, view.shape)
        # A header of odd length leaves its tensors unaligned; only then are the rows copied.
        return np.require(view[start:stop], requirements="A")


def _map_file(file: Path) -> dict[str, np.ndarray]:
    """Name → view for each tensor of a file, after checking the file."""
    header, data_start = _read_header(file)
    size = os.path.getsize(file)
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name!r} has dtype {entry['dtype']}, which is not supported; supported:"
                f" {', '.join(_DTYPES)}"
            )
    end = data_start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < end:
        raise CheckpointError(f"{file}: truncated: it has {size} bytes of {end}; download it again")
    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: corrupt safetensors file: {error}; download it again") from error
    data = np.asarray(np.memmap(file, mode="r", dtype=np.uint8))
    views = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = data[data_start + first : data_start + last]
        views[name] = raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return views


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header without its metadata, and where the data start."""
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            if size < 8 + length or size < 8:
                raise CheckpointError(
                    f"{file}: truncated or no safetensors file: it has {size} bytes, its header alone needs"
                    f" {8 + length}; download it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(pairs, file))
        header.pop("__metadata__", None)
        well_formed = all(
            isinstance(entry["dtype"], str)
            and all(isinstance(n, int) and n >= 0 for n in (*entry["shape"], *entry["data_offsets"]))
            and len(entry["data_offsets"]) == 2
            for entry in header.values()
        )
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: corrupt safetensors header ({error}); download it again") from error
    if not well_formed:
        raise CheckpointError(
            f"{file}: corrupt safetensors header (impossible shape or offset); download it again"
        )
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]], file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"{file}: tensor {name!r} occurs twice in the header; the file is corrupt")
        found[name] = value
    return found
