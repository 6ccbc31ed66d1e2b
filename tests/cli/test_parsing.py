"""Flags and YAML are understood in every promised form; the rest is refused by name and place (C601)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli.convert import ConvertOptions
from shardwise.cli.eval import EvalOptions
from shardwise.cli.explain import ExplainOptions
from shardwise.cli.finetune import FinetuneOptions
from shardwise.cli.generate import GenerateOptions
from shardwise.cli.info import InfoOptions
from shardwise.cli.options import Options
from shardwise.cli.parsing import parse_options
from shardwise.cli.pretrain import PretrainOptions
from shardwise.cli.schema import fields_of
from shardwise.errors import ConfigError

ALL = [
    FinetuneOptions,
    PretrainOptions,
    EvalOptions,
    GenerateOptions,
    ConvertOptions,
    ExplainOptions,
    InfoOptions,
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the commands below name."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("text")
    return tmp_path


def finetune(*argv: str) -> FinetuneOptions:
    return parse_options(FinetuneOptions, argv, "shardwise finetune")


def generate(*argv: str) -> GenerateOptions:
    return parse_options(GenerateOptions, argv, "shardwise generate")


def refused(*argv: str) -> str:
    """The message with which finetune refuses these arguments."""
    with pytest.raises(ConfigError) as caught:
        finetune("m", "--data", "a.txt", "--out", "o", "--steps", "1", *argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_yaml(text: str) -> str:
    Path("run.yaml").write_text(text)
    return refused("--config", "run.yaml")


@pytest.mark.parametrize("cls", ALL)
def test_every_option_has_help_and_no_section_shares_a_name_with_an_option(cls: type[Options]) -> None:
    fields = fields_of(cls)
    assert all(field.help for field in fields.values())
    assert not {field.section for field in fields.values()} & set(fields)


def test_a_leading_tilde_in_a_path_is_the_users_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(folder)
    monkeypatch.setenv("HOME", home)
    Path("run.yaml").write_text("metrics: ~/m.jsonl")
    options = finetune("~", "--data", "a.txt", "~/b.txt", "--out=~/o", "--steps", "1", "--config", "run.yaml")
    assert (options.model, options.data) == (home, ("a.txt", f"{home}/b.txt"))
    assert (options.out, options.metrics) == (f"{home}/o", f"{home}/m.jsonl")
    assert generate("m", "~/ is home").prompt == ("~/ is home",)


def test_values_get_their_types(folder: Path) -> None:
    options = finetune(
        "m",
        "--data",
        "a.txt",
        "b.txt",
        "--out",
        "o",
        "--steps",
        "3",
        "--learning-rate",
        "2e-5",
        "--remat=full",
    )
    assert options.data == ("a.txt", "b.txt")
    assert (options.steps, options.learning_rate, options.remat) == (3, 2e-5, "full")
    assert (options.global_batch, options.length, options.beta2, options.resume) == (8, 1024, 0.95, False)


def test_dashes_underscores_and_dotted_names_are_one(folder: Path) -> None:
    base = ("m", "--data", "a.txt", "--out", "o", "--steps", "1")
    spellings = [
        "--learning-rate",
        "--learning_rate",
        "--optimizer.learning-rate",
        "--optimizer.learning_rate",
    ]
    assert {finetune(*base, name, "0.5").learning_rate for name in spellings} == {0.5}
    assert finetune(*base, "--learning_rate=0.5").learning_rate == 0.5


def test_positionals_may_stand_between_options() -> None:
    options = generate("m", "first", "--max-new-tokens", "5", "second", "--chat", "third")
    assert (options.model, options.prompt, options.chat) == ("m", ("first", "second", "third"), True)


def test_a_prompt_may_start_with_dashes_after_a_double_dash() -> None:
    assert generate("m", "--", "--steps", "-h").prompt == ("--steps", "-h")


def test_a_value_may_start_with_a_minus_sign() -> None:
    assert generate("m", "p", "--mesh", "-1,1,2").mesh == "-1,1,2"
    assert generate("m", "- an item").prompt == ("- an item",)


def test_lists_grow_by_repetition(folder: Path) -> None:
    options = generate("m", "p", "--override", "a=fsdp", "--override", "b=tp", "--stop-token", "1")
    assert (options.override, options.stop_token) == (("a=fsdp", "b=tp"), ("1",))


def test_a_yaml_file_holds_options_flat_or_in_sections_and_flags_win(folder: Path) -> None:
    Path("run.yaml").write_text(
        "model: m\ndata: a.txt\nout: o\nmesh: 1,-1,1\nseed: 3\n"
        "optimizer:\n  steps: 7\n  learning-rate: 2e-5\n"
        "output: {resume: true, checkpoint_dir: .}\n"
    )
    options = finetune("--config", "run.yaml", "--seed", "4")
    assert (options.model, options.data, options.mesh, options.seed) == ("m", ("a.txt",), "1,-1,1", 4)
    assert (options.steps, options.learning_rate, options.resume) == (7, 2e-5, True)


def test_the_later_of_two_yaml_files_wins(folder: Path) -> None:
    Path("one.yaml").write_text("model: m\ndata: [a.txt, b.txt]\nout: o\nsteps: 1\n")
    Path("two.yaml").write_text("steps: 2\nepochs: null\n")
    options = finetune("--config", "one.yaml", "--config", "two.yaml")
    assert (options.steps, options.data) == (2, ("a.txt", "b.txt"))


@pytest.mark.parametrize("text", ["no", "1e3", "1:30", "007", "null "])
def test_yaml_text_stays_as_written(folder: Path, text: str) -> None:
    Path("run.yaml").write_text(f"text_field: {text}\n" if text != "null " else "text_field: 'null'\n")
    Path("a.jsonl").write_text("")
    options = finetune("m", "--data", "a.jsonl", "--out", "o", "--steps", "1", "--config", "run.yaml")
    assert options.text_field == text.strip()


def test_an_unknown_flag_is_refused_with_the_nearest_and_its_section(folder: Path) -> None:
    text = refused("--learning-rat", "1")
    assert text == (
        "unknown option --learning-rat of 'shardwise finetune'; "
        "did you mean --learning-rate (section 'optimizer')?"
    )
    assert "did you mean --global-batch" in refused("--global-batch-size", "1")
    assert "see 'shardwise finetune --help'" in refused("--xyzzy")
    assert "did you mean --steps" in refused("--step", "1"), "abbreviations are not options"
    assert "unknown option -m" in refused("-m", "1")


def test_a_flag_under_the_wrong_section_is_refused_with_the_right_one(folder: Path) -> None:
    assert "--learning-rate is in section 'optimizer', not 'input'" in refused("--input.learning-rate", "1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--learning-rate", "fast"), "--learning-rate: expected a number, got 'fast'"),
        (("--warmup-steps", "1.5"), "--warmup-steps: expected a whole number, got '1.5'"),
        (("--epochs", "true"), "--epochs: expected a whole number, got 'true'"),
        (("--remat", "ful"), "--remat: expected one of none, full, dots, got 'ful'"),
        (("--resume=yes",), "--resume takes no value; got 'yes'"),
        (("--seed",), "--seed needs a value: a whole number"),
        (("--seed", "--resume"), "--seed needs a value: a whole number"),
        (("--steps", "2"), "--steps is given twice: '1' and '2'; give it once"),
    ],
)
def test_a_wrong_value_is_refused_with_the_expected_type(
    folder: Path, argv: tuple[str, ...], words: str
) -> None:
    assert refused(*argv) == words


def test_missing_options_are_named_and_a_swallowed_model_is_explained(folder: Path) -> None:
    with pytest.raises(ConfigError, match="needs MODEL, --data, --out"):
        finetune()
    with pytest.raises(ConfigError, match="needs MODEL .put it before --data, which takes all that follows."):
        finetune("--out", "o", "--steps", "1", "--data", "a.txt", "m")


def test_too_many_arguments_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unexpected argument 'n'"):
        finetune("m", "n", "--data", "a.txt", "--out", "o", "--steps", "1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n", "run.yaml:1:1: unknown key 'a' in the top level"),
        ("seed: 1\nlearning_rat: 1\n",
         "run.yaml:2:1: unknown key 'learning_rat' in the top level; did you mean 'learning_rate'?"),
        ("optimizer:\n  num-epochs: 1\n",
         "run.yaml:2:3: unknown key 'num-epochs' in section 'optimizer'; did you mean 'epochs'?"),
        ("input:\n  learning_rat: 1\n",
         "in section 'input'; did you mean 'learning_rate' in section 'optimizer'?"),
        ("input:\n  z_loss: 1\n",
         "run.yaml:2:3: key 'z_loss' belongs in section 'optimizer', not in 'input'"),
        ("optimiser:\n  z_loss: 1\n", "did you mean the section 'optimizer'?"),
        ("optimizer: 3\n", "run.yaml:1:12: 'optimizer' is a section; put 'key: value' lines under it"),
        ("z_loss: 1\noptimizer: {z_loss: 1}\n",
         "run.yaml:2:13: key 'z_loss' is given twice; first at run.yaml:1:9"),
        ("learning_rate: fast\n", "run.yaml:1:16: learning_rate: expected a number, got 'fast'"),
        ("learning_rate: true\n", "run.yaml:1:16: learning_rate: expected a number, got true"),
        ("learning_rate: [1]\n", "expected a number, got [1]"),
        ("warmup_steps: 1.5\n", "run.yaml:1:15: warmup_steps: expected a whole number, got 1.5"),
        ("resume: 1\n", "run.yaml:1:9: resume: expected true or false, got 1"),
        ("remat: off\n", "run.yaml:1:8: remat: expected one of none, full, dots, got 'off'"),
        ("length: null\n", "run.yaml:1:9: length: expected a whole number, got nothing"),
        ("mesh: [1, 1, 1]\n", "run.yaml:1:7: mesh: expected a text, got [1, 1, 1]"),
        ("override: [[a]]\n", "override: expected a text or a list of texts"),
        ("seed: 1\n  length: 2\n", "run.yaml:2:9: not valid YAML"),
        ("seed: [1\n", "run.yaml:2:1: not valid YAML"),
        ("seed: 1\n\tlength: 2\n", "run.yaml:2:1: not valid YAML"),
        ("- seed\n", "run.yaml:1:1: expected 'key: value' lines"),
        ("", "run.yaml: the file is empty"),
    ],
)  # fmt: skip
def test_a_wrong_yaml_file_is_refused_with_line_and_column(folder: Path, text: str, words: str) -> None:
    assert words in refused_yaml(text)


def test_an_absent_or_binary_yaml_file_is_named(folder: Path) -> None:
    assert refused("--config", "no.yaml") == "--config: cannot read no.yaml: No such file or directory"
    Path("bin.yaml").write_bytes(b"\xff\xfe\x00")
    assert "bin.yaml: not UTF-8 text" in refused("--config", "bin.yaml")


@pytest.mark.parametrize("cls", ALL)
def test_the_help_names_every_option_its_default_and_an_example(
    cls: type[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(cls, ["--help"], "shardwise verb")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for field in fields_of(cls).values():
        assert field.shown in text
        assert field.help in flat
        assert field.positional or f"\n{field.section}:" in text
        if isinstance(field.default, int | float | str) and not field.is_switch:
            assert f"[default: {field.default}]" in flat
    assert cls.example in text


@pytest.mark.parametrize("cls", ALL)
def test_the_example_of_the_help_is_a_valid_command(
    cls: type[Options], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    monkeypatch.setattr("shardwise.cli.options.require_input", lambda *_: None)
    for verb in ("finetune", "pretrain", "eval", "generate", "convert", "explain", "info"):
        monkeypatch.setattr(f"shardwise.cli.{verb}.require_model", lambda *_: None)
    monkeypatch.setattr("shardwise.cli.eval.require_input", lambda *_: None)
    program, verb, *argv = shlex.split(cls.example)
    assert program == "shardwise"
    assert cls.__name__ == verb.capitalize() + "Options"
    assert isinstance(parse_options(cls, argv, f"shardwise {verb}"), cls)
