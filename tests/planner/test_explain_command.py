"""`shardwise explain` as a person meets it: one screen, JSON, plan files, what-ifs, mistakes in a line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiny import write_llama

from shardwise.cli import main as main_module
from shardwise.cli.explain import ExplainOptions
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.rules import HeadLayout, Override, Rules
from shardwise.planner.explain_command import matching, swapped

SOURCE = str(Path(main_module.__file__).parents[2])
CONFIG = ModelConfig(
    vocab_size=104, embed_dim=24, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=4, mlp_dim=52,
    max_position=64, qkv_bias=True, head_bias=True,
)  # fmt: skip
BOTH = MeshSpec(1, 2, 2)
MATRICES = ["embed/table", "lm_head/kernel", *(f"layers/{name}/kernel" for name in (
    "attn/q_proj", "attn/k_proj", "attn/v_proj", "attn/o_proj", "mlp/gate_proj", "mlp/up_proj",
    "mlp/down_proj",
))]  # fmt: skip

Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("explain") / "llama", tokenizer=False)


@pytest.fixture
def explain(llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explain:
    """Function: runs `explain` on a tiny model and gives exit code, output and errors.

    Devices are not set up anew: all tests of a process share them.
    """
    monkeypatch.setattr("shardwise.cli.explain.start", lambda options: None)

    def run(*argv: object, model: object = llama) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["explain", *([str(model)] if model else []), *map(str, argv)])
        return code, *capsys.readouterr()

    return run


def good(result: tuple[int, str, str]) -> str:
    assert (result[0], result[2]) == (0, "")
    return result[1]


def mistake(result: tuple[int, str, str]) -> str:
    code, out, error = result
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1
    return error


MESH = ("--mesh", "fsdp:2,tp:2")


# --- what is shown


@pytest.mark.parametrize("task", ["train", "prefill", "decode", "score"])
def test_the_overview_names_every_tensor_and_is_one_screen(explain: Explain, task: str) -> None:
    lines = good(explain(*MESH, "--task", task)).splitlines()
    assert len(lines) <= 50
    first = next(i for i, line in enumerate(lines) if line.startswith("tensor ")) + 1
    shown = [line.split()[0] for line in lines[first : first + 12]]
    assert shown == [
        "embed/table", "final_norm/scale", "attn/k_proj", "attn/o_proj", "attn/q_proj", "attn/v_proj",
        "attn_norm/scale", "mlp/down_proj", "mlp/gate_proj", "mlp/up_proj", "mlp_norm/scale", "lm_head",
    ]  # fmt: skip


def test_only_training_speaks_of_a_backward_pass(explain: Explain) -> None:
    spoken = {task: "backward" in good(explain(*MESH, "--task", task)) for task in ("train", "decode")}
    assert spoken == {"train": True, "decode": False}


def test_an_axis_of_one_device_is_not_shown_as_a_cut(explain: Explain) -> None:
    assert "/tp" not in good(explain("--mesh", "fsdp:2"))
    assert "none to choose, since tp is 1" in good(explain("--mesh", "fsdp:2"))


def test_lines_fit_a_narrow_terminal(llama: Path) -> None:
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "shardwise.cli.main", "explain", str(llama), *MESH]
    env = os.environ | {"PYTHONPATH": SOURCE, "COLUMNS": "80", "TERM": "dumb"}
    process = subprocess.Popen(command, env=env, stdout=child)
    os.close(child)
    out = b""
    try:
        while block := os.read(parent, 1 << 16):
            out += block
    except OSError:  # Linux's end of a pseudo-terminal
        pass
    assert process.wait(60) == 0
    lines = out.decode().splitlines()
    assert len(lines) > 30 and max(map(len, lines)) <= 80


def test_every_padding_is_a_note(explain: Explain) -> None:
    out = good(explain("--mesh", "fsdp:3,tp:4"))
    assert "note: tp 4 does not divide vocab 290: padded to 292" in out
    assert "held once, repeated 2× at use" in out


def test_tensor_zooms_in_on_what_a_regex_finds(explain: Explain) -> None:
    out = good(explain(*MESH, "--tensor", "(q|o)_proj"))
    assert re.findall(r"^(\S+) +\[layers", out, re.M) == [
        "layers/attn/o_proj/kernel",
        "layers/attn/q_proj/kernel",
    ]
    assert "why: row-parallel" in out and "forward: all-reduce over tp" in out
    assert "|00|" in out and "|11|" in out


def test_a_regex_that_finds_all_shows_all(llama: Path) -> None:
    plan = plan_model(CONFIG, BOTH)
    assert matching(plan, "") == plan.paths


def test_swap_shows_both_sides(explain: Explain) -> None:
    out = good(explain(*MESH, "--swap", "o_proj"))
    assert "layers/attn/o_proj/kernel cut (fsdp, tp, ·, ·) → (tp+fsdp, ·, ·, ·)" in out
    assert "before: row-parallel" in out and "a cut against the grain" in out
    assert re.search(r"MB moved by a device: \S+ → \S+ \(\+", out)


def test_swapping_fsdp_shows_no_difference_but_in_single_numbers(explain: Explain) -> None:
    out = good(explain(*MESH, "--swap", "down_proj:fsdp"))
    changes = re.findall(r"^\S+ +all-\S+ .*?(\S+ \S+|same)$", out, re.M)
    assert changes and all(change == "same" or change.endswith("bytes") for change in changes)


def test_rules_beyond_the_prediction_are_named_and_an_audit_of_them_fails(
    explain: Explain, tmp_path: Path
) -> None:
    rules = tmp_path / "r.yaml"
    rules.write_text("activations: {kv_cache: [[dp, fsdp], null, null, null]}")
    given = ("--mesh", "tp:2", "--task", "prefill", "--seq", 16, "--rules", rules)
    out = good(explain(*given)).replace("\n    ", " ")
    assert "not in this prediction (--audit compiles it): kv_cache cut otherwise than key" in out
    code, shown, _ = explain(*given, "--audit")
    assert code == 1 and "more than the 1 % allowed" in shown


def test_audit_puts_the_compiled_step_beside(explain: Explain) -> None:
    out = good(explain("--mesh", "2,2,2", "--task", "decode", "--seq", 16, "--audit"))
    assert "compiled, for one device of 8" in out and "bytes unexplained: 0.00%" in out


# --- JSON and plan files


def test_json_goes_to_a_new_file_in_a_new_folder(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "new" / "out.json"
    out = good(explain(*MESH, "--json", file))
    assert out.splitlines()[-1] == f"wrote {file}"
    assert json.loads(file.read_text())["totals"]["parameters"] == 26336
    assert "exists already" in mistake(explain(*MESH, "--json", file))


@pytest.mark.parametrize("option", ["--json", "--save-plan"])
def test_a_file_is_written_into_folders_that_are_made_for_it(
    explain: Explain, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "new" / "folder" / "out.json"
    assert good(explain(*MESH, option, file)).splitlines()[-1] == f"wrote {file}"
    assert json.loads(file.read_text())["mesh"]["fsdp"] == 2


@pytest.mark.parametrize("option", ["--json", "--save-plan"])
@pytest.mark.parametrize(
    "name", ["file/out.json", "file/folder/out.json", "a" * 300, "a" * 300 + "/out.json"]
)
def test_a_file_that_cannot_be_written_is_said_in_a_line(
    explain: Explain, tmp_path: Path, option: str, name: str
) -> None:
    (tmp_path / "file").touch()
    error = mistake(explain(*MESH, option, tmp_path / name))
    assert option in error and "cannot be made" in error


def test_a_mistake_in_what_to_show_is_found_before_anything_is_written(
    explain: Explain, tmp_path: Path
) -> None:
    files = ("--json", tmp_path / "out.json", "--save-plan", tmp_path / "plan.json")
    mistake(explain(*MESH, *files, "--tensor", "nosuch"))
    mistake(explain(*MESH, *files, "--swap", "nosuch"))
    assert not list(tmp_path.iterdir())
    good(explain(*MESH, *files))


def test_json_and_plan_in_one_file_are_refused(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    error = mistake(explain(*MESH, "--json", file, "--save-plan", file))
    assert f"--json and --save-plan both write {file}; name two files" in error


@pytest.mark.parametrize("argv", [("--plan",), ("--diff",)])
def test_a_folder_in_place_of_a_plan_file_is_called_one(
    explain: Explain, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    error = mistake(
        explain(*argv, tmp_path) if argv == ("--plan",) else explain(*argv, tmp_path, tmp_path, model=None)
    )
    assert f"plan file {tmp_path} cannot be read: it is a folder; name a file in it" in error


def test_json_on_standard_output_stands_alone(explain: Explain, tmp_path: Path) -> None:
    out = good(explain(*MESH, "--json", "-", "--save-plan", tmp_path / "p.json"))
    assert json.loads(out)["mesh"] == {"dp": 1, "fsdp": 2, "tp": 2, "devices": 4}


def test_a_saved_plan_is_explained_as_when_it_was_made(explain: Explain, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = json.loads(good(explain(*MESH, "--override", "q_proj=whole", "--json", "-", "--save-plan", plan)))
    assert json.loads(good(explain("--plan", plan, "--json", "-"))) == made
    assert json.loads(good(explain("--plan", plan, *MESH, "--json", "-"))) == made


def test_a_plan_for_another_mesh_or_model_is_refused(explain: Explain, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    good(explain(*MESH, "--save-plan", plan))
    assert "mesh fsdp: 2 → 1; mesh tp: 2 → 4" in mistake(explain("--plan", plan, "--mesh", "tp:4"))
    assert "vocab_size: 290 → 32000" in mistake(explain("--plan", plan, model="tinyllama-1.1b"))


def test_an_edited_plan_is_refused_by_its_name(explain: Explain, tmp_path: Path) -> None:
    plan, edited = tmp_path / "plan.json", tmp_path / "edited.json"
    good(explain(*MESH, "--save-plan", plan))
    edited.write_text(plan.read_text().replace('"tp"\n', '"fsdp"\n'))
    assert "plan file" in (error := mistake(explain("--plan", edited))) and "edited.json" in error


def test_diff_is_silent_about_equal_plans_and_names_what_differs(explain: Explain, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    good(explain(*MESH, "--head-layout", "vocab", "--save-plan", files[0]))
    good(explain(*MESH, "--head-layout", "hidden", "--save-plan", files[1]))
    assert explain("--diff", files[0], files[0], model=None) == (0, "no difference\n", "")
    code, out, _ = explain("--diff", *files, model=None)
    assert code == 1
    assert 'head_layout: "vocab" → "hidden"' in out
    assert "lm_head/kernel spec: tp,fsdp → None,(tp,fsdp)" in out


# --- what-if


SWAPS = [
    (path, layout, axis)
    for path in MATRICES
    for layout in ("vocab", "hidden", "replicated")
    for axis in ("tp", "fsdp")
    if (path, layout, axis) != ("lm_head/kernel", "replicated", "tp")  # not cut over tp
]


@pytest.mark.parametrize(("path", "layout", "axis"), SWAPS)
def test_a_swap_moves_one_axis_of_one_tensor_and_nothing_else(
    path: str, layout: HeadLayout, axis: str
) -> None:
    plan = plan_model(CONFIG, BOTH, head_layout=layout)
    after = swapped(plan, f"{path}:{axis}")
    assert [d.path for d in after.decisions if d.spec != plan[d.path].spec] == [path]
    assert after.activations == plan.activations

    def places(p: Plan, name: str) -> list[int]:
        return [dim for dim, axes in enumerate(p[path].spec) if name in axes]

    other = "fsdp" if axis == "tp" else "tp"
    assert places(after, other) == places(plan, other)
    assert len(places(after, axis)) == 1 and places(after, axis) != places(plan, axis)


def test_a_swap_takes_tp_where_no_axis_is_named_and_else_the_only_one() -> None:
    for mesh, spec in ((BOTH, ((), ("tp", "fsdp"))), (MeshSpec(1, 4, 1), (("fsdp",), ()))):
        after = swapped(plan_model(CONFIG, mesh), "embed/table")
        cut = tuple(tuple(a for a in axes if mesh.sizes[a] > 1) for axes in after["embed/table"].spec)
        assert cut == spec


def test_a_swap_takes_the_place_of_an_override_of_that_tensor_alone() -> None:
    mine, shared = "q_proj/kernel=None,None,None,tp", "(o|down)_proj/kernel=whole"
    plan = plan_model(CONFIG, BOTH, overrides=[Override.parse(text) for text in (mine, shared)])
    after = swapped(plan, "q_proj")
    assert after["layers/attn/q_proj/kernel"].spec == ((), ("tp",), (), (), ())
    assert [o.text for o in after.overrides[1:]] == [shared]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("proj", "finds .*k_proj.*; name one"),
        ("nosuch", "finds no matrix; there are embed/table, layers/attn/k_proj/kernel,"),
        ("layers/attn/q_prj/kernel", "finds no matrix; nearest: layers/attn/q_proj/kernel"),
        ("final_norm", "finds only final_norm/scale; name a matrix"),
        ("q_proj/bias", "finds only layers/attn/q_proj/bias; name a matrix"),
        ("q_proj:dp", "is cut over tp and fsdp; name one, as in"),
        (
            "q_proj:pp",
            r"q_proj/kernel \(layers 2, heads 4, q_per_kv 2, head_dim 4, embed 24\) is cut over tp and"
            " fsdp; name"
            " one, as in layers/attn/q_proj/kernel:tp",
        ),
    ],
)
def test_a_swap_that_cannot_be_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        swapped(plan_model(CONFIG, BOTH), text)


def test_a_swap_of_what_is_not_cut_says_so() -> None:
    words = (
        r"nothing to swap, since no axis of mesh dp:1,fsdp:1,tp:1 cuts layers/attn/q_proj/kernel \(layers 2,"
    )
    with pytest.raises(ConfigError, match=words):
        swapped(plan_model(CONFIG, MeshSpec()), "q_proj")


@pytest.mark.parametrize(
    ("axis", "words"), [("tp", "embed 24 by tp = 7, q_per_kv"), ("fsdp", "4 by fsdp = 7")]
)
def test_a_swap_onto_dims_that_do_not_divide_names_them_and_sizes_of_the_axis_that_do(
    axis: str, words: str
) -> None:
    rules = Rules().changed(policy={"fsdp": "pad"})
    with pytest.raises(ConfigError, match=f"can take {axis}; not divided are .*{words}") as caught:
        swapped(plan_model(CONFIG, MeshSpec(**{axis: 7}), rules), f"q_proj:{axis}")
    proposed = str(caught.value).partition(f"a mesh with another {axis}, such as ")[2].split(", ")
    assert proposed == {"tp": ["6", "8", "4"], "fsdp": ["4", "2"]}[axis]
    for number in map(int, proposed):
        swapped(plan_model(CONFIG, MeshSpec(**{axis: number}), rules), f"q_proj:{axis}")


def test_the_head_of_a_tied_model_is_swapped_as_its_table() -> None:
    plan = plan_model(ModelConfig(**(vars(CONFIG) | {"tie_embeddings": True})), BOTH)
    with pytest.raises(ConfigError, match="head is its embedding table; name embed/table"):
        swapped(plan, "lm_head")
    assert swapped(plan, "embed/table").head_layout == "hidden"


# --- the head's layout


def test_auto_leaves_the_head_to_a_rules_file_that_decides_it(explain: Explain, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("overrides: ['lm_head/kernel=None,tp']\n")
    out = good(explain(*MESH, "--rules", rules))
    assert "head layout hidden, by override lm_head/kernel=None,tp" in out
    assert "head layout vocab, by override lm_head/kernel=tp,fsdp" in good(
        explain(*MESH, "--rules", "easylm")
    )


def test_auto_prints_its_comparison(explain: Explain) -> None:
    out = good(explain(*MESH))
    assert "the cheapest of three" in out
    assert all(f"  {name} " in out for name in ("vocab", "hidden", "replicated"))


# --- mistakes and options without effect


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "needs --mesh SPEC"),
        (["--mesh", "tp:0"], "size of tp is 0"),
        ([*MESH, "--batch", "3"], "cannot be split over dp×fsdp = 2; it must be a multiple, such as 2 or 4"),
        ([*MESH, "--seq", "65"], "more than the model's context of 64"),
        ([*MESH, "--tensor", "("], "no regular expression"),
        ([*MESH, "--tensor", "q_prj"], "matches no tensor; nearest: layers/attn/q_proj/kernel"),
        ([*MESH, "--tensor", "zzz"], "matches no tensor; there are embed/table, final_norm/scale,"),
        ([*MESH, "--tensor", "q", "--swap", "q_proj"], "leave one of them out"),
        ([*MESH, "--task", "train", "--choose", "sample"], "--choose has no effect"),
        ([*MESH, "--task", "decode", "--remat", "full"], "--remat has no effect"),
        ([*MESH, "--task", "score", "--grad-accum-steps", "2"], "--grad-accum-steps has no effect"),
        ([*MESH, "--json", "-", "--audit"], "leave --audit out or name a file"),
        ([*MESH, "--devices", "cpu:4"], "--devices has no effect"),
        ([*MESH, "--override", "q_proj"], "no REGEX=SPEC form"),
        ([*MESH, "--override", "nosuch=whole"], "matches no parameter; there are embed/table"),
        (
            [*MESH, "--override", "mlp/up_proj=tq,None"],
            "unknown mesh axis 'tq'; the axes are dp, fsdp, tp; did you",
        ),
        ([*MESH, "--override", "mlp/up_proj=tp"], "write 'mlp/up_proj=tp,None'"),
        ([*MESH, "--override", "mlp/up_proj=tp,mp"], "on two dims of layers/mlp/up_proj/kernel, mlp"),
        ([*MESH, "--rules", "fdsp"], "did you mean 'fsdp'"),
        ([*MESH, "--rules", "/"], "rules '/' is a folder; name a .yaml file in it"),
        (["--mesh", "fsdp:2", "--head-layout", "vocab"], "head layout 'vocab' has no effect"),
        (
            ["--mesh", "fsdp:2", "--head-layout", "replicated"],
            "and tp is 1 on mesh dp:1,fsdp:2,tp:1; leave it out",
        ),
        (
            ["--mesh", "fdsp:2,tp:2"],
            "unknown axis 'fdsp'; the axes are dp, fsdp, tp (or mp for tp); did you mean",
        ),
        ([*MESH, "--override", "lm_head=whole", "--head-layout", "vocab"], "both decide lm_head/kernel"),
        ([*MESH, "--plan", "nosuch.json"], "file not found"),
        (["other", *MESH], "takes one MODEL, got 2"),
        (["--diff"], "takes two plan files with --diff, got 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_that_says_what_to_do(explain: Explain, argv: list[str], words: str) -> None:
    assert words in mistake(explain(*argv))


def test_diff_takes_no_other_option(explain: Explain, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    good(explain(*MESH, "--save-plan", file))
    assert "--mesh has no effect" in mistake(explain("--diff", file, file, *MESH, model=None))


def test_a_mesh_to_be_completed_asks_for_devices(llama: Path) -> None:
    options = {"model": (str(llama),), "mesh": "tp:-1"}
    assert (
        ExplainOptions(**options).needs_devices
        and not ExplainOptions(**(options | {"mesh": "tp:2"})).needs_devices
    )
    ExplainOptions(**options, devices="cpu:4").validate()


def test_an_audit_simulates_as_many_devices_as_the_mesh_has_and_a_plan_alone_wakes_none(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("shardwise.cli.explain.start", lambda options: asked.append(options.devices))
    monkeypatch.setattr("shardwise.planner.explain_command.run", lambda options: 0)
    for more in ([], ["--audit"]):
        assert main(["explain", str(llama), "--mesh", "fsdp:8,tp:4", *more]) == 0
    assert asked == ["cpu", "cpu:32"]


# --- large models


def test_the_largest_preset_is_explained_without_weights_devices_or_much_memory() -> None:
    script = """
from shardwise.cli.main import main
assert main(["explain", "llama3.1-405b", "--mesh", "dp:8,fsdp:64,tp:8", "--batch", "1024"]) == 0
from jax._src import xla_bridge
print("backends", list(xla_bridge._backends),
      "peak kB", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *shown, last = done.stdout.splitlines()
    assert any(line.startswith("405,853,388,800 parameters") for line in shown)
    backends, peak = re.fullmatch(r"backends (\[.*\]) peak kB (\d+)", last).groups()  # type: ignore[union-attr]
    assert backends == "[]"
    assert int(peak) < 1 << 20  # 1 GiB; ru_maxrss would be that of the process which started it
