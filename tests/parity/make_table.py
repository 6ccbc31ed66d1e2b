"""Write the table of families in docs/families.md from what the tests' cases show; takes some minutes.

    python -m tests.parity.make_table   # from the root of the repository

A cell says yes only if the thing was done here for every case of the family, and was right.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from safetensors.numpy import load_file
from tests.parity.conftest import load_on
from tests.parity.families import all_cases
from tests.parity.family_cases import (
    FamilyCase,
    golden_logits,
    inputs,
    kept,
    model_config,
    write_checkpoint,
)
from tests.steps.test_mesh_invariance import compare

from shardwise.checkpoints.gguf_architectures import ARCHITECTURES

DOCS = Path(__file__).parents[2] / "docs" / "families.md"
START, END = "<!-- table -->", "<!-- end of table -->"
COLUMNS = ("family", "cases", "import", "export", "GGUF", "train", "decode", "tp uneven", "max\\|Δ\\|")
BOUND = 1e-4


def row(cases: list[FamilyCase]) -> str:
    """A family's line of the table."""
    worst, exported, decoded, trained = 0.0, True, True, True
    for case in cases:
        golden, config = golden_logits(case), model_config(case)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = load_on(write_checkpoint(case, folder / "in"))
            for batch in inputs(case):
                ours = kept(model.logits(batch.tokens, batch.attention_mask), batch)
                worst = max(worst, _apart(ours, golden[batch.name]))
            model.export(folder / "out")
            before, after = (load_file(folder / side / "model.safetensors") for side in ("in", "out"))
            exported &= before.keys() == after.keys()
            exported &= all(before[key].tobytes() == after[key].tobytes() for key in before)
            if config.causal:
                batch = inputs(case)[0]
                ours = model.cached_logits(batch.tokens, 12)[:, 12:]
                wanted = golden["plain"].reshape(*batch.tokens.shape, -1)[:, 12:]
                decoded &= _apart(ours, wanted) <= BOUND
        with jax.enable_x64(True):
            try:
                compare(replace(config, initializer_range=0.3), (1, 1, 3), "float64", 1e-9)
            except AssertionError:
                trained = False
    config = model_config(cases[0])
    gguf = any(a.model_type in (config.family, *_gguf_names(config.family)) for a in ARCHITECTURES.values())
    cells = (
        cases[0].config["model_type"], len(cases), _yes(worst <= BOUND), _yes(exported),
        "import" if gguf else "no", _yes(trained), _yes(decoded) if config.causal else "encoder",
        _yes(trained), f"{worst:.1e}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _gguf_names(family: str) -> tuple[str, ...]:
    return ("mistral",) if family == "mistral" else ()


def _apart(ours: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(ours - wanted).max() / np.abs(wanted).max())


def _yes(shown: bool) -> str:
    return "yes" if shown else "**no**"


def main() -> None:
    """Put the table between its two marks."""
    families: dict[str, list[FamilyCase]] = {}
    for case in all_cases():
        families.setdefault(model_config(case).family, []).append(case)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name in sorted(families):
        lines.append(row(families[name]))
        print(lines[-1], flush=True)
    text = DOCS.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    DOCS.write_text(f"{before}{START}\n" + "\n".join(lines) + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
