"""Every family computes the same on every mesh: loss and gradients against one device, and cached decoding.

Not here: what the right numbers are (tests/parity).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.parity.conftest import load_on
from tests.parity.families import all_cases
from tests.parity.family_cases import FamilyCase, golden_logits, inputs, model_config, write_checkpoint
from tests.parity.test_goldens import assert_close
from tests.steps.test_mesh_invariance import compare

CASES = tuple(all_cases())
FIRST = tuple({model_config(case).family: case for case in reversed(CASES)}.values())[::-1]
"""A case of each family."""
MESHES = {"tp 2": (1, 1, 2), "tp 3": (1, 1, 3), "tp 4": (1, 1, 4), "fsdp 2 × tp 2": (1, 2, 2)}
LAYOUTS = ("vocab", "hidden", "replicated")
# One case of each family on one mesh; the other cases, and the other meshes of the first, are slow.
FEW = [(case, list(MESHES)[i % 4]) for i, case in enumerate(FIRST)]
MANY = [(case, list(MESHES)[i % 4]) for i, case in enumerate(CASES) if case not in FIRST]
MANY += [(case, mesh) for case in FIRST for mesh in MESHES if (case, mesh) not in FEW]
on_meshes = pytest.mark.parametrize(
    ("case", "mesh"),
    [*FEW, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MANY)],
    ids=lambda value: value.name if isinstance(value, FamilyCase) else value,
)


@on_meshes
def test_float64_loss_and_gradients_equal_one_device(case: FamilyCase, mesh: str) -> None:
    config = replace(model_config(case), initializer_range=0.3)
    with jax.enable_x64(True):
        compare(config, MESHES[mesh], "float64", 1e-9)


@on_meshes
def test_cached_decode_on_a_mesh_equals_transformers_under_some_head_layout(
    case: FamilyCase, mesh: str, tmp_path: Path
) -> None:
    if not model_config(case).causal:
        pytest.skip("an encoder has no cache")
    layout = LAYOUTS[(CASES.index(case) + list(MESHES).index(mesh)) % 3]
    sizes = ",".join(f"{axis}:{n}" for axis, n in zip(("dp", "fsdp", "tp"), MESHES[mesh], strict=True))
    model = load_on(write_checkpoint(case, tmp_path), sizes, head_layout=layout)
    batch = inputs(case)[0]
    ours = model.cached_logits(batch.tokens, 12)
    place = np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape)[batch.keep]
    known = place >= 11
    assert_close(ours[batch.keep][known], golden_logits(case)["plain"][known], f"{case.name} on {mesh}")
