"""Experts dealt out over devices, remade and accumulated: the same numbers, and what was predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from tests.parity.families.mixtral import CASES
from tests.parity.family_cases import golden_logits, inputs, model_config, write_checkpoint
from tests.parity.test_goldens import assert_close
from tests.planner.audits import ALL, BOTH, Case, as_expected
from tests.steps.test_mesh_invariance import compare

import shardwise
from shardwise.errors import ConfigError
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.presets import PRESETS

CASE = CASES[0]
DEALT = PRESETS["fsdp+tp"].changed({"experts": ("tp",), "mlp": ()}, name="dealt.yaml")
"""Whole experts over tp, instead of a part of each."""


@pytest.mark.parametrize("sizes", ["dp:1,fsdp:1,tp:4", "dp:1,fsdp:2,tp:2"])
def test_whole_experts_over_tp_give_transformers_logits(sizes: str, tmp_path: Path) -> None:
    model = shardwise.load(
        write_checkpoint(CASE, tmp_path), mesh=sizes, devices=jax.devices()[:4], rules=DEALT
    )
    golden = golden_logits(CASE)
    for batch in inputs(CASE)[:2]:
        ours = model.logits(batch.tokens, batch.attention_mask)
        assert_close(ours[batch.keep], golden[batch.name], f"{sizes} {batch.name}")


@pytest.mark.parametrize(
    "more",
    [
        (),
        (("remat", "full"),),
        (("remat", "dots"), ("compute_dtype", "bfloat16")),
        (("grad_accum_steps", 2),),
    ],
    ids=str,
)
@pytest.mark.parametrize("rules", [PRESETS["fsdp+tp"], DEALT], ids=lambda rules: rules.name)
def test_the_compiled_training_step_is_what_was_predicted(rules: Any, more: tuple[Any, ...]) -> None:
    assert as_expected(Case("train", BOTH, model_config(CASE), rules, more=more).audit) == []


@pytest.mark.slow
@pytest.mark.parametrize("task", ["train", "prefill", "decode"])
def test_whole_experts_on_three_axes_are_what_was_predicted(task: Any) -> None:
    assert as_expected(Case(task, ALL, model_config(CASE), DEALT).audit) == []


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_gradients_do_not_depend_on_what_is_made_again(remat: str) -> None:
    with jax.enable_x64(True):
        compare(replace(model_config(CASE), initializer_range=0.3), (1, 2, 2), "float64", 1e-9, remat)


def test_experts_that_an_axis_does_not_divide_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"experts.*4.*tp.*3"):
        plan_model(model_config(CASE), MeshSpec(1, 1, 3), DEALT)
