"""From a command line and YAML files to a verb's options, or to one line that says what was not understood.

jsonargparse checks types and prints the help (schema.py). Ours are the parts whose messages it does not have:
the nearest known name, the section a key belongs to, line and column of a YAML mistake, and options between
positionals.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser

from shardwise.cli.options import Options, flag
from shardwise.cli.schema import Field, build_parser, fields_of
from shardwise.errors import ConfigError

T = TypeVar("T", bound=Options)


@dataclass(frozen=True)
class _Given:
    """A value that the user gave, before its type is checked."""

    value: Any
    where: str
    """For messages: `--steps`, or `run.yaml:3:8: steps`."""


def parse_options(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Reads a verb's options; touches no model and no data, only the YAML files that are named.

    Args:
        cls: the verb's options.
        argv: what stands after the verb.
        prog: for messages and help, `shardwise finetune`.
    Returns:
        The options, valid alone, together and with paths that exist.
    Raises:
        ConfigError: for anything unknown, mistyped, missing or without effect.
        SystemExit: code 0, after printing the help if that was asked for.
    """
    fields = fields_of(cls)
    parser = build_parser(cls, prog)
    if _asks_help(argv):
        parser.print_help(sys.stdout)
        raise SystemExit(0)
    flags, configs = _read_argv(fields, argv, prog)
    given: dict[str, _Given] = {}
    for path in configs:
        given |= _read_yaml(fields, Path(path), prog)
    given |= flags
    _require(fields, given, prog)
    values = {name: _typed(parser, fields[name], item) for name, item in given.items()}
    options = cls(**values)
    options.validate(values)
    options.check_paths()
    return options


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, if any is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _asks_help(argv: Sequence[str]) -> bool:
    before = argv[: argv.index("--")] if "--" in argv else argv
    return "-h" in before or "--help" in before


def _read_argv(
    fields: Mapping[str, Field], argv: Sequence[str], prog: str
) -> tuple[dict[str, _Given], list[str]]:
    """Splits argv into given values and config files; flags and positionals may stand in any order."""
    given: dict[str, _Given] = {}
    configs: list[str] = []
    places: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            places += rest
            break
        if not re.match(r"--|-[A-Za-z]", token):
            places.append(token)
            continue
        head, has_value, value = token.partition("=")
        name = _flag_name(fields, head, prog)
        field = fields.get(name)
        if field is not None and field.is_switch:
            if has_value:
                raise ConfigError(f"{head} takes no value; got '{value}'")
            given[name] = _Given(True, flag(name))
            continue
        values = [value] if has_value else _take_values(rest, many=field is not None and field.is_list)
        if not values:
            expected = "a file name" if field is None else field.expected
            raise ConfigError(f"{head} needs a value: {expected}")
        if field is None:
            configs += values
        elif field.is_list:
            earlier = given[name].value if name in given else []
            given[name] = _Given([*earlier, *values], flag(name))
        elif name in given:
            raise ConfigError(
                f"{flag(name)} is given twice: '{given[name].value}' and '{values[0]}'; give it once"
            )
        else:
            given[name] = _Given(values[0], flag(name))
    return given | _assign_places(fields, places), configs


def _take_values(rest: list[str], *, many: bool) -> list[str]:
    """Takes a flag's values from the front of `rest`; one may start with a minus sign (`--mesh -1,1,2`)."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (many or not values):
        values.append(rest.pop(0))
    return values


def _flag_name(fields: Mapping[str, Field], head: str, prog: str) -> str:
    """The field that `--global-batch`, `--global_batch` or `--input.global-batch` names; or `config`."""
    section, dot, name = head.lstrip("-").replace("-", "_").rpartition(".")
    known = {f.name: f for f in fields.values() if not f.positional}
    if not head.startswith("--"):
        known = {}
    if name == "config" and not dot:
        return name
    if name in known:
        if dot and section != known[name].section:
            raise ConfigError(f"{head}: {flag(name)} is in section '{known[name].section}', not '{section}'")
        return name
    guess = nearest(name, [*known, "config"])
    if guess is None:
        fix = f"see '{prog} --help'"
    elif guess == "config":
        fix = "did you mean --config?"
    else:
        fix = f"did you mean {flag(guess)} (section '{known[guess].section}')?"
    raise ConfigError(f"unknown option {head} of '{prog}'; {fix}")


def _assign_places(fields: Mapping[str, Field], places: list[str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for field in (f for f in fields.values() if f.positional):
        if not places:
            break
        if field.is_list:
            given[field.name], places = _Given(places, field.shown), []
        else:
            given[field.name], places = _Given(places[0], field.shown), places[1:]
    if places:
        raise ConfigError(
            f"unexpected argument '{places[0]}'; options start with --, and a text with spaces needs quotes"
        )
    return given


def _read_yaml(fields: Mapping[str, Field], path: Path, prog: str) -> dict[str, _Given]:
    """The options in a YAML file, at the top level or in sections."""
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise ConfigError(f"{path}: the file is empty; write lines such as 'learning_rate: 1e-4'")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{_place(path, root)}: expected 'key: value' lines")
    given: dict[str, _Given] = {}
    sections = {f.section for f in fields.values()}
    for key_node, value_node in root.value:
        key = _key(key_node)
        if key in sections and key not in fields:
            if not isinstance(value_node, yaml.MappingNode):
                raise ConfigError(
                    f"{_place(path, value_node)}: '{key}' is a section; put 'key: value' lines under it"
                )
            for inner_key, inner_value in value_node.value:
                _add_yaml(given, fields, loader, path, key, inner_key, inner_value, prog)
        else:
            _add_yaml(given, fields, loader, path, None, key_node, value_node, prog)
    return given


def _add_yaml(
    given: dict[str, _Given],
    fields: Mapping[str, Field],
    loader: yaml.SafeLoader,
    path: Path,
    section: str | None,
    key_node: yaml.Node,
    value_node: yaml.Node,
    prog: str,
) -> None:
    """Adds one `key: value` of a YAML file to `given`."""
    key = _key(key_node)
    name = key.replace("-", "_")
    place = _place(path, key_node)
    inside = f"section '{section}'" if section else "the top level"
    if name not in fields:
        raise ConfigError(
            f"{place}: unknown key '{key}' in {inside}; {_yaml_fix(fields, name, section, prog)}"
        )
    field = fields[name]
    if section not in (None, field.section):
        raise ConfigError(f"{place}: key '{key}' belongs in section '{field.section}', not in '{section}'")
    if name in given:
        raise ConfigError(
            f"{place}: key '{key}' is given twice; first at {given[name].where.rpartition(': ')[0]}"
        )
    where = f"{_place(path, value_node)}: {key}"
    value = loader.construct_object(value_node, deep=True)
    if value is None and field.accepts_none:
        return
    takes_text = field.value_type not in (int, float, bool)
    if takes_text and isinstance(value_node, yaml.ScalarNode) and value is not None:
        # The text as written: YAML would make a number of 1e3, a truth value of `no`, base 60 of 1:30.
        value = str(value_node.value)
    if field.is_list and isinstance(value_node, yaml.SequenceNode):
        value = [n.value if isinstance(n, yaml.ScalarNode) else None for n in value_node.value]
    elif field.is_list and value is not None:
        value = [value]
    given[name] = _Given(value, where)


def _yaml_fix(fields: Mapping[str, Field], name: str, section: str | None, prog: str) -> str:
    sections = {f.section for f in fields.values()}
    guess = nearest(name, [*fields, *(() if section else sections)])
    if guess is None:
        return f"see '{prog} --help'"
    if guess not in fields:
        return f"did you mean the section '{guess}'?"
    belongs = fields[guess].section
    elsewhere = f" in section '{belongs}'" if section not in (None, belongs) else ""
    return f"did you mean '{guess}'{elsewhere}?"


def _key(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "(not a text)"


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _require(fields: Mapping[str, Field], given: Mapping[str, _Given], prog: str) -> None:
    missing = [f for f in fields.values() if f.default is MISSING and f.name not in given]
    if not missing:
        return
    names = ", ".join(f.shown for f in missing)
    lists = [flag(f.name) for f in fields.values() if f.is_list and not f.positional and f.name in given]
    hint = ""
    if missing[0].positional and lists:
        hint = f" (put it before {lists[0]}, which takes all that follows)"
    raise ConfigError(f"'{prog}' needs {names}{hint}; see '{prog} --help'")


def _typed(parser: ArgumentParser, field: Field, item: _Given) -> Any:
    """The value in the field's type."""
    value = item.value
    wrong = ConfigError(f"{item.where}: expected {field.expected}, got {_shown(value)}")
    if field.is_list:
        if not all(isinstance(text, str) for text in value):
            raise wrong
        return tuple(_expanded(field, text) for text in value)
    if value is None or isinstance(value, bool) != field.is_switch:
        raise wrong
    if field.is_switch:
        return value
    if field.value_type is str and isinstance(value, str):
        return _expanded(field, value)
    try:
        return parser.parse_object({field.name: value}, defaults=False)[field.name]
    except argparse.ArgumentError as error:
        raise wrong from error


def _expanded(field: Field, text: str) -> str:
    """A path with the user's home for `~`: shells leave that of `--out=~/x` and of YAML as it is."""
    return os.path.expanduser(text) if field.is_path else text


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)
