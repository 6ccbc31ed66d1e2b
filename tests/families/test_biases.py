"""A bias behind a product that is summed over devices is added once (case C210)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.conftest import load_on
from tests.parity.families import all_cases
from tests.parity.family_cases import FamilyCase, inputs, write_checkpoint

NAMES = ("gpt2", "opt", "opt_350m_form", "bloom", "gptj", "gpt_neox", "gpt_neox_serial_gelu_fast")
CASES = tuple(case for case in all_cases() if case.name in NAMES)
OUTPUTS = (
    "c_proj.bias", "fc2.bias", "fc_out.bias", "out_proj.bias", "dense.bias", "dense_4h_to_h.bias",
)  # fmt: skip
"""Ends of the names of biases behind the products that give the residual stream."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_biases_of_one_count_once_on_every_number_of_devices(case: FamilyCase, tmp_path: Path) -> None:
    folder = write_checkpoint(case, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    biases = [name for name in tensors if name.endswith(OUTPUTS)]
    assert len(biases) >= case.config.get("n_layer", case.config.get("num_hidden_layers")), biases
    save_file(
        {**tensors, **{name: np.ones_like(tensors[name]) for name in biases}}, folder / "model.safetensors"
    )
    tokens = inputs(case)[0].tokens
    alone = load_on(folder).logits(tokens)
    for tp in (2, 4):
        worst = np.abs(load_on(folder, f"dp:1,fsdp:1,tp:{tp}").logits(tokens) - alone).max()
        assert worst <= 1e-4 * np.abs(alone).max(), f"tp {tp}: {worst}"
