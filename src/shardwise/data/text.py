"""Reads documents, as strings, from local text and JSON Lines files, and says exactly which line is broken.

Not here: tokens (tokens.py), chat or prompt formats, anything from the network or compressed files.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from shardwise.errors import ConfigError, DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
FOLDER_SUFFIXES = (".txt", ".md", *JSONL_SUFFIXES)
# Formats that would otherwise be taken for plain text, with what the user can do instead.
_REFUSED_SUFFIXES = {
    ".json": "rename it to .jsonl if every line holds one JSON object, or convert it to that form",
    ".parquet": "convert it to .jsonl",
    ".arrow": "convert it to .jsonl",
    **dict.fromkeys((".gz", ".zst", ".bz2", ".xz", ".zip"), "decompress it first"),
}
_BOM = b"\xef\xbb\xbf"


class SkippedLine(NamedTuple):
    """One line that was left out because the caller asked for broken lines to be skipped."""

    file: str
    line: int
    """Physical line number, counted from 1; blank lines count."""
    reason: str


@dataclass(frozen=True)
class ReadResult:
    """What `read_documents` found."""

    documents: list[str]
    """In the order of the paths, of the files in a folder, and of the lines in a file."""
    skipped: list[SkippedLine]
    """Broken lines; always empty unless on_bad_line is `skip`."""

    def skipped_summary(self) -> str:
        """Says in one line how many lines were skipped, and where: `2 skipped: a.jsonl:2, a.jsonl:5`."""
        where = ", ".join(f"{line.file}:{line.line}" for line in self.skipped)
        return f"{len(self.skipped)} skipped" + (f": {where}" if where else "")


def read_documents(
    paths: str | Path | Sequence[str | Path],
    *,
    text_field: str = "text",
    on_bad_line: Literal["error", "skip"] = "error",
) -> ReadResult:
    """Reads every document of some local files or folders.

    A `.jsonl` or `.ndjson` file holds one JSON object a line; each is a document. Any other file is plain
    UTF-8 text, and the whole file is ONE document, kept exactly as it is but for a byte order mark. A folder
    stands for its own .txt, .md, .jsonl and .ndjson files (not those of its subfolders, no hidden files),
    sorted by name. Lines of JSON end at "\\n" or "\\r\\n" and nowhere else; blank lines are ignored.

    Args:
        paths: one path or several.
        text_field: the key of a JSON line that holds the document.
        on_bad_line: `error` stops at the first broken JSON line; `skip` leaves such lines out and lists them
            in the result. A broken plain text file is always an error.

    Returns:
        The documents, at least one, and the skipped lines.

    Raises:
        DataError: a path is missing, unreadable, empty or of a refused format; a line is broken
            (`file:line: reason`); no document is left.
        ConfigError: on_bad_line is unknown.
    """
    if on_bad_line not in ("error", "skip"):
        raise ConfigError(f"on_bad_line is {on_bad_line!r}; use 'error' or 'skip'")
    roots = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not roots:
        raise DataError("no data file was given; name at least one .txt or .jsonl file, or a folder of them")
    result = ReadResult([], [])
    for file in [file for root in roots for file in expand(Path(root))]:
        if file.suffix.lower() in JSONL_SUFFIXES:
            skipped = result.skipped if on_bad_line == "skip" else None
            result.documents.extend(read_json_lines(file, lambda row: text_of(row, text_field), skipped))
        else:
            result.documents.append(_read_plain(file))
    if not result.documents:
        raise DataError(f"no document is left: every line was broken ({result.skipped_summary()})")
    return result


_Row = TypeVar("_Row")


def read_json_lines(
    file: Path, parse: Callable[[dict[str, Any]], _Row], skipped: list[SkippedLine] | None = None
) -> list[_Row]:
    """What `parse` makes of every JSON object of a file; blank lines are ignored.

    Args:
        parse: raises BadLineError for an object that it cannot use.
        skipped: broken lines are left out and listed here; None: the first one is an error.

    Raises:
        DataError: the file cannot be read or holds nothing; a line is broken (`file:line: reason`).
    """
    found: list[_Row] = []
    blank = True
    for number, line in _physical_lines(file):
        if not line.strip():
            continue
        blank = False
        try:
            found.append(parse(_object_of_line(line)))
        except BadLineError as error:
            if skipped is None:
                raise DataError(f"{file}:{number}: {error}") from None
            skipped.append(SkippedLine(str(file), number, str(error)))
    if blank:
        raise DataError(f"{file}: the file holds no line of JSON; remove it from the data")
    return found


class BadLineError(Exception):
    """Why one line gives nothing."""


def text_of(row: dict[str, Any], field: str, flag: str = "--text-field") -> str:
    """The string in a field of a JSON line.

    Args:
        flag: the option that names the field.

    Raises:
        BadLineError: there is none, or it is no whole string.
    """
    if field not in row:
        raise BadLineError(missing_field_reason(field, list(row), flag))
    text = row[field]
    if not isinstance(text, str):
        raise BadLineError(f"field {field!r} is a JSON {kind(text)}, but it must be a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadLineError(
            f"field {field!r} holds half of a surrogate pair (\\u{code:04x} at character {error.start});"
            " was the string cut?"
        ) from None
    return text


def missing_field_reason(field: str, fields: list[str], flag: str) -> str:
    """Why a line without a field cannot be used, with the nearest name it has."""
    near = difflib.get_close_matches(field, fields, n=1, cutoff=0.5)
    has = f"this line has {', '.join(map(repr, fields))}" if fields else "this line has no field at all"
    what = "the label" if flag == "--label-field" else "text"
    hint = f"; did you mean {flag} {near[0]}?" if near else f"; name one that holds {what} with {flag}"
    return f"no field {field!r}; {has}{hint if fields else ''}"


def kind(value: object) -> str:
    """What JSON calls a value."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def has_json_lines(paths: Sequence[str | Path]) -> bool:
    """Whether any file that these paths stand for is read as JSON lines.

    Raises:
        DataError: a path is missing or of a refused format.
    """
    files = [file for path in paths for file in expand(Path(path))]
    return any(file.suffix.lower() in JSONL_SUFFIXES for file in files)


def expand(path: Path) -> list[Path]:
    """The files that a path stands for; checks that they exist and are of a format that can be read."""
    if path.is_dir():
        files = sorted(
            entry
            for entry in path.iterdir()
            if entry.is_file() and entry.suffix.lower() in FOLDER_SUFFIXES and not entry.name.startswith(".")
        )
        if not files:
            raise DataError(
                f"{path}: the folder holds no {', '.join(FOLDER_SUFFIXES)} file; name another folder or files"
            )
        return files
    if not path.exists():
        raise DataError(f"file or folder not found: {path}{_nearest_path(path)}")
    advice = _REFUSED_SUFFIXES.get(path.suffix.lower())
    if advice:
        raise DataError(f"{path}: {path.suffix} files are not read; {advice}")
    return [path]


def _nearest_path(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor is there a folder {path.parent})"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _read_plain(file: Path) -> str:
    raw = _read_bytes(file).removeprefix(_BOM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line}: {_utf8_reason(error)}") from None
    if not text.strip():
        raise DataError(f"{file}: the file is empty or only white space; remove it from the data")
    return text


def _physical_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    # A binary file is cut at b"\n" only. str.splitlines would also cut at U+2028, U+0085, VT and FF, which
    # are part of a JSON string.
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line.removeprefix(_BOM) if number == 1 else line
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from None


def _object_of_line(line: bytes) -> dict[str, Any]:
    try:
        # Decoding first: json.loads guesses UTF-16 or UTF-32 when it is handed bytes.
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLineError(_utf8_reason(error)) from None
    except json.JSONDecodeError as error:
        raise BadLineError(
            f"not valid JSON ({error.msg}, column {error.colno}); every line must be one whole JSON object"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise BadLineError(f"not readable as JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadLineError(f'a JSON {kind(row)}, but every line must be an object such as {{"text": "…"}}')
    return row


def _utf8_reason(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8 (byte 0x{byte:02x}); convert the file to UTF-8, for example with iconv"
