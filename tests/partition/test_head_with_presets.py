"""Every head layout goes with every preset: it decides the head, and nothing but the head."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import HeadLayout, Override, Rules

UNTIED = ModelConfig(
    vocab_size=101, embed_dim=45, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=8, mlp_dim=90,
    max_position=64, head_bias=True,
)  # fmt: skip
MODELS = {"untied": UNTIED, "tied": replace(UNTIED, tie_embeddings=True)}
LAYOUTS: tuple[HeadLayout, ...] = get_args(HeadLayout)


def plan(
    model: str, rules: Rules, layout: HeadLayout | None = None, override: str = "", tp: int = 2, fsdp: int = 2
) -> Plan:
    overrides = [Override.parse(override)] if override else []
    return plan_model(MODELS[model], MeshSpec(fsdp=fsdp, tp=tp), rules, overrides, layout)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_the_layout_decides_the_head_and_nothing_else(name: str, layout: HeadLayout, model: str) -> None:
    made, without = plan(model, PRESETS[name], layout), plan(model, PRESETS[name])
    assert made.head_layout == made.head_asked == layout
    head = made[made.head_path]
    assert head.decided_by == f"head layout {layout}"
    want = {"vocab": (102, 45), "hidden": (101, 46), "replicated": (101, 45)}[layout]
    assert head.use_shape == want
    cut = {"vocab": (("tp",), ()), "hidden": ((), ("tp",)), "replicated": ((), ())}[layout]
    assert head.at_use() == cut
    assert made["lm_head/bias"].at_use() == cut[:1]
    for d in made.decisions:
        if d.path not in (made.head_path, "lm_head/bias"):
            assert d == without[d.path], d.path
    assert made.activations == without.activations


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "cut"), [("fsdp+tp", True), ("fsdp", True), ("tp", False)])
def test_the_layout_leaves_the_cut_over_fsdp_to_the_rules(name: str, cut: bool, layout: HeadLayout) -> None:
    made = plan("untied", PRESETS[name], layout)
    assert ("fsdp" in sum(made["lm_head/kernel"].spec, ())) == cut


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "params",
    [
        {"vocab": ("tp", "fsdp"), "embed": ()},
        {"vocab": (), "embed": ("tp", "fsdp"), "heads": (), "kv_heads": (), "mlp": ()},
        {"vocab": ("fsdp",), "embed": ("tp",), "heads": (), "kv_heads": (), "mlp": ()},
    ],
)
def test_the_layout_holds_whichever_dim_the_rules_put_tp_and_fsdp_on(
    params: dict[str, tuple[str, ...]], layout: HeadLayout
) -> None:
    config = replace(UNTIED, embed_dim=48)
    made = plan_model(config, MeshSpec(1, 2, 2), Rules().changed(params), head_layout=layout)
    assert made.head_layout == layout
    assert "fsdp" in sum(made["lm_head/kernel"].spec, ())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_and_an_override_for_the_same_head_are_refused(layout: HeadLayout, model: str) -> None:
    path = {"untied": "lm_head/kernel", "tied": "embed/table"}[model]
    with pytest.raises(
        ConfigError, match=f"head layout '{layout}' and override '{path}=whole' both decide {path}"
    ):
        plan(model, Rules(), layout, f"{path}=whole")


def test_the_refusal_names_the_layout_asked_for_even_where_a_policy_changes_it() -> None:
    rules = Rules().changed(policy={"vocab": "replicate"})
    with pytest.raises(ConfigError, match="head layout 'vocab' and override"):
        plan("untied", rules, "vocab", "lm_head/kernel=whole")


def test_an_override_for_the_table_alone_goes_with_a_layout_of_an_untied_head() -> None:
    made = plan("untied", Rules(), "hidden", "embed/table=whole")
    assert made["embed/table"].spec == ((), ()) and made.head_layout == "hidden"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("rules", "override", "layout"),
    [
        (PRESETS["fsdp+tp"], "", "vocab"),
        (PRESETS["easylm"], "", "vocab"),
        (PRESETS["tp"], "", "vocab"),
        (PRESETS["fsdp"], "", "replicated"),
        (PRESETS["replicated"], "", "replicated"),
        (Rules().changed({"vocab": ()}), "", "replicated"),
        (Rules(), "lm_head/kernel|embed/table=whole", "replicated"),
        (PRESETS["tp"], "lm_head/kernel|embed/table=None,tp", "hidden"),
        (PRESETS["fsdp"], "lm_head/kernel|embed/table=None,(fsdp,tp)", "hidden"),
    ],
)
def test_without_a_layout_rules_and_overrides_decide_the_head(
    model: str, rules: Rules, override: str, layout: HeadLayout
) -> None:
    config = replace(MODELS[model], embed_dim=48)
    overrides = [Override.parse(override)] if override else []
    made = plan_model(config, MeshSpec(1, 2, 2), rules, overrides)
    assert made.head_asked is None and made.head_layout == layout


def test_a_head_cut_over_an_axis_that_splits_the_batch_is_whole_at_use() -> None:
    whole = (("dp", "fsdp", "tp"), ())
    rules = PRESETS["fsdp"].changed({"vocab": ("tp",)}, {"tokens": whole})
    assert plan("untied", rules).head_layout == "replicated"


@pytest.mark.parametrize("model", MODELS)
def test_a_vocabulary_that_its_policy_leaves_whole_is_not_cut_by_its_layout_and_the_head_says_why(
    model: str,
) -> None:
    for preset in ("fsdp+tp", "fsdp"):
        made = plan(model, PRESETS[preset].changed(policy={"vocab": "replicate"}), "vocab")
        assert made.head_layout == "replicated" and made.head_asked == "vocab"
        note = "tp 2 does not divide vocab 101: whole on each device (policy replicate)"
        assert note in made[made.head_path].notes


def test_the_vocabularys_policy_does_not_act_where_no_vocabulary_is_cut() -> None:
    rules = Rules().changed(policy={"vocab": "error"})
    assert plan("tied", rules, "hidden").head_layout == "hidden"
    with pytest.raises(ConfigError, match="tp 2 does not divide vocab 101"):
        plan("untied", rules, "hidden")


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="head layout 'columns': allowed are vocab, hidden, replicated"):
        plan("tied", Rules(), "columns")  # type: ignore[arg-type]
