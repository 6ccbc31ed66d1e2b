"""Policies where an axis does not divide a dim: pad it, leave it whole, or refuse; each says so and keeps the
numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.partition.numbers import CONFIG as TINY
from tests.partition.numbers import assert_as_one_device, assert_decodes_as_one_device, tied

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import HeadSlots
from shardwise.partition.plan import Plan
from shardwise.partition.rules import HeadLayout, Override, Policy, Rules

CONFIG = ModelConfig(
    vocab_size=101, embed_dim=45, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=6, mlp_dim=50,
    max_position=64, qkv_bias=True, mlp_bias=True, head_bias=True,
)  # fmt: skip


def plan(
    policy: dict[str, Policy],
    params: dict[str, tuple[str, ...]] | None = None,
    head_layout: HeadLayout | None = None,
    config: ModelConfig = CONFIG,
    **mesh: int,
) -> Plan:
    rules = Rules().changed(params, policy=policy)
    return plan_model(config, MeshSpec(**mesh), rules, head_layout=head_layout)


def test_pad_pads_heads_mlp_and_vocab_and_says_so() -> None:
    made = plan({}, tp=4)
    assert made["layers/attn/q_proj/kernel"].shape == (2, 4, 3, 6, 45)
    assert made["layers/mlp/up_proj/kernel"].shape == (2, 52, 45)
    assert made["embed/table"].shape == (104, 45)
    notes = "\n".join(made.fallbacks)
    for words in (
        "tp 4 does not divide 9 heads in 3 kv groups: padded to 4 kv groups of 3, masked",
        "tp 4 does not divide 3 kv heads: padded to 4",
        "tp 4 does not divide mlp 50: padded to 52",
        "tp 4 does not divide vocab 101: padded to 104",
    ):
        assert words in notes


# policy → the parameters that stay whole over tp, the activations that do, and what the note says
WHOLE = {
    "heads": (
        ("attn/q_proj", "attn/k_proj", "attn/v_proj", "attn/o_proj"),
        ("query", "key", "value", "attention_out", "kv_cache"),
        "tp 4 does not divide heads 9 in 3 kv groups: whole on each device (policy replicate)",
    ),
    "mlp": (
        ("mlp/gate_proj", "mlp/up_proj", "mlp/down_proj"),
        ("mlp_hidden",),
        "tp 4 does not divide mlp 50: whole on each device (policy replicate)",
    ),
    "vocab": (
        ("embed/table", "lm_head"),
        (),
        "tp 4 does not divide vocab 101: whole on each device (policy replicate)",
    ),
}


@pytest.mark.parametrize("logical", WHOLE)
def test_replicate_leaves_parameters_and_activations_whole_in_their_true_shape_and_says_so(
    logical: str,
) -> None:
    prefixes, activations, note = WHOLE[logical]
    made, padded = plan({logical: "replicate"}, tp=4), plan({}, tp=4)
    for d in made.decisions:
        if d.path.removeprefix("layers/").startswith(prefixes):
            assert d.shape == d.true_shape and "tp" not in sum(d.spec, ()), d.path
        else:
            assert d == padded[d.path], d.path
    for a in made.activations:
        whole = "tp" not in sum(a.spec, ())
        assert whole == (a.name in activations or a.name in ("tokens", "residual")), a.name
    (line,) = (line for line in made.fallbacks if line.startswith(note))
    assert all(name in line for name in (*prefixes, *activations))


def test_a_tensor_that_an_override_cuts_all_the_same_is_not_said_to_be_whole() -> None:
    rules = Rules().changed({"mlp": ("dp", "tp")}, policy={"mlp": "replicate"})
    override = Override.parse("up_proj/kernel=tp,None")  # tp 2 alone divides mlp 50
    made = plan_model(CONFIG, MeshSpec(dp=2, tp=2), rules, [override])
    assert made["layers/mlp/up_proj/kernel"].notes == ()
    assert "policy replicate" in "; ".join(made["layers/mlp/gate_proj/kernel"].notes)


def test_replicate_leaves_an_activation_whole_that_has_a_rule_of_its_own() -> None:
    batch = ("dp", "fsdp")
    rules = Rules().changed(policy={"mlp": "replicate"}, activations={"mlp_hidden": (batch, (), ("tp",))})
    made = plan_model(CONFIG, MeshSpec(tp=4), rules)
    assert made.activation("mlp_hidden") == (batch, (), ())


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("logical", WHOLE)
def test_replicate_computes_what_one_device_does(logical: str, tp: int) -> None:
    config = replace(TINY, mlp_dim=15)  # which 2 does not divide either
    made = plan({logical: "replicate"}, config=config, tp=tp)
    assert "policy replicate" in "; ".join(made.fallbacks)
    assert_as_one_device(made)


def test_replicating_everything_decodes_and_trains_as_one_device_with_fsdp_too() -> None:
    made = plan(
        {"heads": "replicate", "mlp": "replicate", "vocab": "replicate", "fsdp": "replicate"},
        config=tied(TINY), fsdp=2, tp=4,
    )  # fmt: skip
    assert_as_one_device(made)
    assert_decodes_as_one_device(made)


PARTS = "or cut it into a number of parts that divides it, such as"


def policy_of(logical: str) -> str:
    return f"write policy: {{{logical}: pad}} (or replicate) in a rules file, {PARTS}"


ROWS = {"embed": ("tp",), "vocab": (), "heads": (), "kv_heads": (), "mlp": ()}
"""Every kernel cut over its inputs."""

# policy error → mesh and rules, and the message: rule or tensor, dim, both sizes and parts that would do
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "heads",
        {"tp": 4},
        "rule 'heads' → tp: tp 4 does not divide heads 9 in 3 kv groups of layers/attn/o_proj/kernel and 2"
        f" more, and its policy is error; {policy_of('heads')} 3, 1, 9",
    ),
    ("heads", {"tp": 2}, f"{PARTS} 1, 3, 9"),
    (
        "kv_heads",
        {"tp": 2},
        "rule 'heads' → tp: tp 2 does not divide kv_heads 3 of layers/attn/k_proj/kernel and 3 more, and its"
        f" policy is error; write policy: {{kv_heads: pad}} in a rules file, {PARTS} 1, 3",
    ),
    (
        "mlp",
        {"tp": 4},
        "rule 'mlp' → tp: tp 4 does not divide mlp 50 of layers/mlp/down_proj/kernel and 4 more, and its"
        f" policy is error; {policy_of('mlp')} 5, 2, 1",
    ),
    (
        "vocab",
        {"tp": 2},
        "rule 'vocab' → tp: tp 2 does not divide vocab 101 of embed/table and 2 more, and its policy is"
        f" error; {policy_of('vocab')} 1, 101",
    ),
    (
        "mlp",
        {"tp": 2, "dp": 2, "params": {"mlp": ("dp", "tp")}},
        "rule 'mlp' → dp+tp: dp×tp 4 does not divide mlp 50",
    ),
    (
        "vocab",
        {"tp": 2, "params": {"vocab": ()}, "head_layout": "vocab"},
        "head layout 'vocab': tp 2 does not divide vocab 101 of lm_head/kernel, and its",
    ),
    (
        "kv_heads",
        {"tp": 2, "params": {"heads": ()}},
        "rule 'kv_heads' → tp: tp 2 does not divide kv_heads 3 of layers/attn/k_proj/kernel",
    ),
    (
        "embed",
        {"tp": 2, "params": ROWS},
        "embed/table, by rules embed→tp: dim embed of 45 is not divided by tp = 2, and its policy is error;"
        f" write policy: {{embed: replicate}} in a rules file, {PARTS} 1, 3, 5",
    ),
    (
        "q_per_kv",
        {"tp": 2, "params": {"q_per_kv": ("tp",), "heads": (), "kv_heads": ()}},
        "by rules embed→fsdp, q_per_kv→tp: dim q_per_kv of 3 is not divided by tp = 2",
    ),
    (
        "head_dim",
        {"tp": 4, "params": {"head_dim": ("tp",), "heads": (), "kv_heads": ()}},
        "dim head_dim of 6 is not divided by tp = 4",
    ),
    ("vector", {"tp": 2, "params": {"vector": ("tp",)}}, "dim vector of 45 is not divided by tp = 2"),
    (
        "fsdp",
        {"fsdp": 7},
        "embed/table (vocab 101, embed 45), by rules vocab→tp, embed→fsdp: fsdp 7 does not divide embed 45"
        " nor any other dim, and the policy of fsdp is error; write policy: {fsdp: pad} (or replicate) in a"
        " rules file, or take a mesh whose fsdp divides one, such as 5, 9, 3",
    ),
]


@pytest.mark.parametrize(("logical", "given", "words"), REFUSED)
def test_error_is_refused_with_rule_or_tensor_sizes_and_what_would_do(
    logical: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        plan({logical: "error"}, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("logical", "given"), [(logical, given) for logical, given, _ in REFUSED])
def test_error_lets_pass_what_divides(logical: str, given: dict[str, Any]) -> None:
    even = replace(CONFIG, vocab_size=112, embed_dim=56, num_heads=16, num_kv_heads=4, head_dim=8, mlp_dim=56)
    made = plan({logical: "error"}, config=even, **given)
    assert not any(logical in note for note in made.fallbacks)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_the_parts_that_the_error_for_heads_proposes_do_divide(kv_heads: int, group: int) -> None:
    for tp in range(2, 9):
        config = replace(CONFIG, num_heads=kv_heads * group, num_kv_heads=kv_heads)
        try:
            plan({"heads": "error"}, config=config, tp=tp)
        except ConfigError as error:
            proposed = str(error).rpartition("such as ")[2].split(", ")
            for number in map(int, proposed):
                plan({"heads": "error"}, config=config, tp=number)
        else:
            assert HeadSlots.choose(kv_heads, group, tp).padded_heads == kv_heads * group


def test_kv_heads_may_be_repeated_under_error_for_heads_alone() -> None:
    config = replace(CONFIG, num_heads=8, num_kv_heads=2)
    assert plan({"heads": "error"}, config=config, tp=4).padding.heads.repeat == 2
    with pytest.raises(ConfigError, match="tp 4 does not divide kv_heads 2"):
        plan({"heads": "error", "kv_heads": "error"}, config=config, tp=4)


def test_kv_heads_that_the_heads_rule_does_not_pad_are_left_whole_with_a_note() -> None:
    made = plan({}, {"heads": ()}, tp=2)
    key = made["layers/attn/k_proj/kernel"]
    assert key.spec == ((), (), (), ("fsdp",))
    assert key.notes == ("tp = 2 does not divide kv_heads 3: whole on each device",)


@pytest.mark.parametrize(
    ("params", "note"),
    [
        (ROWS, "tp = 2 does not divide embed 45"),
        ({"head_dim": ("dp",)}, "dp = 4 does not divide head_dim 6"),
        ({"q_per_kv": ("dp",)}, "dp = 4 does not divide q_per_kv 3"),
        ({"vector": ("tp",)}, "tp = 2 does not divide vector 45"),
    ],
)
def test_dims_that_are_never_padded_can_be_left_whole(params: Any, note: str) -> None:
    policy: dict[str, Policy] = dict.fromkeys(("embed", "head_dim", "q_per_kv", "vector"), "replicate")
    with pytest.raises(ConfigError, match="its policy is error"):
        plan({}, params, dp=4, tp=2)
    made = plan(policy, params, dp=4, tp=2)
    assert any(line.startswith(f"{note}: whole on each device (policy replicate)") for line in made.fallbacks)


@pytest.mark.parametrize("policy", ["pad", "replicate", "error"])
def test_fsdp_takes_another_dim_that_it_divides_before_its_policy_acts(policy: Policy) -> None:
    made = plan({"fsdp": policy}, config=replace(CONFIG, vocab_size=110), fsdp=2)
    up = made["layers/mlp/up_proj/kernel"]
    assert up.spec == ((), ("tp", "fsdp"), ())
    assert up.notes == ("fsdp 2 does not divide embed 45: cuts mlp 50 instead, at the same cost",)


def test_fsdp_that_divides_no_dim_pads_one_or_leaves_the_tensor_whole() -> None:
    padded = plan({"fsdp": "pad"}, fsdp=7)["embed/table"]
    assert padded.shape == (105, 45) and padded.spec == (("tp", "fsdp"), ())
    whole = plan({"fsdp": "replicate"}, fsdp=7)["embed/table"]
    assert whole.shape == (101, 45) and whole.spec == (("tp",), ())
    assert whole.notes == ("fsdp 7 does not divide embed 45 nor any other dim: held whole on each device",)


def test_fsdp_on_a_dim_that_is_padded_for_tp_does_not_pad_it_where_another_dim_divides() -> None:
    params = {"mlp": ("tp", "fsdp"), "embed": ()}
    up = plan({}, params, fsdp=3, tp=2)["layers/mlp/up_proj/kernel"]
    assert up.shape == up.true_shape == (2, 50, 45)
    assert up.spec == ((), ("tp",), ("fsdp",))
    assert up.notes == ("fsdp 3 does not divide mlp 50: cuts embed 45 instead, at the same cost",)


def test_fsdp_pads_a_dim_that_tp_does_not_cut_whichever_dim_its_rule_names() -> None:
    made = plan({}, {"mlp": ("tp", "fsdp"), "embed": ()}, fsdp=7, tp=2)["layers/mlp/up_proj/kernel"]
    assert made.shape == (2, 50, 49) and made.spec == ((), ("tp",), ("fsdp",))
    assert made.notes == (
        "fsdp 7 does not divide mlp 50 nor any other dim: embed stored as 49 instead of 45",
    )
