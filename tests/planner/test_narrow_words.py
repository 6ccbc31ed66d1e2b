"""Words of another width than the residual stream (OPT-350m), and positions looked up beside them: what the
compiled step moves and computes is what was predicted, under head layouts and rules that cut these.

Not here: every family under the default rules (test_family_audits.py).
"""

from __future__ import annotations

import pytest
from tests.parity.families import all_cases
from tests.parity.family_cases import model_config
from tests.planner.audits import BOTH, SEQUENCE, Case, as_expected

from shardwise.models.config import ModelConfig
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import HeadLayout, Rules
from shardwise.steps.workload import Task

CONFIGS = {case.name: model_config(case) for case in all_cases()}
NARROW, WIDE = CONFIGS["opt_350m_form"], CONFIGS["opt_projected_untied_6_heads_gelu"]
ROWS = ("dp", "fsdp")
RULES = {
    "sequence": SEQUENCE,
    "sequence, of words too": SEQUENCE.changed(
        activations={"words": (ROWS, ("tp",), ())}, name="sequence_words"
    ),
    "words over tp": PRESETS["fsdp+tp"].changed(
        {"vocab": (), "word_embed": ("tp",)}, {"words": (ROWS, (), ("tp",))}, name="words_over_tp"
    ),
    "words over tp and fsdp": PRESETS["fsdp+tp"].changed(
        {"vocab": (), "word_embed": ("tp", "fsdp")}, name="words_over_both"
    ),
}
TASKS: tuple[Task, ...] = ("train", "score", "logits", "hidden", "prefill", "decode")


@pytest.mark.parametrize("head", ["vocab", "hidden", "replicated"])
@pytest.mark.parametrize(
    ("config", "task"),
    [
        pytest.param(NARROW, "train", id="narrow train"),
        pytest.param(NARROW, "decode", id="narrow decode"),
        pytest.param(WIDE, "score", id="wide untied score"),
        pytest.param(WIDE, "prefill", id="wide untied prefill"),
    ],
)
def test_steps_under_each_head_layout_are_what_was_predicted(
    config: ModelConfig, task: Task, head: HeadLayout
) -> None:
    assert as_expected(Case(task, BOTH, config, head=head).audit) == []


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("config", [NARROW, WIDE], ids=["narrow", "wide untied"])
def test_steps_of_every_task_are_what_was_predicted(config: ModelConfig, task: Task) -> None:
    assert as_expected(Case(task, BOTH, config).audit) == []


@pytest.mark.parametrize("task", ["train", "prefill", "hidden"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_steps_under_rules_that_cut_words_are_what_was_predicted(rules: Rules, task: Task) -> None:
    assert as_expected(Case(task, BOTH, NARROW, rules).audit) == []


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "roberta"])
def test_training_cut_over_the_sequence_is_what_was_predicted(name: str) -> None:
    """Biases of norms at both ends, and one gradient for the tables of words and of positions."""
    assert as_expected(Case("train", BOTH, CONFIGS[name], SEQUENCE).audit) == []


def test_hidden_states_of_a_model_with_a_head_of_its_own_are_what_was_predicted() -> None:
    assert as_expected(Case("hidden", BOTH, CONFIGS["roberta"]).audit) == []
