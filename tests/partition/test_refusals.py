"""A refusal names rule, tensor, dim, sizes and a fix that works: each is taken from the line and applied.

Not here: which rules and overrides are refused, and the words for each (test_rules.py, test_overrides.py,
test_policies.py, …).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tests.partition.test_any_rules import (
    CONFIGS,
    LAYOUTS,
    MESHES,
    OVERRIDE,
    PARAMS,
    POLICIES,
    activations,
    assert_sound,
)

from shardwise import plan
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import axes_text

CONFIG = ModelConfig(
    vocab_size=101, embed_dim=48, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=6, mlp_dim=90,
    max_position=64,
)  # fmt: skip
TIED = replace(CONFIG, tie_embeddings=True)
BIASED = replace(CONFIG, mlp_bias=True, qkv_bias=True)
MESH = "fsdp:2,tp:2"


@dataclass(frozen=True)
class Asked:
    """What a user asks of a plan: a rules file, overrides, a head layout."""

    rules: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    layout: Any = None

    def plan(self, folder: Path, config: ModelConfig, mesh: str | MeshSpec) -> Plan:
        file = folder / "mine.yaml"
        file.write_text(yaml.safe_dump({"preset": "fsdp+tp"} | self.rules))
        return plan(config, mesh, rules=str(file), overrides=self.overrides, head_layout=self.layout)

    def mended(self, line: str) -> Asked:
        """With the fix that a refusal names; of several the first."""
        if " both decide " in line or "(--head-layout auto)" in line:
            return replace(self, layout=None)
        wrong_policy = re.search(r"policy '\w+' for '(\w+)': allowed are (\w+)", line)
        if wrong_policy:
            return self._with("policy", {wrong_policy[1]: wrong_policy[2]})
        entries = re.search(r"write ((params|activations|policy): \{[^}]*\})", line)
        if entries:
            return self._with(entries[2], yaml.safe_load(entries[1])[entries[2]])
        found = re.search(r"override '([^']*)'", line)
        assert found, f"no fix that can be applied: {line}"
        written = re.search(r"write '([^']*)'( before it)?", line)
        new = [] if not written else [written[1], found[1]] if written[2] else [written[1]]
        assert written or line.endswith("or drop it"), line
        if line.startswith("override"):
            return replace(self, overrides=_replaced(self.overrides, found[1], new))
        return replace(
            self, rules=self.rules | {"overrides": list(_replaced(self.rules["overrides"], found[1], new))}
        )

    def _with(self, table: str, entries: dict[str, Any]) -> Asked:
        return replace(self, rules=self.rules | {table: self.rules.get(table, {}) | entries})


def _replaced(texts: Any, old: str, new: list[str]) -> tuple[str, ...]:
    """Of two equal texts it is the second that decides nothing."""
    at = len(texts) - 1 - list(reversed(texts)).index(old)
    return (*texts[:at], *new, *texts[at + 1 :])


def refusal(asked: Asked, folder: Path, config: ModelConfig = CONFIG, mesh: str | MeshSpec = MESH) -> str:
    """The line with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        asked.plan(folder, config, mesh)
    assert "\n" not in str(caught.value)
    return str(caught.value)


UP = "layers/mlp/up_proj/kernel (layers 2, mlp 90, embed 48)"
Q_DIMS = "layers/attn/q_proj/kernel has 5 dims (layers 2, heads 4, q_per_kv 2, head_dim 6, embed 48)"
MATCHED = "matches no parameter"

# override → model, mesh, what the line says, and the override that it proposes
OVERRIDES: list[tuple[str, ModelConfig, str, list[str], str]] = [
    ("up_proj=tp", CONFIG, MESH, ["has 1 entry", "layers/mlp/up_proj/kernel", "mlp 90, embed 48"],
     "up_proj=tp,None"),
    ("up_proj=None,tp,fsdp,None", CONFIG, MESH, ["has 4 entries", "has 3 dims"], "up_proj=tp,fsdp"),
    ("embed/table=tp,None,fsdp", CONFIG, MESH, ["embed/table has 2 dims (vocab 102, embed 48)"],
     "embed/table=tp,fsdp"),
    ("final_norm=None,tp", CONFIG, MESH, ["final_norm/scale has 1 dim (vector 48)"], "final_norm=tp"),
    ("q_proj=tp,fsdp", CONFIG, MESH, ["has 2 entries", Q_DIMS], "q_proj=tp,None,None,fsdp"),
    ("o_proj=fsdp,tp", CONFIG, MESH, ["has 2 entries", "head_dim 6)"], "o_proj=fsdp,tp,None,None"),
    ("q_proj=tp,None,fsdp", CONFIG, MESH, ["has 3 entries", Q_DIMS], "q_proj=tp,None,fsdp,None"),
    (".*=None,None", CONFIG, MESH, ["final_norm/scale has 1 dim (vector 48)"], ".*=whole"),
    (".*=tp,fsdp", CONFIG, MESH, ["final_norm/scale has 1 dim"], ".*table=tp,fsdp"),
    ("mlp=tp,fsdp", CONFIG, MESH, ["cuts the layers of layers/mlp_norm/scale (layers 2, vector 48)"],
     "mlp.*kernel=tp,fsdp"),
    ("up_proj|gate_proj=tp", BIASED, MESH, ["layers/mlp/gate_proj/kernel has 3 dims"],
     "(up_proj|gate_proj).*kernel=tp,None"),
    ("up_proj=fsdp,None,tp", CONFIG, MESH, ["cuts the layers of", UP], "up_proj=fsdp,tp"),
    ("up_proj=tp,mp", CONFIG, MESH, ["'tp' on two dims of layers/mlp/up_proj/kernel, mlp 90 and embed 48"],
     "up_proj=tp,None"),
    ("up_proj=(fsdp,tp),fsdp", CONFIG, MESH, ["'fsdp' on two dims", "mlp 90 and embed 48"],
     "up_proj=fsdp,tp"),
    ("up_proj=(tp,tp),fsdp", CONFIG, MESH, ["'tp' twice for one dim"], "up_proj=tp,fsdp"),
    ("embed/table=None,tp", CONFIG, "tp:5", ["tp = 5 does not divide dim embed of embed/table, which is 48",
     "vocab 105, embed 48"], "embed/table=tp,None"),
    ("k_proj=None,tp,fsdp", CONFIG, "fsdp:8,tp:4", ["tp = 4 does not divide dim head_dim", "which is 6"],
     "k_proj=tp,None,fsdp"),
    ("norm=tp", CONFIG, "tp:5", ["does not divide dim vector of final_norm/scale, which is 48"], "norm=None"),
    ("up_prj=tp,fsdp", CONFIG, MESH, [MATCHED, f"nearest is {UP}"], "up_proj/kernel=tp,fsdp"),
    ("mlp/w_up_proj=tp", CONFIG, MESH, [MATCHED, f"nearest is {UP}"], "up_proj/kernel=tp,None"),
    ("attn/qproj=tp,fsdp", CONFIG, MESH, [MATCHED, "q_proj/kernel (layers 2, heads 4"],
     "q_proj/kernel=tp,None,None,fsdp"),
    ("lm_head/kernel=tp,fsdp", TIED, MESH, [MATCHED, "head is its embed/table (vocab 102, embed 48)"],
     "embed/table=tp,fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "config", "mesh", "words", "fix"), OVERRIDES)
def test_an_override_is_refused_with_tensor_dims_sizes_and_one_that_the_plan_then_follows(
    tmp_path: Path, text: str, config: ModelConfig, mesh: str, words: list[str], fix: str
) -> None:
    asked = Asked(overrides=(text,))
    line = refusal(asked, tmp_path, config, mesh)
    assert line.startswith(f"override '{text}'") and line.endswith(f"write '{fix}'")
    assert all(word in line for word in words), line
    made = asked.mended(line).plan(tmp_path, config, mesh)
    assert [o.text for o in made.overrides] == [fix]
    assert any(d.decided_by == f"override {fix}" for d in made.decisions)


@pytest.mark.parametrize(
    ("text", "mesh", "fix"),
    [
        ("(q|k)_proj=tp,fsdp", MESH, "k_proj/kernel=tp,None,fsdp"),
        ("mlp/=tp,None", "tp:5", "down_proj/kernel=None,tp"),
    ],
)
def test_an_override_that_some_of_its_parameters_cannot_follow_stays_with_one_before_it_for_the_others(
    tmp_path: Path, text: str, mesh: str, fix: str
) -> None:
    asked = Asked(overrides=(text,))
    line = refusal(asked, tmp_path, mesh=mesh)
    assert line.endswith(f"write '{fix}' before it")
    assert asked.mended(line).overrides == (fix, text)


@pytest.mark.parametrize(("text", "config", "mesh", "words", "fix"), OVERRIDES)
def test_an_override_of_a_rules_file_is_refused_with_the_files_name_and_the_same_fix(
    tmp_path: Path, text: str, config: ModelConfig, mesh: str, words: list[str], fix: str
) -> None:
    if mesh != MESH or "lm_head" in text:
        return  # a rules file's override follows the policies, and may name a head that is not there
    asked = Asked({"overrides": [text]})
    line = refusal(asked, tmp_path, config, mesh)
    assert "mine.yaml" in line.partition(f"override '{text}'")[0] and line.endswith(f"write '{fix}'")
    assert all(word in line for word in words), line
    assert asked.mended(line).plan(tmp_path, config, mesh).rules.overrides[0].text == fix


# rules → mesh, what the line says, and the entry that it proposes
RULES: list[tuple[dict[str, Any], str, list[str], str]] = [
    ({"params": {"embed": "tp"}}, MESH, ["vocab→tp and embed→tp", "'tp'", "two dims of embed/table",
     "vocab 102 and embed 48"], "params: {embed: null}"),
    ({"params": {"embed": ["fsdp", "tp"]}}, MESH, ["embed→fsdp+tp", "'tp'"], "params: {embed: fsdp}"),
    ({"params": {"mlp": "fsdp"}}, MESH, ["embed→fsdp and mlp→fsdp", "of layers/mlp/down_proj/kernel",
     "embed 48 and mlp 90"], "params: {mlp: null}"),
    ({"params": {"layers": "fsdp"}}, MESH, ["rule 'layers' → fsdp",
     "cuts the layers of layers/attn/k_proj/kernel (layers 2, kv_heads 4"], "params: {layers: null}"),
    ({"params": {"vector": "tp"}}, "tp:5", ["final_norm/scale, by rules vector→tp", "vector of 48", "tp = 5",
     "such as 4, 6, 3"], "policy: {vector: replicate}"),
    ({"policy": {"mlp": "error"}}, "tp:4", ["rule 'mlp' → tp", "tp 4 does not divide mlp 90",
     "layers/mlp/down_proj/kernel and 2 more", "such as 3, 5, 2"], "policy: {mlp: pad}"),
    ({"policy": {"heads": "error"}}, "tp:3", ["rule 'heads' → tp", "tp 3 does not divide heads 8",
     "layers/attn/o_proj/kernel and 1 more"], "policy: {heads: pad}"),
    ({"policy": {"kv_heads": "error"}}, "tp:8", ["rule 'heads' → tp", "tp 8 does not divide kv_heads 4",
     "layers/attn/k_proj/kernel and 1 more"], "policy: {kv_heads: pad}"),
    ({"policy": {"vocab": "error"}}, MESH, ["rule 'vocab' → tp", "tp 2 does not divide vocab 101",
     "embed/table and 1 more"], "policy: {vocab: pad}"),
    ({"policy": {"fsdp": "error"}}, "fsdp:7", ["embed/table (vocab 101, embed 48)", "embed→fsdp",
     "fsdp 7 does not divide embed 48 nor any other dim", "such as 6, 8, 4"], "policy: {fsdp: pad}"),
    ({"overrides": ["up_proj=None,tp"]}, "tp:5", ["layers/mlp/up_proj/kernel, by override up_proj=None,tp",
     "embed of 48", "tp = 5"], "policy: {embed: replicate}"),
    ({"activations": {"residual": [["dp", "fsdp"], None, "tp"]}}, "tp:5",
     ["activation residual, by rule residual: [[dp, fsdp], null, tp]", "embed of 48", "tp = 5"],
     "policy: {embed: replicate}"),
    ({"activations": {"mlp_hidden": [["dp", "fsdp"], "tp"]}}, MESH,
     ["activation mlp_hidden: [[dp, fsdp], tp] has 2 entries", "3 dims (batch, length, mlp)"],
     "activations: {mlp_hidden: [[dp, fsdp], tp, null]}"),
    ({"activations": {"residual": ["dp", "tp", None]}}, MESH,
     ["activation residual: [dp, tp, null] cuts the batch over dp, but tokens over dp+fsdp"],
     "activations: {residual: [[dp, fsdp], tp, null]}"),
    ({"activations": {"residual": [["dp", "fsdp"], "tp", "tp"]}}, MESH,
     ["activation residual: [[dp, fsdp], tp, tp]", "'tp' on two dims (length, embed)"],
     "activations: {residual: [[dp, fsdp], tp, null]}"),
    ({"params": {"mlp": ["tp", "tp"]}}, MESH, ["rule mlp: [tp, tp]", "'tp' twice"], "params: {mlp: tp}"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "mesh", "words", "fix"), RULES)
def test_rules_are_refused_with_rule_tensor_dims_sizes_and_an_entry_with_which_they_are_followed(
    tmp_path: Path, rules: dict[str, Any], mesh: str, words: list[str], fix: str
) -> None:
    asked = Asked(rules)
    line = refusal(asked, tmp_path, mesh=mesh)
    assert f"write {fix}" in line and "mine.yaml" in line
    assert all(word in line for word in words), line
    asked.mended(line).plan(tmp_path, CONFIG, mesh)


def test_the_numbers_of_parts_that_a_refusal_proposes_do(tmp_path: Path) -> None:
    for rules, mesh, _, _ in RULES:
        line = refusal(Asked(rules), tmp_path, mesh=mesh)
        axis = mesh.partition(":")[0]
        for number in re.findall(r"\d+", line.partition("such as ")[2]):
            Asked(rules).plan(tmp_path, CONFIG, f"{axis}:{number}")


def test_a_preset_is_mended_in_a_rules_file_that_starts_from_it() -> None:
    rules = PRESETS["tp"].changed({"vector": ("tp",)})
    words = "write policy: {vector: replicate} in a rules file with preset: tp,"
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(CONFIG, "tp:5", rules=rules)


@pytest.mark.parametrize("layout", ["vocab", "hidden", "replicated"])
@pytest.mark.parametrize(("config", "path"), [(CONFIG, "lm_head/kernel"), (TIED, "embed/table")])
def test_a_head_layout_where_tp_is_one_is_refused_with_the_head_and_the_mesh(
    tmp_path: Path, layout: str, config: ModelConfig, path: str
) -> None:
    asked = Asked(layout=layout)
    line = refusal(asked, tmp_path, config, "dp:2,fsdp:2,tp:1")
    assert line == (
        f"head layout '{layout}' has no effect: it says how tp cuts the output head {path} (vocab 101,"
        f" embed 48),"
        " and tp is 1 on mesh dp:2,fsdp:2,tp:1; leave it out (--head-layout auto), or take a mesh with a tp"
        " of 2"
        " or more"
    )
    asked.mended(line).plan(tmp_path, config, "dp:2,fsdp:2,tp:1")
    asked.plan(tmp_path, config, "dp:2,fsdp:2,tp:2")


def test_overrides_that_are_one_text_are_refused_with_the_list_to_write() -> None:
    with pytest.raises(ConfigError, match=re.escape("give a list of such texts: ['mlp=whole']")):
        plan(CONFIG, MESH, overrides="mlp=whole")


@pytest.mark.parametrize("text", ["mlp/up_proj=tp,fsdp", "norm=whole", "up_proj=None,tp,fsdp"])
def test_an_override_that_says_what_the_rules_say_is_no_mistake(tmp_path: Path, text: str) -> None:
    assert Asked(overrides=(text,)).plan(tmp_path, CONFIG, MESH).notes == ()


def test_a_policy_that_nothing_needs_is_no_mistake(tmp_path: Path) -> None:
    asked = Asked({"policy": {"q_per_kv": "replicate", "mlp": "error", "fsdp": "error"}})
    assert asked.plan(tmp_path, CONFIG, MESH).decisions == Asked().plan(tmp_path, CONFIG, MESH).decisions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rules")


MOST_FIXES = 30


@given(st.sampled_from(CONFIGS), MESHES, PARAMS, activations(), POLICIES, OVERRIDE, OVERRIDE, LAYOUTS)
@settings(max_examples=300)
def test_fix_after_fix_any_rules_become_ones_that_are_followed(
    folder: Path,
    config: ModelConfig,
    mesh: MeshSpec,
    params: Any,
    acts: Any,
    policy: Any,
    own: Any,
    users: Any,
    layout: Any,
) -> None:
    rules = {
        "params": {name: yaml.safe_load(axes_text(axes)) for name, axes in params.items()},
        "activations": {
            name: [yaml.safe_load(axes_text(axes)) for axes in spec] for name, spec in acts.items()
        },
        "policy": policy,
        "overrides": own,
    }
    asked, seen = Asked(rules, tuple(users), layout), []
    for _ in range(MOST_FIXES):
        try:
            made = asked.plan(folder, config, mesh)
            break
        except ConfigError as error:
            line = str(error)
            assert line not in seen, f"named again after its fix: {line}"
            seen.append(line)
            if "there are embed/table" in line:  # no parameter is near, so that all are named
                return
            asked = asked.mended(line)
    else:
        raise AssertionError("\n".join(seen))
    event(f"{len(seen)} fixes")
    assert_sound(made)


def test_the_refusals_that_the_documentation_shows_are_those_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.explain.start", lambda options: None)  # devices are set up already
    text = (Path(__file__).parents[2] / "docs/partitioning.md").read_text().replace("\n    ", " ")
    shown = re.findall(r"^\$ shardwise (.*)\n(error: .*)$", text, re.M)
    assert len(shown) == 2
    for command, error in shown:
        argv, _, rules = command.partition("   # ")
        Path("mine.yaml").write_text(rules)
        assert main(argv.split()) == 2
        assert capsys.readouterr().err == error + "\n"
