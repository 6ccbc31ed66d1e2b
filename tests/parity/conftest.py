"""Fixtures of the parity tests: checkpoint folders and models loaded from them, each made once a module.

Not here: JAX flags (tests/conftest.py sets them, with 8 fake CPU devices) and anything of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import shardwise

from .cases import Case, write_checkpoint

ONE_DEVICE = "dp:1,fsdp:1,tp:1"


@pytest.fixture(scope="module")
def case_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Function: the folder of a case's checkpoint, written at the first call."""
    root = tmp_path_factory.mktemp("parity")
    folders: dict[tuple[str, int], Path] = {}

    def folder_of(case: Case) -> Path:
        key = (case.name, case.seed)
        if key not in folders:
            folders[key] = write_checkpoint(case, root / f"{case.name}_{case.seed}")
        return folders[key]

    return folder_of


@pytest.fixture(scope="module")
def load_case(case_folder: Callable[[Case], Path]) -> Callable[..., Any]:
    """Function (case, mesh): the case as a float32 shardwise.Model, loaded at the first call."""
    models: dict[tuple[str, int, str], Any] = {}

    def load(case: Case, mesh: str = ONE_DEVICE) -> Any:
        key = (case.name, case.seed, mesh)
        if key not in models:
            models[key] = load_on(case_folder(case), mesh)
        return models[key]

    return load


def load_on(
    path: Path, mesh: str = ONE_DEVICE, compute_dtype: str = "float32", head_layout: Any = None
) -> Any:
    """Load `path` on the first devices of this machine, as many as a mesh like `dp:1,fsdp:2,tp:2` takes."""
    count = math.prod(int(part.split(":")[1]) for part in mesh.split(","))
    return shardwise.load(
        path, mesh=mesh, compute_dtype=compute_dtype, devices=jax.devices()[:count], head_layout=head_layout
    )
