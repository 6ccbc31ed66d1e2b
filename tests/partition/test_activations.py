"""Activation rules change what moves, never the numbers: sequence parallelism, whole or cut activations."""

from __future__ import annotations

import re

import pytest
from tests.partition.numbers import CONFIG, assert_as_one_device, assert_decodes_as_one_device

from shardwise.errors import ConfigError
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rules import Rules, Spec

BATCH = ("dp", "fsdp")
CUTS: dict[str, dict[str, Spec]] = {
    "sequence parallel": {"residual": (BATCH, ("tp",), ())},
    "residual over embed": {"residual": (BATCH, (), ("tp",))},
    "mlp_hidden whole": {"mlp_hidden": (BATCH, (), ())},
    "kv_cache and query whole": {
        "kv_cache": (BATCH, (), (), ()),
        "query": (BATCH, (), (), (), ()),
    },
    "length in the middle": {
        "mlp_hidden": (BATCH, ("tp",), ()),
        "query": (BATCH, ("tp",), (), (), ()),
        "key": (BATCH, ("tp",), (), ()),
        "attention_out": (BATCH, ("tp",), (), (), ()),
    },
    "cache over its length": {"kv_cache": (BATCH, ("tp",), (), ())},
    "batch over dp alone": {"tokens": (("dp",), ())},
    "batch whole": {"tokens": ((), ())},
}


def made(cuts: str, mesh: MeshSpec) -> Plan:
    return plan_model(CONFIG, mesh, Rules().changed(activations=CUTS[cuts]))


@pytest.mark.parametrize("cuts", CUTS)
def test_logits_loss_and_gradients_are_those_of_one_device(cuts: str) -> None:
    assert_as_one_device(made(cuts, MeshSpec(2, 2, 2)))


def test_sequence_parallelism_without_dp_is_exact_too() -> None:
    assert_as_one_device(made("sequence parallel", MeshSpec(1, 2, 2)))


@pytest.mark.parametrize("cuts", ["sequence parallel", "length in the middle"])
def test_a_length_that_tp_does_not_divide_gives_the_same_numbers(cuts: str) -> None:
    assert_as_one_device(made(cuts, MeshSpec(1, 2, 2)), length=7)


@pytest.mark.parametrize(
    "cuts", ["sequence parallel", "residual over embed", "kv_cache and query whole", "cache over its length"]
)
def test_decoding_with_a_cache_gives_the_logits_of_one_device(cuts: str) -> None:
    assert_decodes_as_one_device(made(cuts, MeshSpec(1, 2, 2)))


def test_activations_follow_the_rules_of_their_logical_axes_and_the_batch_of_the_tokens() -> None:
    rules = Rules().changed({"mlp": ("tp", "fsdp"), "embed": ()}, activations={"tokens": (("dp",), ())})
    plan = plan_model(CONFIG, MeshSpec(2, 2, 2), rules)
    assert plan.activation("residual") == (("dp",), (), ())
    # fsdp cuts the stored kernel; at use it is gathered, so that the activation is cut over tp alone
    assert plan.activation("mlp_hidden") == (("dp",), (), ("tp",))
    assert plan.activation("query") == (("dp",), (), ("tp",), (), ())
    assert plan.batch_axes() == ("dp",) and plan.batch_multiple() == 2


def test_an_activation_with_a_rule_says_so_and_the_others_do_not() -> None:
    decisions = {a.name: a.decided_by for a in made("mlp_hidden whole", MeshSpec(tp=2)).activations}
    assert decisions.pop("mlp_hidden") == "activation rule 'mlp_hidden'"
    assert set(decisions.values()) == {"rules of its logical axes"}


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (
            {"residual": (BATCH, (), ("tp",))},
            "activation residual, by rule residual: [[dp, fsdp], null, tp]: dim embed of 12 is not divided"
            " by tp = 5, and its policy is error; write policy: {embed: replicate} in a rules file",
        ),
        (
            {"query": (BATCH, (), (), (), ("tp",))},
            "activation query, by rule query: [[dp, fsdp], null, null, null, tp]: dim head_dim of 4 is not"
            " divided by tp = 5, and its policy is error; write policy: {head_dim: replicate} in",
        ),
    ],
)
def test_an_activation_dim_that_is_not_divided_is_refused_by_name(cut: dict[str, Spec], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_model(CONFIG, MeshSpec(tp=5), Rules().changed(activations=cut))


def test_an_activation_is_padded_for_the_parameters_rule_alone() -> None:
    whole = Rules().changed({"mlp": ()}, activations={"mlp_hidden": (BATCH, (), ("tp",))})
    words = "mlp_hidden: .*: dim mlp of 14 is not divided by tp = 4, and .* only for .* rule 'mlp', nothing"
    with pytest.raises(ConfigError, match=words):
        plan_model(CONFIG, MeshSpec(tp=4), whole)
    assert plan_model(CONFIG, MeshSpec(tp=2), whole).activation("mlp_hidden")[2] == ("tp",)


def test_a_mesh_axis_that_a_batch_rule_leaves_without_work_is_noted() -> None:
    plan = plan_model(CONFIG, MeshSpec(2, 2, 2), Rules().changed(activations={"tokens": ((), ())}))
    assert plan.notes == (
        "mesh axis dp 2 cuts nothing under rules 'fsdp+tp': its devices repeat the same work",
    )
