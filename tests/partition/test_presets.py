"""Named rules cut what they say; a rules file is read as written, or refused in one line with its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.presets import PRESETS, load_rules
from shardwise.partition.rules import Override, Rules, spec_text

CONFIG = ModelConfig(
    vocab_size=96, embed_dim=48, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=64,
    max_position=64,
)  # fmt: skip
EVEN = MeshSpec(2, 2, 2)
PATHS = (
    "embed/table", "layers/attn/q_proj/kernel", "layers/attn/k_proj/kernel", "layers/attn/o_proj/kernel",
    "layers/mlp/gate_proj/kernel", "layers/mlp/down_proj/kernel", "layers/attn_norm/scale",
    "final_norm/scale", "lm_head/kernel",
)  # fmt: skip
CUTS = {
    "fsdp+tp": (
        "tp,fsdp", "None,tp,None,None,fsdp", "None,tp,None,fsdp", "None,fsdp,tp,None,None",
        "None,tp,fsdp", "None,fsdp,tp", "None,None", "None", "tp,fsdp",
    ),
    "fsdp": (
        "None,fsdp", "None,None,None,None,fsdp", "None,None,None,fsdp", "None,fsdp,None,None,None",
        "None,None,fsdp", "None,fsdp,None", "None,None", "None", "None,fsdp",
    ),
    "tp": (
        "tp,None", "None,tp,None,None,None", "None,tp,None,None", "None,None,tp,None,None",
        "None,tp,None", "None,None,tp", "None,None", "None", "tp,None",
    ),
    "easylm": (
        "tp,fsdp", "None,tp,None,None,fsdp", "None,tp,None,fsdp", "None,fsdp,tp,None,None",
        "None,tp,fsdp", "None,fsdp,tp", "None,None", "None", "tp,fsdp",
    ),
    "replicated": (
        "None,None", "None,None,None,None,None", "None,None,None,None", "None,None,None,None,None",
        "None,None,None", "None,None,None", "None,None", "None", "None,None",
    ),
}  # fmt: skip
# EasyLM's LLaMA, parameter → spec of the kernel as Flax has it there, [in, out].
EASYLM = {
    "transformer/wte/embedding": ("mp", "fsdp"),
    "attention/wq/kernel": ("fsdp", "mp"),
    "attention/wk/kernel": ("fsdp", "mp"),
    "attention/wv/kernel": ("fsdp", "mp"),
    "attention/wo/kernel": ("mp", "fsdp"),
    "feed_forward/w1/kernel": ("fsdp", "mp"),
    "feed_forward/w2/kernel": ("mp", "fsdp"),
    "feed_forward/w3/kernel": ("fsdp", "mp"),
    "lm_head/kernel": ("fsdp", "mp"),
}
OURS = {
    "transformer/wte/embedding": "embed/table",
    "attention/wq/kernel": "layers/attn/q_proj/kernel",
    "attention/wk/kernel": "layers/attn/k_proj/kernel",
    "attention/wv/kernel": "layers/attn/v_proj/kernel",
    "attention/wo/kernel": "layers/attn/o_proj/kernel",
    "feed_forward/w1/kernel": "layers/mlp/gate_proj/kernel",
    "feed_forward/w2/kernel": "layers/mlp/down_proj/kernel",
    "feed_forward/w3/kernel": "layers/mlp/up_proj/kernel",
    "lm_head/kernel": "lm_head/kernel",
}


def plan(rules: Rules, mesh: MeshSpec = EVEN) -> Plan:
    return plan_model(CONFIG, mesh, rules)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mesh", [EVEN, MeshSpec(), MeshSpec(1, 4, 1), MeshSpec(1, 1, 4)])
def test_each_preset_cuts_each_tensor_so(name: str, mesh: MeshSpec) -> None:
    made = plan(load_rules(name), mesh)
    assert {path: spec_text(made[path].spec) for path in PATHS} == dict(zip(PATHS, CUTS[name], strict=True))
    assert not any(d.notes for d in made.decisions)
    assert made.batch_axes() == ("dp", "fsdp")


@pytest.mark.parametrize("theirs", EASYLM)
def test_easylm_is_easylms_llama_translated_to_kernels_that_lie_out_in(theirs: str) -> None:
    spec = plan(PRESETS["easylm"])[OURS[theirs]].spec
    cuts = [axes for axes in spec if axes]  # dims that one matrix dim became: the first of them is cut
    want = EASYLM[theirs] if theirs.endswith("embedding") else EASYLM[theirs][::-1]
    assert cuts == [("tp",) if axis == "mp" else (axis,) for axis in want]


@pytest.mark.parametrize(
    ("name", "idle"),
    [("fsdp+tp", []), ("fsdp", ["tp"]), ("tp", []), ("easylm", []), ("replicated", ["tp"])],
)
def test_a_mesh_axis_that_a_preset_leaves_without_work_is_noted(name: str, idle: list[str]) -> None:
    want = [
        f"mesh axis {axis} 2 cuts nothing under rules {name!r}: its devices repeat the same work"
        for axis in idle
    ]
    assert list(plan(PRESETS[name]).notes) == want
    assert not plan(PRESETS[name], MeshSpec(2, 2, 1)).notes


@pytest.mark.parametrize("mesh", [MeshSpec(1, 5, 1), MeshSpec(1, 2, 3), MeshSpec(1, 1, 16)])
def test_easylm_follows_the_policies_where_its_axes_do_not_divide(mesh: MeshSpec) -> None:
    made, default = plan(PRESETS["easylm"], mesh), plan(Rules(), mesh)
    for d in made.decisions:
        assert (d.spec, d.shape, d.notes) == (
            default[d.path].spec,
            default[d.path].shape,
            default[d.path].notes,
        )


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_rules_file_says_what_the_same_rules_in_python_say(tmp_path: Path) -> None:
    text = """
preset: tp
params:
  embed: fsdp
  mlp: [mp, fsdp]
  vocab: null
  q_per_kv: []
activations:
  residual: [[dp, fsdp], mp, null]
  mlp_hidden: [[dp, fsdp], [], tp]
policy: {heads: error, fsdp: replicate}
overrides:
  - "mlp/down_proj=P('fsdp', 'mp')"
  - norm=whole
"""
    batch = ("dp", "fsdp")
    want = PRESETS["tp"].changed(
        {"embed": ("fsdp",), "mlp": ("tp", "fsdp"), "vocab": (), "q_per_kv": ()},
        {"residual": (batch, ("tp",), ()), "mlp_hidden": (batch, (), ("tp",))},
        {"heads": "error", "fsdp": "replicate"},
        [Override.parse("mlp/down_proj=P('fsdp', 'mp')"), Override.parse("norm=whole")],
        name="mine.yaml",
    )
    assert load_rules(write(tmp_path, text)) == want


def test_a_rules_file_that_names_the_default_is_the_default(tmp_path: Path) -> None:
    assert load_rules(write(tmp_path, "preset: fsdp+tp\nparams:\npolicy: {}\n")) == Rules(name="mine.yaml")


BAD = [
    ("", "a rules file is a mapping with any of preset, params"),
    ("- a", "a rules file is a mapping"),
    ("3", "a rules file is a mapping"),
    ("{}", "it says nothing, so that it has no effect; a rules file is a mapping"),
    ("params:\npolicy:\nactivations:\noverrides:\n", "it says nothing, so that it has no effect"),
    ("tp", "a rules file is a mapping"),
    ("a: [", "cannot be read: "),
    ("a: b: c", "cannot be read: "),
    ("\tparams: {}", "cannot be read: "),
    ("params: {}\n---\npolicy: {}", "cannot be read: "),
    ("preset: !!python/name:os.system", "cannot be read: "),
    ("preset: 2001-13-45", "cannot be read: "),
    ("{[a]: b}", "cannot be read: "),
    ("param: {mlp: tp}", "unknown key 'param'"),
    ("param: {mlp: tp}", "did you mean 'params'?"),
    ("3: {}", "unknown key 3"),
    (
        "preset: fspd",
        "preset is 'fspd'; there are fsdp+tp, fsdp, tp, easylm, replicated; did you mean 'fsdp'?",
    ),
    ("preset: [tp]", "preset is ['tp']; there are"),
    ("preset: null", "preset is None; there are"),
    ("preset: {a: b}", "preset is {'a': 'b'}; there are"),
    ("params: []", "params is []"),
    ("params: tp", "params is 'tp'"),
    ("params: 0", "params is 0"),
    ("params: {1: tp}", "params is {1: 'tp'}"),
    ("params: {mpl: tp}", "no parameter has a logical axis 'mpl'; there are layers, vocab, embed"),
    ("params: {mpl: tp}", "did you mean 'mlp'?"),
    ("params: {mlp: 3}", "mlp is 3; give null, a mesh axis or a list of mesh axes"),
    ("params: {mlp: yes}", "mlp is True; give null"),
    ("params: {mlp: [[tp]]}", "mlp is [['tp']]; give null"),
    ("params: {mlp: {tp: fsdp}}", "mlp is {'tp': 'fsdp'}; give null"),
    ("params: {mlp: tpu}", "did you mean 'tp'?"),
    ('params: {mlp: "tp,fsdp"}', "mlp is 'tp,fsdp'; give a list of mesh axes, [tp, fsdp]"),
    (
        "params: {mlp: [tp, mp]}",
        "rule mlp: [tp, tp] names mesh axis 'tp' twice for one dim; write params: {mlp: tp}",
    ),
    ("params:\n  mlp: tp\n  mlp: null", "key 'mlp' stands in line 2 and again in line 3"),
    ("policy: {}\npolicy: {mlp: error}", "key 'policy' stands in line 1 and again in line 2"),
    ("activations: []", "activations is []"),
    (
        "activations: {residual: tp}",
        "activation residual is 'tp'; give a list with an entry for each dim (batch, length, embed), such as"
        " [[dp, fsdp], null, null]",
    ),
    ("activations: {residul: tp}", "activation residul is 'tp'; give a list with an entry for each dim"),
    ("activations: {residual: null}", "activation residual is None; give a list"),
    ("activations: {residual: [[dp, fsdp], tp]}", "write activations: {residual: [[dp, fsdp], tp, null]}"),
    ("activations: {residual: [[dp, fsdp], tp, tp]}", "puts mesh axis 'tp' on two dims (length, embed)"),
    ("activations: {residual: [dp, null, null]}", "the batch is split once"),
    ("activations: {residul: [[dp, fsdp], tp, null]}", "did you mean 'residual'?"),
    ("activations: {logits: [[dp, fsdp], null, tp]}", "the cut of logits is --head-layout"),
    ("policy: pad", "policy is 'pad'"),
    ("policy: {mlp: drop}", "policy 'drop' for 'mlp': allowed are pad, replicate, error"),
    ("policy: {embed: pad}", "policy 'pad' for 'embed': allowed are replicate, error"),
    ("policy: {mpl: pad}", "did you mean 'mlp'?"),
    ("overrides: mlp=tp", "overrides is 'mlp=tp'; give a list of REGEX=SPEC texts"),
    ("overrides: {mlp: tp}", "overrides is {'mlp': 'tp'}"),
    ("overrides: ''", "overrides is ''"),
    ("overrides: [3]", "overrides is [3]"),
    ("overrides: ['mlp']", "override 'mlp' has no REGEX=SPEC form"),
    ("overrides: ['mlp=tq,None']", "did you mean 'tp'?"),
    ("overrides: ['mlp=tp,cp']", "unknown mesh axis 'cp'; the axes are dp, fsdp, tp"),
    ("overrides: ['(mlp=tp']", "no regular expression"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_malformed_rules_file_is_refused_in_one_line_with_its_name(
    tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_rules_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"params: \xff\xfe")
    with pytest.raises(ConfigError, match="mine.yaml: cannot be read: 'utf-8' codec"):
        load_rules(str(path))


@pytest.mark.parametrize("name", ["folder", "folder.yaml", ""])
def test_a_folder_in_place_of_a_rules_file_is_called_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(exist_ok=True)
    with pytest.raises(
        ConfigError, match="is a folder; name a .yaml file in it, or one of fsdp\\+tp, fsdp, tp"
    ):
        load_rules(str(tmp_path / name))


@pytest.mark.parametrize("name", ["no/such.yaml", "~no-such-user/rules.yaml", "a\0.yaml"])
def test_a_rules_file_that_is_not_there_is_refused_without_a_traceback(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: |no rules are named"):
        load_rules(name)


@pytest.mark.parametrize("name", ["", "fspd", "FSDP", "a" * 5000, "a\0", "~no-such-user/rules"])
def test_a_name_that_is_no_preset_is_refused_with_those_that_there_are(name: str) -> None:
    words = re.escape("; there are fsdp+tp, fsdp, tp, easylm, replicated, or name a .yaml file")
    with pytest.raises(ConfigError, match=words):
        load_rules(name)
    with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
        load_rules("fspd")


def test_a_rules_file_needs_no_particular_ending(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("params: {mlp: null}")
    assert load_rules(str(path)).axes_of["mlp"] == ()


def test_an_override_of_a_rules_file_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    rules = load_rules(write(tmp_path, "overrides: ['mlp/w1=tp,fsdp', 'lm_head/bias=whole']"))
    with pytest.raises(
        ConfigError, match=r"rules 'mine.yaml': override 'mlp/w1=tp,fsdp' matches no parameter"
    ):
        plan(rules)
    assert plan(load_rules(write(tmp_path, "overrides: ['lm_head/bias=whole']"))).notes == ()


def test_an_override_of_a_rules_file_behind_others_of_it_is_refused_and_one_before_a_presets_is_not(
    tmp_path: Path,
) -> None:
    rules = load_rules(write(tmp_path, "overrides: ['mlp=whole', 'mlp/up_proj=tp,None']"))
    with pytest.raises(
        ConfigError,
        match="'mlp/up_proj=tp,None' decides nothing: the earlier 'mlp=whole' decides layers/mlp/up",
    ):
        plan(rules)
    whole = plan(load_rules(write(tmp_path, "preset: easylm\noverrides: ['mlp=whole']")))
    assert whole["layers/mlp/down_proj/kernel"].decided_by == "override mlp=whole"


def test_a_head_layout_and_a_rules_files_own_override_on_the_head_are_refused(tmp_path: Path) -> None:
    rules = load_rules(write(tmp_path, "overrides: ['lm_head=tp,fsdp']"))
    assert plan(rules).head_layout == "vocab"
    with pytest.raises(ConfigError, match=r"override 'lm_head=tp,fsdp' of rules 'mine.yaml' both decide"):
        plan_model(CONFIG, EVEN, rules, head_layout="hidden")


def test_rules_that_cut_layers_over_fsdp_say_that_layers_run_one_after_the_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers run one after the other"):
        plan(load_rules(write(tmp_path, "params: {layers: fsdp}")))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "up_proj=tp",
            "rules 'mine.yaml': override 'up_proj=tp' has 1 entry, but layers/mlp/up_proj/kernel has 3 dims",
        ),
        (
            "up_proj=tp,tp",
            "puts mesh axis 'tp' on two dims of layers/mlp/up_proj/kernel, mlp 65 and embed 48",
        ),
        ("up_proj=tp,None,None", "cuts the layers of layers/mlp/up_proj/kernel"),
        (
            "up_proj=None,tp",
            "up_proj/kernel, by override up_proj=None,tp: dim embed of 48 is not divided by tp = 5",
        ),
    ],
)
def test_an_override_of_a_rules_file_that_does_not_fit_is_refused(
    tmp_path: Path, override: str, words: str
) -> None:
    rules = load_rules(write(tmp_path, f"overrides: ['{override}']"))
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan(rules, MeshSpec(tp=5))
