"""Typed access to a GGUF file's key-value pairs.

Not here: which keys there are and what they mean (`gguf_architectures`, `gguf_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import CheckpointError


@dataclass(frozen=True)
class Metadata:
    """A file's key-value pairs."""

    file: Path
    """The file, for messages."""
    values: Mapping[str, Any]
    """All pairs, arrays as lists."""

    @property
    def prefix(self) -> str:
        """The architecture's name, with which the keys of its settings begin."""
        return str(self.values.get("general.architecture"))

    def raw(self, key: str, default: Any = None) -> Any:
        """What is under `<architecture>.<key>`, also an array with an entry for each layer."""
        return self.values.get(f"{self.prefix}.{key}", default)

    def get(self, key: str, default: Any = None) -> Any:
        """The scalar under `<architecture>.<key>`."""
        value = self.raw(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.file}: {self.prefix}.{key} differs by layer ({value}); not supported"
                )
            return value[0]
        return value

    def require(self, key: str) -> Any:
        """As `get`, of a key that must be there."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file}: metadata lack {self.prefix}.{key}, which the model needs")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return None if value is None else int(value)


def shortest(value: float) -> float:
    """The shortest number that rounds to the same float32: the file holds 1e-5 as 9.99999975e-6."""
    return float(str(np.float32(value)))
