"""Rules that contradict themselves are refused in one line that says what is allowed and what is nearest."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.partition.rules import (
    ACTIVATIONS,
    DEFAULT_PARAMS,
    DEFAULT_POLICY,
    Override,
    Rules,
    spec_text,
)

BATCH = ("dp", "fsdp")


def refused(words: str, **tables: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        Rules().changed(**tables)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"mpl": ("tp",)}, "no parameter has a logical axis 'mpl'; there are layers, vocab"),
        ({"mpl": ("tp",)}, "did you mean 'mlp'?"),
        (
            {"mlp": ("tpp",)},
            "rule mlp: tpp: unknown mesh axis 'tpp'; the axes are dp, fsdp, tp; did you mean 'tp'?",
        ),
        ({"mlp": ("fdsp",)}, "did you mean 'fsdp'?"),
        ({"mlp": "tp"}, "rule 'mlp': 'tp' is no tuple of mesh axes; write ('tp',)"),
        ({"mlp": ["tp"]}, "rule 'mlp': ['tp'] is no tuple of mesh axes"),
        (
            {"mlp": ("tp", "fsdp", "tp")},
            "rule mlp: [tp, fsdp, tp] names mesh axis 'tp' twice for one dim; write params: {mlp: [tp,"
            " fsdp]}",
        ),
    ],
)
def test_a_rule_for_a_parameter_that_cannot_be_is_refused(params: Any, words: str) -> None:
    refused(words, params=params)


@pytest.mark.parametrize(
    ("activations", "words"),
    [
        ({"residul": (BATCH, (), ())}, "no activation is named 'residul'; there are tokens, residual, query"),
        ({"residul": (BATCH, (), ())}, "did you mean 'residual'?"),
        ({"logits": (BATCH, (), ("tp",))}, "the cut of logits is --head-layout"),
        (
            {"residual": (BATCH, ("tp",))},
            "activation residual: [[dp, fsdp], tp] has 2 entries, but residual has 3 dims (batch, length,"
            " embed);"
            " write activations: {residual: [[dp, fsdp], tp, null]}",
        ),
        ({"residual": (("tp",), ())}, "write activations: {residual: [[dp, fsdp], tp, null]}"),
        ({"tokens": ()}, "tokens: [] has 0 entries, but tokens has 2 dims (batch, length)"),
        (
            {"residual": (BATCH, ("cp",), ())},
            "activation residual: [[dp, fsdp], cp, null]: unknown mesh axis 'cp'",
        ),
        (
            {"residual": (BATCH, ("tp",), ("tp",))},
            "activation residual: [[dp, fsdp], tp, tp] puts mesh axis 'tp' on two dims (length, embed); write"
            " activations: {residual: [[dp, fsdp], tp, null]}",
        ),
        (
            {"residual": (BATCH, ("tp", "tp"), ())},
            "twice for one dim; write activations: {residual: [[dp, fsdp], tp, null]}",
        ),
        ({"tokens": (("dp", "dp"), ())}, "twice for one dim; write activations: {tokens: [dp, null]}"),
        ({"residual": (BATCH, "tp", ())}, "activation 'residual': 'tp' is no tuple of mesh axes"),
        (
            {"residual": "tp"},
            "activation 'residual': 'tp' is no tuple; write one with mesh axes for each dim",
        ),
        (
            {"residual": (("dp",), (), ())},
            "cuts the batch over dp, but tokens over dp+fsdp; the batch is split once: write activations:"
            " {residual: [[dp, fsdp], null, null]}",
        ),
        ({"residual": ((), (), ())}, "cuts the batch over nothing, but tokens over dp+fsdp"),
        ({"tokens": ((), ()), "residual": (BATCH, (), ())}, "over dp+fsdp, but tokens over nothing"),
        ({"query": (("fsdp", "dp"), (), (), (), ())}, "cuts the batch over fsdp+dp, but tokens"),
    ],
)
def test_a_rule_for_an_activation_that_cannot_be_is_refused(activations: Any, words: str) -> None:
    refused(words, activations=activations)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"mpl": "pad"}, "no policy can be set for 'mpl'; there are heads, kv_heads"),
        ({"mpl": "pad"}, "did you mean 'mlp'?"),
        ({"layers": "error"}, "no policy can be set for 'layers'"),
        (
            {"mlp": "padded"},
            "policy 'padded' for 'mlp': allowed are pad, replicate, error; did you mean 'pad'?",
        ),
        ({"mlp": None}, "policy None for 'mlp'"),
        ({"mlp": ["pad"]}, "policy ['pad'] for 'mlp'"),
        ({"embed": "pad"}, "policy 'pad' for 'embed': allowed are replicate, error"),
        ({"vector": "pad"}, "policy 'pad' for 'vector'"),
        ({"q_per_kv": "pad"}, "policy 'pad' for 'q_per_kv'"),
        ({"head_dim": "pad"}, "policy 'pad' for 'head_dim'"),
        ({"kv_heads": "replicate"}, "policy 'replicate' for 'kv_heads': allowed are pad, error"),
    ],
)
def test_a_policy_that_is_not_allowed_is_refused(policy: Any, words: str) -> None:
    refused(words, policy=policy)


def test_a_name_with_two_entries_is_refused() -> None:
    with pytest.raises(ConfigError, match="logical axis 'mlp' has more than one rule"):
        Rules(params=(*DEFAULT_PARAMS.items(), ("mlp", ())))
    with pytest.raises(ConfigError, match="activation 'tokens' has more than one rule"):
        Rules(activations=(("tokens", ((), ())), ("tokens", (BATCH, ()))))
    with pytest.raises(ConfigError, match="policy of 'mlp' has more than one rule"):
        Rules(policy=(("mlp", "pad"), ("mlp", "error")))


def test_policies_that_are_left_out_are_the_defaults() -> None:
    assert Rules(policy=(("mlp", "error"),)).policy_of == DEFAULT_POLICY | {"mlp": "error"}


def test_changed_replaces_what_it_names_and_keeps_the_rest() -> None:
    first, second = Override.parse("a=whole"), Override.parse("b=whole")
    before = Rules(overrides=(first,))
    after = before.changed({"mlp": ()}, {"tokens": ((), ())}, {"mlp": "error"}, [second], "mine")
    assert after.axes_of == DEFAULT_PARAMS | {"mlp": ()}
    assert after.activations == (("tokens", ((), ())),)
    assert after.policy_of == DEFAULT_POLICY | {"mlp": "error"}
    assert after.overrides == (second, first) and after.name == "mine"
    assert before == Rules(overrides=(first,))


def test_every_activation_has_a_spec_with_an_entry_for_each_dim() -> None:
    for name, dims in ACTIVATIONS.items():
        assert len(Rules().activation(name)) == len(dims)


@pytest.mark.parametrize("text", ["a=whole", "a/b=tp,None,(dp,fsdp)", "a=None"])
def test_an_override_made_without_text_has_the_text_that_is_read_as_itself(text: str) -> None:
    parsed = Override.parse(text)
    made = Override(parsed.pattern, parsed.spec)
    assert made.text == text and Override.parse(made.text) == made
    assert spec_text(made.spec) == text.split("=")[1]


@pytest.mark.parametrize(
    ("pattern", "spec", "words"),
    [
        ("(", None, "'(' is no regular expression"),
        (
            "a",
            (("tq",),),
            "override 'a=tq': unknown mesh axis 'tq'; the axes are dp, fsdp, tp; did you mean 'tp'?",
        ),
        ("a", ("tp",), "override 'a': 'tp' is no tuple of mesh axes; write ('tp',)"),
        ("a", "tp", "override 'a': 'tp' is no tuple; write one with mesh axes for each dim"),
    ],
)
def test_an_override_made_in_python_is_checked_as_one_that_is_read(
    pattern: str, spec: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Override(pattern, spec)


def test_spaces_around_a_pattern_do_not_keep_it_from_matching() -> None:
    assert Override.parse(" mlp/up_proj = tp, fsdp").matches("layers/mlp/up_proj/kernel")
