"""The Plan decides every parameter by a rule, names every padding and fallback, refuses what it cannot do."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.families import config_from_hf
from shardwise.families.presets import PRESETS
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import declared_params, plan_model
from shardwise.partition.decide import make_plan
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.padding import Padding, round_up
from shardwise.partition.plan import ParamSpec, Plan, Use, named_sharding, partition_spec
from shardwise.partition.rules import Rules


def config(**changes: Any) -> ModelConfig:
    """9 query heads in 3 kv groups, biases, untied; mlp 90 and vocab 101 that few axes divide."""
    sizes = {
        "vocab_size": 101, "embed_dim": 48, "num_layers": 2, "num_heads": 9, "num_kv_heads": 3, "head_dim": 8,
        "mlp_dim": 90, "max_position": 64, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def plan(dp: int = 1, fsdp: int = 1, tp: int = 1, **changes: Any) -> Plan:
    return plan_model(config(**changes), MeshSpec(dp, fsdp, tp))


def with_rule(logical: str, *mesh_axes: str) -> Rules:
    """The default rules with one changed."""
    return Rules().changed({logical: mesh_axes})


SIZES = st.integers(1, 5)


@given(SIZES, SIZES, SIZES, st.sampled_from([48, 45, 7]), st.sampled_from([(9, 3), (8, 2), (5, 1), (6, 6)]))
def test_every_decision_can_be_hosted_and_says_what_it_pads(
    dp: int, fsdp: int, tp: int, embed: int, heads: tuple[int, int]
) -> None:
    num_heads, num_kv_heads = heads
    made = plan(dp, fsdp, tp, embed_dim=embed, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert made.paths == tuple(param.path for param in declared_params(made.config))
    for d in made.decisions:
        assert len(d.spec) == len(d.axes) == len(d.shape) == len(d.use_shape) == len(d.true_shape)
        used = [axis for mesh_axes in d.spec for axis in mesh_axes]
        assert len(set(used)) == len(used)
        for size, mesh_axes in zip(d.shape, d.spec, strict=True):
            assert size % made.mesh.size(mesh_axes) == 0
        assert all(t <= s for t, s in zip(d.use_shape, d.shape, strict=True))
        if math.prod(d.shape) != math.prod(d.true_shape):
            assert d.notes, f"{d.path} is padded from {d.true_shape} to {d.shape} without a word"
        if d.notes:
            assert fsdp > 1 or tp > 1
        assert d.decided_by


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("embed/table", (("tp",), ("fsdp",))),
        ("lm_head/kernel", (("tp",), ("fsdp",))),
        ("final_norm/scale", ((),)),
        ("layers/attn_norm/scale", ((), ())),
        ("layers/attn/q_proj/kernel", ((), ("tp",), (), (), ("fsdp",))),
        ("layers/attn/q_proj/bias", ((), ("tp",), (), ())),
        ("layers/attn/k_proj/kernel", ((), ("tp",), (), ("fsdp",))),
        ("layers/attn/v_proj/bias", ((), ("tp",), ())),
        ("layers/attn/o_proj/kernel", ((), ("fsdp",), ("tp",), (), ())),
        ("layers/attn/o_proj/bias", ((), ())),
        ("layers/mlp/gate_proj/kernel", ((), ("tp",), ("fsdp",))),
        ("layers/mlp/up_proj/bias", ((), ("tp",))),
        ("layers/mlp/down_proj/kernel", ((), ("fsdp",), ("tp",))),
        ("layers/mlp/down_proj/bias", ((), ())),
    ],
)
def test_the_default_rules_cut_columns_then_rows_over_tp_and_embed_over_fsdp(path: str, spec: Any) -> None:
    assert plan(1, 2, 3)[path].spec == spec


def test_tied_embeddings_have_no_head_of_their_own() -> None:
    assert "lm_head/kernel" not in plan(tie_embeddings=True)
    assert "lm_head/kernel" in plan()


def notes(made: Plan, path: str) -> str:
    return "; ".join(made[path].notes)


def test_notes_name_the_padding_of_heads_mlp_and_vocab() -> None:
    made = plan(tp=4)
    assert "9 heads in 3 kv groups: padded to 4 kv groups of 3" in notes(made, "layers/attn/q_proj/kernel")
    assert "9 heads" in notes(made, "layers/attn/o_proj/kernel")
    assert "3 kv heads: padded to 4" in notes(made, "layers/attn/k_proj/kernel")
    assert "mlp 90: padded to 92" in notes(made, "layers/mlp/down_proj/kernel")
    assert "mlp 90: padded to 92" in notes(made, "layers/mlp/up_proj/bias")
    assert "vocab 101: padded to 104" in notes(made, "embed/table")
    assert made["embed/table"].true_shape == (101, 48)
    assert made["embed/table"].shape == (104, 48)


def test_notes_name_kv_heads_that_are_held_once_and_query_heads_padded_for_it() -> None:
    made = plan(tp=4, num_heads=5, num_kv_heads=1)
    key = made["layers/attn/k_proj/kernel"]
    assert "1 kv heads: held once, repeated 3× at use" in "; ".join(key.notes)
    assert key.spec[1] == () and key.shape[1] == 1
    assert "5 heads in 1 kv groups: padded to 4 slots of 2" in notes(made, "layers/attn/q_proj/kernel")
    even = plan(tp=4, num_heads=8, num_kv_heads=2)
    assert even["layers/attn/q_proj/kernel"].notes == ()
    assert "held once, repeated 2×" in notes(even, "layers/attn/k_proj/kernel")


def test_fsdp_that_does_not_divide_embed_cuts_another_dim_and_a_tables_embed_is_never_padded() -> None:
    made = plan(fsdp=5)  # embed 48; heads 3, q_per_kv 3, head_dim 8; mlp 90; vocab 101
    assert made["layers/mlp/up_proj/kernel"].spec == ((), ("tp", "fsdp"), ())
    assert "fsdp 5 does not divide embed 48: cuts mlp 90 instead" in notes(made, "layers/mlp/up_proj/kernel")
    assert all(
        size == 48
        for d in made.decisions
        for axis, size in zip(d.axes, d.shape, strict=True)
        if axis == "embed" and d.use.kind != "kernel"
    )
    # A free dim is preferred to one that tp cuts already, even if that is larger.
    free = plan(fsdp=4, tp=2, embed_dim=45, num_heads=24, num_kv_heads=24)["layers/attn/q_proj/kernel"]
    assert free.spec == ((), ("tp",), (), ("fsdp",), ())


def test_fsdp_never_cuts_layers_though_it_may_divide_their_number() -> None:
    weight = plan(fsdp=4, embed_dim=45, num_layers=4)["layers/mlp/up_proj/kernel"]
    assert weight.spec == ((), ("tp", "fsdp"), ())
    assert weight.shape == (4, 92, 45)


def test_where_no_dim_is_divided_by_fsdp_the_cheapest_one_is_stored_padded() -> None:
    made = plan(fsdp=5)
    table = made["embed/table"]
    assert table.spec == (("tp", "fsdp"), ())
    assert table.use_shape == (101, 48) and table.shape == (105, 48)
    assert "nor any other dim: vocab stored as 105 instead of 101" in notes(made, "embed/table")
    query = made["layers/attn/q_proj/kernel"]  # 3→5, 3→5, 8→10 or 48→50: embed grows least
    assert query.shape == (2, 3, 3, 8, 50) and query.use_shape == (2, 3, 3, 8, 48)
    both = plan(fsdp=5, tp=2)["embed/table"]
    assert both.use_shape == (102, 48) and both.shape == (110, 48)
    assert len(both.notes) == 2


def test_a_logical_axis_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rule for logical axis 'pages'; rules exist for layers, vocab"):
        make_plan(config(), [ParamSpec("moe/kernel", ("pages", "embed"), "normal", Use("scale"))], MeshSpec())
    without = Rules(params=tuple(row for row in Rules().params if row[0] != "mlp"))
    with pytest.raises(ConfigError, match="no rule for logical axis 'mlp'"):
        plan_model(config(), MeshSpec(), without)


def test_two_dims_on_one_mesh_axis_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'tp' on two dims of embed/table, vocab 101 and embed 48"):
        plan_model(config(), MeshSpec(), with_rule("embed", "tp"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ((("mlp", ("tensor",)),), "rule mlp: "),
        ((("mlp", ("tp", "tp")),), "rule mlp: "),
        ((("mlp", ("tp",)), ("mlp", ())), "'mlp' has more than one rule"),
    ],
)
def test_a_rules_table_that_contradicts_itself_is_refused(table: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Rules(params=table)


def test_an_axis_that_does_not_divide_a_dim_which_is_never_padded_is_refused() -> None:
    words = (
        "layers/attn/k_proj/bias, by rules kv_heads→tp, head_dim→dp: dim head_dim of 8 is not divided by"
        " dp = 3, and its policy is error"
    )
    with pytest.raises(ConfigError, match=words):
        plan_model(config(), MeshSpec(dp=3), with_rule("head_dim", "dp"))


def test_rules_that_cut_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers run one after the other"):
        plan_model(config(), MeshSpec(dp=2), with_rule("layers", "dp"))


def test_other_rules_decide_and_are_named() -> None:
    made = plan_model(config(), MeshSpec(fsdp=2, tp=2), with_rule("embed"))
    assert made["embed/table"].spec == (("tp",), ())
    assert made["embed/table"].decided_by == "rules vocab→tp"
    assert plan(tp=2)["embed/table"].decided_by == "rules vocab→tp, embed→fsdp"
    assert "whole" in made["final_norm/scale"].decided_by


def test_equal_plans_are_equal_and_hash_alike_and_others_are_not() -> None:
    made = plan(1, 2, 2)
    again = plan(1, 2, 2)
    assert made == again and hash(made) == hash(again) and made is not again
    others = [plan(1, 4, 1), plan(2, 2, 2), plan(1, 2, 2, mlp_dim=92)]
    others.append(plan_model(config(), MeshSpec(1, 2, 2), with_rule("embed")))
    assert all(made != other for other in others)
    assert len({made, again, *others}) == 5


def test_the_batch_is_split_over_dp_and_fsdp() -> None:
    made = plan(2, 3, 4)
    assert made.batch_axes() == ("dp", "fsdp")
    assert made.batch_multiple() == 6


def test_specs_become_jax_shardings() -> None:
    assert partition_spec(((), ("tp",), ("dp", "fsdp"))) == jax.sharding.PartitionSpec(
        None, "tp", ("dp", "fsdp")
    )
    mesh = jax.sharding.Mesh([[[jax.devices()[0]]]], ("dp", "fsdp", "tp"))
    made = plan()
    assert made.shardings(mesh) == {d.path: named_sharding(mesh, d.spec) for d in made.decisions}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 8), (1, 1, 7)])
def test_every_preset_can_be_planned_with_a_decision_for_each_parameter(
    name: str, sizes: tuple[int, int, int]
) -> None:
    found = config_from_hf(PRESETS[name])
    made = plan_model(found, MeshSpec(*sizes))
    assert set(made.paths) == {param.path for param in declared_params(found)}
    assert made.padding == Padding.choose(found, sizes[2])
    assert all(
        d.shape == made.padding.use_shape(d.axes) or "stored as" in "; ".join(d.notes) for d in made.decisions
    )
    assert made.padding.vocab == round_up(found.vocab_size, sizes[2])


def test_the_largest_preset_is_planned_on_512_devices_without_arrays_and_quickly() -> None:
    found = config_from_hf(PRESETS["llama3.1-405b"])
    declared_params.cache_clear()
    before = time.process_time()
    made = plan_model(found, MeshSpec(fsdp=64, tp=8))
    # Takes 0.1 s of processor time; the bound only tells shapes alone from drawing or copying 405e9 numbers.
    assert time.process_time() - before < 5
    assert not any(d.notes for d in made.decisions)
    largest = max(math.prod(d.shape) // made.mesh.size(sum(d.spec, ())) for d in made.decisions)
    assert largest == 126 * 16384 * 53248 // 512
