"""Whatever the rules: a plan that the mesh can host and that hides nothing, or one line that refuses them."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import AXES, MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rules import ACTIVATIONS, DEFAULT_PARAMS, DEFAULT_POLICY, Override, Rules

MESH_AXES = st.lists(st.sampled_from(AXES), max_size=2, unique=True).map(tuple)
CONFIGS = [
    ModelConfig(
        vocab_size=vocab, embed_dim=embed, num_layers=2, num_heads=heads, num_kv_heads=kv, head_dim=head_dim,
        mlp_dim=mlp, max_position=8, tie_embeddings=tied, head_bias=True, qkv_bias=tied, mlp_bias=not tied,
    )
    for vocab, embed, heads, kv, head_dim, mlp, tied in [
        (101, 48, 9, 3, 6, 90, False), (96, 45, 8, 2, 8, 50, True), (7, 7, 5, 1, 2, 11, False),
    ]
]  # fmt: skip
POLICIES = st.dictionaries(
    st.sampled_from(sorted(DEFAULT_POLICY)), st.sampled_from(["pad", "replicate", "error"]), max_size=2
)
PARAMS = st.dictionaries(st.sampled_from(sorted(DEFAULT_PARAMS)), MESH_AXES, max_size=3)


@st.composite
def activations(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(ACTIVATIONS)), max_size=2, unique=True))
    batch = draw(st.sampled_from([("dp", "fsdp"), ("dp",), ()]))
    found = {"tokens": (batch, ())} if batch != ("dp", "fsdp") else {}
    for name in names:
        found[name] = (
            batch,
            *(draw(st.sampled_from([(), ("tp",), ("fsdp",)])) for _ in ACTIVATIONS[name][1:]),
        )
    return found


def maybe_an_override() -> st.SearchStrategy[list[str]]:
    patterns = st.sampled_from(
        ["embed/table", "lm_head", "k_proj/kernel", "mlp/.*kernel", "norm", ".*", "w1"]
    )
    entry = st.sampled_from(["None", "tp", "fsdp", "dp", "(tp,fsdp)", "(dp,tp)", "mp"])
    spec = st.one_of(st.just("whole"), st.lists(entry, min_size=1, max_size=4).map(",".join))
    one = st.builds("{}={}".format, patterns, spec).map(lambda text: [text])
    return st.one_of(st.just([]), st.just([]), one)  # most are refused, and the rest should be seen too


OVERRIDE = maybe_an_override()
MESHES = st.builds(MeshSpec, *[st.integers(1, 5)] * 3)
LAYOUTS = st.sampled_from([None, None, "vocab", "hidden", "replicated"])


@given(st.sampled_from(CONFIGS), MESHES, PARAMS, activations(), POLICIES, OVERRIDE, OVERRIDE, LAYOUTS)
@settings(max_examples=400)
def test_any_rules_give_a_sound_plan_or_one_line_of_refusal(
    config: ModelConfig,
    mesh: MeshSpec,
    params: Any,
    acts: Any,
    policy: Any,
    own: Any,
    users: Any,
    layout: Any,
) -> None:
    refusal = ""
    try:
        rules = Rules().changed(params, acts, policy, [Override.parse(text) for text in own])
        plan = plan_model(config, mesh, rules, [Override.parse(text) for text in users], layout)
    except ConfigError as error:
        refusal = str(error)
    event("refused" if refusal else "planned")
    assert "\n" not in refusal
    if not refusal:
        assert_sound(plan)


@given(st.sampled_from(CONFIGS), MESHES, LAYOUTS, st.sampled_from(["replicate", "pad"]))
def test_the_default_rules_are_refused_nowhere(
    config: ModelConfig, mesh: MeshSpec, layout: Any, policy: Any
) -> None:
    rules = Rules().changed(policy=dict.fromkeys(("heads", "mlp", "vocab", "fsdp"), policy))
    assert_sound(plan_model(config, mesh, rules, head_layout=layout if mesh.tp > 1 else None))


def assert_sound(plan: Plan) -> None:
    """Every dim stored is divided by its axes, no axis cuts two, what the rules did not say has a note."""
    for d in plan.decisions:
        assert len(d.spec) == len(d.axes) == len(d.shape) == len(d.use_shape) == len(d.true_shape)
        used = sum(d.spec, ())
        assert len(set(used)) == len(used) and set(used) <= set(AXES)
        assert not d.stacked or d.spec[0] == ()
        for size, use, axes in zip(d.shape, d.use_shape, d.spec, strict=True):
            assert size % plan.mesh.size(axes) == 0
            assert use % plan.mesh.size(tuple(a for a in axes if a != "fsdp")) == 0
        assert all(stored >= use for stored, use in zip(d.shape, d.use_shape, strict=True))
        note = "\n".join(d.notes)
        if math.prod(d.shape) != math.prod(d.true_shape):
            assert "padded to" in note or "stored as" in note, d
        if d.decided_by.startswith("rules"):
            for logical, axes in zip(d.axes, d.spec, strict=True):
                wanted = plan.rules.mesh_axes(logical)
                if plan.mesh.size(sorted(set(wanted) - set(axes))) > 1:
                    assert d.notes, f"{d.path} {logical}: {wanted} became {axes} without a word"
        assert len(set(d.notes)) == len(d.notes)
    if plan.head_asked and plan.head_layout != plan.head_asked:
        assert "policy replicate" in "\n".join(plan[plan.head_path].notes) or "tp" in plan.batch_axes()
    sizes = plan.padding.physical
    for a in plan.activations:
        used = sum(a.spec, ())
        assert len(set(used)) == len(used)
        assert a.spec[0] == plan.batch_axes()
        for logical, axes in zip(a.axes, a.spec, strict=True):
            assert sizes.get(logical, 0) % plan.mesh.size(axes) == 0
