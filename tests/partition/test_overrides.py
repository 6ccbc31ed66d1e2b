"""Overrides: EasyLM's spelling is read, each decides what it matches, none is without effect unnoticed."""

from __future__ import annotations

import re

import pytest

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rules import Override

CONFIG = ModelConfig(
    vocab_size=101,
    embed_dim=48,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    mlp_dim=90,
    max_position=64,
)


def plan(*texts: str, fsdp: int = 2, tp: int = 2) -> Plan:
    return plan_model(CONFIG, MeshSpec(fsdp=fsdp, tp=tp), overrides=[Override.parse(text) for text in texts])


@pytest.mark.parametrize(
    ("text", "pattern", "spec"),
    [
        ("mlp/down_proj=tp,fsdp", "mlp/down_proj", (("tp",), ("fsdp",))),
        ("mlp/down_proj=P('tp', 'fsdp')", "mlp/down_proj", (("tp",), ("fsdp",))),
        ('mlp/down_proj=PS("mp", "fsdp")', "mlp/down_proj", (("tp",), ("fsdp",))),
        ("mlp/down_proj=PartitionSpec('mp', None)", "mlp/down_proj", (("tp",), ())),
        ("mlp/down_proj=P(('fsdp','mp'),None)", "mlp/down_proj", (("fsdp", "tp"), ())),
        ("mlp/down_proj=None,(fsdp,tp)", "mlp/down_proj", ((), ("fsdp", "tp"))),
        ("mlp/down_proj=P(None, None,)", "mlp/down_proj", ((), ())),
        ("mlp/down_proj = P ( 'tp' , None )", "mlp/down_proj", (("tp",), ())),
        (".*norm.*=None", ".*norm.*", ((),)),
        ("(?P<x>gate|up)_proj=tp,None", "(?P<x>gate|up)_proj", (("tp",), ())),
    ],
)
def test_every_documented_spelling_is_read(
    text: str, pattern: str, spec: tuple[tuple[str, ...], ...]
) -> None:
    override = Override.parse(text)
    assert (override.pattern, override.spec, override.text) == (pattern, spec, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mlp/down_proj", "no REGEX=SPEC form"),
        ("=tp,fsdp", "no REGEX=SPEC form"),
        ("(mlp=tp,fsdp", "no regular expression"),
        ("mlp=", "cannot be read"),
        ("mlp=P()", "cannot be read"),
        ("mlp=tp,,fsdp", "cannot be read"),
        ("mlp=P('tp','fsdp'", "cannot be read"),
        ("mlp=tp fsdp", "cannot be read"),
        ("mlp=tp,tensor", "unknown mesh axis 'tensor'; the axes are dp, fsdp, tp"),
        ("mlp=tq,None", "unknown mesh axis 'tq'; the axes are dp, fsdp, tp; did you mean 'tp'?"),
        ("mlp=(tp,mp),None", "names mesh axis 'tp' twice for one dim; write 'mlp=tp,None'"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        Override.parse(text)
    assert repr(text) in str(caught.value)


def test_an_override_decides_what_its_pattern_finds_anywhere_in_the_path_and_nothing_else() -> None:
    made, default = plan("mlp/(gate|up)_proj/kernel=P('fsdp', 'mp')"), plan()
    for name in ("gate", "up"):
        decision = made[f"layers/mlp/{name}_proj/kernel"]
        assert decision.spec == ((), ("fsdp",), ("tp",))
        assert decision.decided_by == "override mlp/(gate|up)_proj/kernel=P('fsdp', 'mp')"
    changed = {d.path for d in made.decisions if d != default[d.path]}
    assert changed == {"layers/mlp/gate_proj/kernel", "layers/mlp/up_proj/kernel"}


def test_the_layers_dim_may_be_left_out_or_given_as_none() -> None:
    assert plan("up_proj=fsdp,tp")["layers/mlp/up_proj/kernel"].spec == ((), ("fsdp",), ("tp",))
    assert plan("up_proj=None,fsdp,tp")["layers/mlp/up_proj/kernel"].spec == ((), ("fsdp",), ("tp",))
    with pytest.raises(
        ConfigError, match=r"cuts the layers of layers/mlp/up_proj/kernel \(layers 2, mlp 90, embed 48\)"
    ):
        plan("up_proj=fsdp,None,tp")


def test_the_first_override_that_matches_wins() -> None:
    made = plan("mlp/up_proj=None,None", "mlp/.*_proj=fsdp,None")
    assert made["layers/mlp/up_proj/kernel"].spec == ((), (), ())
    assert made["layers/mlp/gate_proj/kernel"].spec == ((), ("fsdp",), ())


def test_padding_stays_as_it_is_under_an_override_and_is_still_named() -> None:
    made = plan("embed/table=None,(fsdp,tp)")
    table = made["embed/table"]
    assert table.shape == table.use_shape == (102, 48)
    assert "vocab 101: padded to 102" in "; ".join(table.notes)


def test_dims_that_no_rule_cuts_can_be_cut() -> None:
    made = plan("q_proj=None,None,None,fsdp,tp", "k_proj=None,tp,fsdp", tp=4)
    assert made["layers/attn/q_proj/kernel"].spec == ((), (), (), ("fsdp",), ("tp",))
    assert made["layers/attn/k_proj/kernel"].spec == ((), (), ("tp",), ("fsdp",))


def test_an_override_that_matches_nothing_is_refused_with_the_nearest_path() -> None:
    with pytest.raises(
        ConfigError, match="'mlp/w_down=tp,fsdp' matches no parameter; nearest is layers/mlp/down"
    ):
        plan("mlp/w_down=tp,fsdp")


@pytest.mark.parametrize(
    "texts",
    [
        ("mlp/.*_proj=fsdp,None", "mlp/up_proj=None,None"),
        ("mlp/up_proj=None,None", "mlp/up_proj=None,None"),
    ],
)
def test_an_override_behind_others_that_match_all_of_its_parameters_is_refused(
    texts: tuple[str, ...],
) -> None:
    with pytest.raises(
        ConfigError, match=f"'mlp/up_proj=None,None' decides nothing: the earlier '{texts[0]}'"
    ):
        plan(*texts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("embed/table=tp", "has 1 entry, but embed/table has 2 dims (vocab 102, embed 48)"),
        (
            "up_proj=tp",
            "has 1 entry, but layers/mlp/up_proj/kernel has 3 dims (layers 2, mlp 90, embed 48), of which"
            " layers may be left out",
        ),
        (".*=None,None", "has 2 entries, but final_norm/scale has 1 dim (vector 48)"),
    ],
)
def test_an_override_of_the_wrong_rank_is_refused_with_the_dims_that_there_are(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(text)


def test_an_override_whose_axes_do_not_divide_the_dim_is_refused_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match="tp = 5 does not divide dim embed of embed/table, which is 48"):
        plan("embed/table=None,tp", tp=5)
    with pytest.raises(
        ConfigError, match="tp×fsdp = 32 does not divide dim embed of embed/table, which is 48"
    ):
        plan("embed/table=None,(fsdp,tp)", fsdp=8, tp=4)
