"""Presets of BLOOM, OPT and GPT-J have as many parameters as transformers' own models of these configs.

Run with `-m parity` in an interpreter that has torch. Not here: the published counts (tests/families).
"""

from __future__ import annotations

import pytest

from shardwise.families import config_from_hf
from shardwise.families.presets import PRESETS, preset
from shardwise.models.flops import parameter_count
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the live comparison needs torch and transformers"
)
import transformers  # noqa: E402  (after the check for torch)

pytestmark = pytest.mark.parity

NAMES = tuple(name for name, config in PRESETS.items() if config["model_type"] in ("bloom", "opt", "gptj"))


@pytest.mark.parametrize("name", NAMES)
def test_transformers_model_of_a_preset_has_as_many_parameters(name: str) -> None:
    hf = preset(name)
    with torch.device("meta"):
        kind = getattr(transformers, hf["architectures"][0])
        theirs = kind(kind.config_class.from_dict(hf)).num_parameters()  # a tied head counted once
    assert theirs == parameter_count(plan_model(config_from_hf(hf), MeshSpec()))
