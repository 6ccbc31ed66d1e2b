"""A plan file gives the very same plan again, or is refused with what differs; two files are told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig, RopeConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.plan_file import (
    differences,
    mesh_of,
    read_plan_file,
    restore_plan,
    save_plan,
    to_json,
)
from shardwise.partition.presets import PRESETS, load_rules
from shardwise.partition.rules import Override, Rules

CONFIG = ModelConfig(
    vocab_size=101, embed_dim=48, num_layers=2, num_heads=9, num_kv_heads=3, head_dim=8, mlp_dim=90,
    max_position=64, rope=RopeConfig("llama3", 5e5, 8.0),
)  # fmt: skip
MESH = MeshSpec(1, 2, 2)
RULES_FILE = """
params: {mlp: [tp, fsdp], embed: null}
activations: {residual: [[dp, fsdp], tp, null]}
policy: {heads: replicate, fsdp: replicate}
overrides: ["norm=whole", "mlp/down_proj/kernel=P('fsdp', 'mp')"]
"""


def made(
    *overrides: str,
    config: ModelConfig = CONFIG,
    mesh: MeshSpec = MESH,
    rules: Any = None,
    layout: Any = None,
) -> Plan:
    return plan_model(config, mesh, rules, [Override.parse(text) for text in overrides], layout)


def restored(content: Any, path: Path, config: ModelConfig = CONFIG, mesh: MeshSpec = MESH) -> Plan:
    return restore_plan(
        content, path, config, mesh,
        lambda rules, overrides, layout: plan_model(config, mesh, rules, overrides, layout),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans")
    (path / "rules.yaml").write_text(RULES_FILE)
    return path


@given(
    rules=st.sampled_from([*PRESETS, "rules.yaml"]),
    mesh=st.builds(MeshSpec, *[st.integers(1, 5)] * 3, st.booleans()),
    layout=st.sampled_from([None, "vocab", "hidden", "replicated"]),
    overrides=st.lists(
        st.sampled_from(["norm=whole", "up_proj/kernel=fsdp,None", "attn/o_proj/kernel=whole"]), unique=True
    ),
    flags=st.tuples(*[st.booleans()] * 3),
)
def test_a_saved_plan_is_the_same_when_read_again(
    folder: Path, rules: str, mesh: MeshSpec, layout: Any, overrides: list[str], flags: tuple[bool, ...]
) -> None:
    tied, biases, head_bias = flags
    config = replace(
        CONFIG, tie_embeddings=tied, qkv_bias=biases, mlp_bias=biases, head_bias=head_bias, mlp_dim=60
    )
    found = load_rules(rules if rules in PRESETS else str(folder / rules))
    plan = made(*overrides, config=config, mesh=mesh, rules=found, layout=layout if mesh.tp > 1 else None)
    path = folder / "plan.json"
    path.unlink(missing_ok=True)
    save_plan(plan, path)
    content = read_plan_file(path)
    assert mesh_of(content, path) == mesh
    again = restored(content, path, config, mesh)
    assert again == plan and hash(again) == hash(plan)
    assert differences(content, to_json(plan)) == []


def refused(change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path, **given: Any) -> None:
    """The file of a plan, changed so, is refused in one line that names the file."""
    content = to_json(made("norm=whole"))
    change(content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))

    def read() -> None:
        found = read_plan_file(path)
        mesh_of(found, path)
        restored(found, path, **given)

    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read()
    message = str(caught.value)
    assert str(path) in message and "\n" not in message


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def nothing(content: dict[str, Any]) -> None:
    pass


def test_a_file_for_another_model_is_refused_with_the_sizes_that_differ(tmp_path: Path) -> None:
    other = replace(CONFIG, mlp_dim=91, rope=RopeConfig("llama3", 1e4, 8.0))
    words = (
        "does not fit: model mlp_dim: 90 → 91; model rope theta: 500000.0 → 10000.0; make a plan for this one"
    )
    refused(nothing, words, tmp_path, config=other)


def test_a_file_for_another_mesh_is_refused_with_the_axes_that_differ(tmp_path: Path) -> None:
    words = "does not fit: mesh fsdp: 2 → 1; mesh tp: 2 → 4; make a plan"
    refused(nothing, words, tmp_path, mesh=MeshSpec(tp=4))


def test_how_a_physical_axis_is_split_does_not_keep_a_plan_from_being_used(tmp_path: Path) -> None:
    plan = made(mesh=MeshSpec(1, 2, 2, split_physical=True))
    assert restored(to_json(plan), tmp_path, mesh=MESH).decisions == plan.decisions


TABLE = ("parameters", "embed/table")
EDITED = [
    (put(*TABLE, "spec", value=[["tp"], []]), "embed/table spec: tp,None → tp,fsdp; change those"),
    (put(*TABLE, "spec", value=5), "embed/table spec: 5 → tp,fsdp"),
    (put(*TABLE, "spec", value=[[5], {}]), 'embed/table spec: [[5], {}] → tp,fsdp'),
    (put(*TABLE, "spec", value=[[5], [[]]]), "embed/table spec: 5,[] → tp,fsdp"),
    (put(*TABLE, "shape", value=[101, 48]), "embed/table shape: [101, 48] → [102, 48]"),
    (put(*TABLE, "notes", value=[]), "embed/table notes: [] → ["),
    (put(*TABLE, "decided_by", value="me"), 'embed/table decided_by: "me" → "rules vocab→tp, embed→fsdp"'),
    (put(*TABLE, "more", value=1), "embed/table more: 1 → null"),
    (drop(*TABLE, "spec"), "embed/table spec: null → tp,fsdp"),
    (drop(*TABLE), "embed/table: only in the second"),
    (put("parameters", "mlp/w1", value={}), "mlp/w1: only in the first"),
    (drop("activations", "residual"), "residual: only in the second"),
    (
        put("activations", "residual", "spec", value=[["dp"], [], []]),
        "residual spec: dp,None,None → (dp,fsdp),None,None",
    ),
    (put("rules", "params", "embed", value=[]), "embed/table spec: tp,fsdp → tp,None"),
    (put("rules", "policy", "heads", value="replicate"), "layers/attn/k_proj/kernel shape: [2, 4, 8, 48] →"),
    (put("overrides", value=[]), 'decided_by: "override norm=whole" → "rules whole'),
    (put("head_layout", value="hidden"), "lm_head/kernel spec: tp,fsdp → None,(tp,fsdp)"),
    (put("notes", value=["fine"]), 'notes: ["fine"] → []'),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), EDITED)
def test_a_file_whose_decisions_are_not_those_of_its_rules_is_refused_with_what_differs(
    tmp_path: Path, change: Any, words: str
) -> None:
    refused(change, words, tmp_path)


RUBBISH = [
    *((drop(key), f"has no {key}; save the plan again") for key in ("model", "mesh", "rules", "parameters")),
    (put("format", value="shardwise-plan-0"), "no plan file of this version (format shardwise-plan-1)"),
    (drop("format"), "no plan file of this version"),
    *(
        (put(key, value=value), f"{key} is not a table")
        for key in ("model", "mesh", "rules", "parameters", "activations")
        for value in ([], 5, None, "tp")
    ),
    (put(*TABLE, value=5), "parameters is not a table"),
    (put("activations", "residual", value=[]), "activations is not a table"),
    *(
        (put("mesh", "tp", value=value), 'cannot be read; it has a size of at least 1 for each of dp')
        for value in (0, -1, 2.0, "2", None, True, [2])
    ),
    (put("mesh", "cp", value=1), "cannot be read; it has a size"),
    (put("mesh", "split_physical", value=1), "cannot be read; it has a size"),
    *(
        (drop("rules", key), f"its rules cannot be read: KeyError('{key}')")
        for key in ("name", "params", "activations", "policy", "overrides")
    ),
    *(
        (put("rules", key, value=5), "its rules cannot be read: ")
        for key in ("params", "activations", "policy", "overrides")
    ),
    (put("rules", "params", "mlp", value=5), "its rules cannot be read: "),
    (put("rules", "params", "mlp", value="tp"), "rule mlp: [t, p]: unknown mesh axis 't'"),
    (put("rules", "params", "mlp", value=[["tp"]]), "rule mlp: ['tp']: unknown mesh axis ['tp']"),
    (put("rules", "params", "mpl", value=[]), "no parameter has a logical axis 'mpl'"),
    (drop("rules", "params", "mlp"), "no rule for logical axis 'mlp'"),
    (put("rules", "activations", "residual", value=[["dp", "fsdp"], [], 5]), "its rules cannot be read: "),
    (put("rules", "activations", "residual", value=[]), "residual: [] has 0 entries, but"),
    (put("rules", "policy", "mlp", value=5), "policy 5 for 'mlp'"),
    (put("rules", "overrides", value=["mlp"]), "override 'mlp' has no REGEX=SPEC form"),
    (put("rules", "overrides", value=[5]), "its rules cannot be read: "),
    (put("overrides", value=[5]), "its rules cannot be read: "),
    (put("overrides", value=5), "its rules cannot be read: "),
    (put("overrides", value=["mlp/w1=whole"]), "override 'mlp/w1=whole' matches no parameter"),
    (put("head_layout", value="vocabulary"), "head layout 'vocabulary': allowed are vocab, hidden"),
    (put("head_layout", value=["vocab"]), "head layout ['vocab']: allowed are"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), RUBBISH)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    refused(change, words, tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON"),
        (b'{"format": ', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is no plan file of this version"),
        (b"5", "is no plan file of this version"),
        (b"null", "is no plan file of this version"),
        (b'"shardwise-plan-1"', "is no plan file of this version"),
        (b"{}", "is no plan file of this version"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_plan_file(path)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.json cannot be read: No such file"):
        read_plan_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: it is a folder; name a file in it"):
        read_plan_file(tmp_path)
    for name in ("~no-such-user/plan.json", "a\0"):
        with pytest.raises(ConfigError, match="cannot be read: "):
            read_plan_file(name)


def test_a_plan_never_overwrites_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="plan.json exists already; name another or remove it"):
        save_plan(made(), path)
    assert path.read_text() == "mine"


def test_a_plan_is_written_into_folders_that_are_made_for_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "plan.json"
    save_plan(made(), path)
    assert restored(read_plan_file(path), path) == made()


def test_a_plan_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file/plan.json", "file/folder/plan.json", "a" * 300, "a\0"):
        with pytest.raises(ConfigError, match="^plan file .* cannot be written: ") as caught:
            save_plan(made(), tmp_path / path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be written: "):
        save_plan(made(), "~no-such-user/plan.json")


def test_differences_of_two_plans_are_all_and_only_what_differs() -> None:
    first, second = made(), made("norm=whole", rules=Rules().changed({"embed": ()}, name="mine"))
    found = differences(to_json(first), to_json(second))
    assert [line for line in found if line.startswith(("rules", "overrides", "head", "model", "mesh"))] == [
        'rules name: "fsdp+tp" → "mine"',
        'rules params embed: ["fsdp"] → []',
        'overrides: [] → ["norm=whole"]',
    ]
    changed = {d.path for d in first.decisions if d.spec != second[d.path].spec}
    assert {line.split()[0] for line in found if " spec: " in line} == changed and len(changed) == 9
    assert 'final_norm/scale decided_by: "rules whole (no axis cuts it)" → "override norm=whole"' in found


def test_differences_of_two_models_and_meshes_name_each_tensor_once() -> None:
    first = made(config=replace(CONFIG, tie_embeddings=True))
    second = made(mesh=MeshSpec(1, 2, 2, split_physical=True))
    assert differences(to_json(first), to_json(second)) == [
        "model tie_embeddings: true → false",
        "mesh split_physical: false → true",
        "lm_head/kernel: only in the second",
    ]
    assert differences(to_json(second), to_json(first))[-1] == "lm_head/kernel: only in the first"


def test_a_long_list_of_differences_is_cut_short_and_counted(tmp_path: Path) -> None:
    other = replace(
        CONFIG, vocab_size=102, embed_dim=50, num_layers=3, num_heads=6, head_dim=6, mlp_dim=9,
        max_position=3, norm_eps=1e-3, qkv_bias=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="; and 1 more; make a plan") as caught:
        restored(to_json(made()), tmp_path, config=other)
    assert str(caught.value).count(" → ") == 8
