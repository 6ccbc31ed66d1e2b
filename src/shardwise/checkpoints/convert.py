"""`shardwise convert`: read a model of any known format and write a Hugging Face folder.

Not here: how either is read and written (load.py, export.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.cli.convert import ConvertOptions


def run(options: ConvertOptions) -> int:
    """Convert; returns the exit code."""
    from shardwise.api import load

    dtype = None if options.dtype == "keep" else options.dtype
    mesh = "dp:1,fsdp:-1,tp:1" if options.mesh is None else options.mesh
    model = load(options.model, mesh=mesh, overrides=options.override)
    model.export(options.out, dtype)
    print(
        f"wrote {options.out}: {model.config.family}, {len(model.params):,} arrays, {dtype or 'dtypes kept'}"
    )
    return 0
