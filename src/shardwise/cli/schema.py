"""What a class of options says about itself: fields with help and section, and the parser made of them.

Not here: reading a command line or a YAML file (parsing.py).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from dataclasses import MISSING, dataclass
from itertools import pairwise
from typing import Any, Literal

from jsonargparse import ArgumentParser
from jsonargparse import DefaultHelpFormatter as JsonargparseFormatter

from shardwise.cli.options import Options, flag

CONFIG_HELP = (
    "Read options from this YAML file; those on the command line win. In the file, an option stands alone "
    "(`learning_rate: 1e-4`) or under its group's name (`optimizer:`); `--optimizer.learning-rate` is "
    "understood too. May be repeated; later files win."
)


@dataclass(frozen=True)
class Field:
    """One option, as the parsers need it."""

    name: str
    """With underscores, as in Python and in YAML."""
    section: str
    """The group in `--help`, and the mapping of that name in YAML."""
    help: str
    """The docstring under the field."""
    type: Any
    """The annotation, resolved: int, float, bool, str, a Literal, one of them or None, or tuple[str, ...]."""
    default: Any
    """MISSING if the option is required."""
    metavar: str | None
    """What stands for the value in the help; None: the name, or the choices."""
    positional: bool
    """Whether it is given by place."""
    group: type[Options]
    """The class that declares it; its docstring describes the section."""

    @property
    def is_path(self) -> bool:
        """Whether values are paths, in which a leading `~` is the user's home."""
        return self.metavar in ("PATH", "FILE", "FILE.jsonl", "FOLDER", "DIR", "MODEL", "OUT")

    @property
    def value_type(self) -> Any:
        """The type without `| None`."""
        kinds = [t for t in typing.get_args(self.type) if t is not type(None)]
        return kinds[0] if self.accepts_none else self.type

    @property
    def accepts_none(self) -> bool:
        return type(None) in typing.get_args(self.type)

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def shown(self) -> str:
        """How messages call it: `--steps`, or `MODEL` for a positional."""
        return (self.metavar or self.name.upper()) if self.positional else flag(self.name)

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if typing.get_origin(self.value_type) is Literal:
            return "one of " + ", ".join(typing.get_args(self.value_type))
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        return words.get(self.value_type, "a text or a list of texts")


def fields_of(cls: type[Options]) -> dict[str, Field]:
    """All options of a class by name, sections together: the verb's own first, then its bases' in order."""
    hints = typing.get_type_hints(cls)
    raw = {f.name: f for f in dataclasses.fields(cls)}
    docs: dict[str, str] = {}
    declared: dict[str, type[Options]] = {}
    for base in cls.__mro__:
        if not (isinstance(base, type) and issubclass(base, Options)):
            continue
        for name, text in _field_docs(base).items():
            docs.setdefault(name, text)
        for name in inspect.get_annotations(base):
            # The last class wins: a verb that changes a default must not move the option to its section.
            declared[name] = base
    order = {base: i for i, base in enumerate(cls.__mro__)}
    names = sorted(raw, key=lambda name: order[declared[name]])
    fields = [
        Field(
            name=name,
            section=declared[name].section,
            help=docs[name],
            type=hints[name],
            default=raw[name].default,
            metavar=raw[name].metadata.get("metavar"),
            positional=raw[name].metadata.get("positional", False),
            group=declared[name],
        )
        for name in names
    ]
    sections = list(dict.fromkeys(f.section for f in fields))
    return {f.name: f for f in sorted(fields, key=lambda f: sections.index(f.section))}


def build_parser(cls: type[Options], prog: str) -> ArgumentParser:
    """The jsonargparse parser of a verb: it prints the help and checks types."""
    assert cls.__doc__ is not None
    fields = fields_of(cls)
    needed = [f for f in fields.values() if f.default is MISSING]
    places = [f.shown + (" ..." if f.is_list else "") for f in needed if f.positional]
    places += [f"{f.shown} {f.metavar}" for f in needed if not f.positional]
    parser = ArgumentParser(
        prog=prog,
        usage=" ".join([prog, *places, "[options]"]),
        description=cls.__doc__.strip(),
        epilog=f"example:\n  {cls.example}",
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", type=str, help=CONFIG_HELP)
    groups: dict[str, Any] = {}
    for field in fields.values():
        if field.positional:
            # Never required here: it may come from a YAML file, which parsing.py looks after.
            kind: dict[str, Any] = {"type": field.type, "nargs": "?"}
            if field.is_list:
                kind = {"type": str, "nargs": "*", "default": []}
            parser.add_argument(field.name, metavar=field.shown, help=field.help, **kind)
            continue
        if field.section not in groups:
            text = None if field.group is cls else (field.group.__doc__ or "").strip()
            groups[field.section] = parser.add_argument_group(field.section, text)
        groups[field.section].add_argument(flag(field.name), help=_help(field), **_arguments(field))
    return parser


class _HelpFormatter(JsonargparseFormatter):
    """Help texts as written in the options, without type notation; keeps the example's line breaks."""

    def _get_help_string(self, action: Any) -> str:
        return action.help or ""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example:"):
            return text
        return super()._fill_text(text, width, indent)


def _arguments(field: Field) -> dict[str, Any]:
    if field.is_switch:
        return {"action": "store_true"}
    if field.is_list:
        return {"type": str, "action": "append", "metavar": field.metavar}
    arguments = {"type": field.type, "default": field.default}
    return arguments | ({"metavar": field.metavar} if field.metavar else {})


def _help(field: Field) -> str:
    text = field.help.replace("%", "%%")
    if field.default is MISSING:
        return text + " [required]"
    if field.is_switch or field.default in (None, ()):
        return text
    return f"{text} [default: {field.default}]"


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each annotated field of a class body, on one line."""
    body = _class_bodies(cls.__module__)[cls.__qualname__]
    docs = {}
    for statement, after in pairwise(body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of each class at the top level of a module, from its source."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
