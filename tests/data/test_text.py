"""What `read_documents` promises: exact strings out of files, and `file:line: reason` for broken ones."""

import json
from pathlib import Path

import pytest

from shardwise.data import read_documents
from shardwise.errors import ConfigError, DataError


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def error_of(*args: object, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read_documents(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


GOOD, CUT, LATIN1 = b'{"text": "good"}', b'{"text": "x"', b'{"text": "caf\xe9"}'


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "unended"])
def test_jsonl_keeps_every_unicode_line_separator_inside_strings(
    tmp_path: Path, end: bytes, bom: bytes, last: bool
) -> None:  # C316
    lines = ['{"text":"a\u2028b"}', '{"text":"c\u0085d\\u000b\\u000ce"}', '{"text":"\\ud83d\\ude00"}']
    data = bom + end.join(line.encode() for line in lines) + (end if last else b"")
    result = read_documents(write(tmp_path / "a.jsonl", data))
    assert result.documents == ["a\u2028b", "c\u0085d\x0b\x0ce", "\U0001f600"]
    assert result.skipped == []


def test_broken_line_stops_with_file_and_physical_line(tmp_path: Path) -> None:  # C317
    file = write(tmp_path / "a.jsonl", b"\n".join([GOOD, CUT, b"", GOOD, LATIN1]))
    assert error_of([file]).startswith(f"{file}:2: not valid JSON")


def test_broken_lines_are_skipped_and_listed_when_asked_for(tmp_path: Path) -> None:  # C317
    file = write(tmp_path / "a.jsonl", b"\n".join([GOOD, CUT, b" \t\r", GOOD, LATIN1]))
    result = read_documents([file], on_bad_line="skip")
    assert result.documents == ["good", "good"]
    assert [(line.file, line.line) for line in result.skipped] == [(str(file), 2), (str(file), 5)]
    assert "not valid JSON" in result.skipped[0].reason and "not UTF-8" in result.skipped[1].reason
    assert result.skipped_summary() == f"2 skipped: {file}:2, {file}:5"


def test_no_broken_line_is_summarised_as_none(tmp_path: Path) -> None:
    assert read_documents(write(tmp_path / "a.jsonl", GOOD)).skipped_summary() == "0 skipped"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (CUT, "not valid JSON"),
        (LATIN1, "not UTF-8 (byte 0xe9)"),
        (b'{"text": "raw\x0btab"}', "not valid JSON"),
        (b'{"text": "half \\ud83d"}', "half of a surrogate pair (\\ud83d at character 5)"),
        (b'{"text": null}', "field 'text' is a JSON null"),
        (b'{"text": ["a"]}', "field 'text' is a JSON array"),
        (b'{"text": 3}', "field 'text' is a JSON number"),
        (b'{"text": true}', "field 'text' is a JSON boolean"),
        (b'"text"', "a JSON string, but every line must be an object"),
        (b"[1]", "a JSON array, but every line must be an object"),
        (b"{}", "no field 'text'; this line has no field at all"),
        (b'{"Text": "a", "id": 1}', "this line has 'Text', 'id'; did you mean --text-field Text?"),
        (b'{"content": "a"}', "this line has 'content'; did you mean --text-field content?"),
        (b'{"id": 1}', "this line has 'id'; name one that holds text"),
        (b"[" * 100_000, "not readable as JSON"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "not readable as JSON"),
    ],
)
def test_every_kind_of_broken_line_names_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    file = write(tmp_path / "a.jsonl", b"\n\n" + GOOD + b"\n" + line + b"\n" + GOOD)
    message = error_of(file)
    assert message.startswith(f"{file}:4: ") and reason in message
    result = read_documents(file, on_bad_line="skip")
    assert (len(result.documents), [bad.line for bad in result.skipped]) == (2, [4])


def test_another_text_field_can_be_chosen(tmp_path: Path) -> None:
    file = write(tmp_path / "a.ndjson", json.dumps({"text": "no", "body": "yes"}))
    assert read_documents(file, text_field="body").documents == ["yes"]


def test_an_empty_string_is_a_document(tmp_path: Path) -> None:
    assert read_documents(write(tmp_path / "a.jsonl", '{"text": ""}')).documents == [""]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "README", "a.rst"])
def test_a_plain_file_is_one_exact_document(tmp_path: Path, name: str) -> None:
    text = "first\r\n\r\nsecond\u2028x\n{not json\n"
    assert read_documents(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())).documents == [text]


def test_a_plain_file_that_is_not_utf8_names_the_line_even_when_skipping(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"one\ntwo\ncaf\xe9\n")
    assert error_of(file, on_bad_line="skip").startswith(f"{file}:3: not UTF-8 (byte 0xe9)")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize(
    "data", [b"", b" \n\t\r\n", b"\xef\xbb\xbf"], ids=["empty", "white space", "BOM only"]
)
def test_a_file_without_content_is_an_error_that_names_it(tmp_path: Path, name: str, data: bytes) -> None:
    good, empty = write(tmp_path / "good.txt", "x"), write(tmp_path / name, data)
    assert str(empty) in error_of([good, empty])


def test_all_lines_broken_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", CUT)
    assert f"1 skipped: {file}:1" in error_of(file, on_bad_line="skip")


def test_a_folder_stands_for_its_own_text_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a.jsonl", '{"text": "a1"}\n{"text": "a2"}')
    write(tmp_path / "c.MD", "c")
    for ignored in ("d.py", ".hidden.txt", "e.json", "f.gz"):
        write(tmp_path / ignored, "ignored")
    (tmp_path / "sub.txt").mkdir()
    write(tmp_path / "sub.txt" / "g.txt", "ignored")
    assert read_documents(tmp_path).documents == ["a1", "a2", "b", "c"]
    assert read_documents([tmp_path / "b.txt", str(tmp_path)]).documents == ["b", "a1", "a2", "b", "c"]


def test_a_folder_without_text_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "x")
    assert error_of(tmp_path).startswith(f"{tmp_path}: the folder holds no .txt")


def test_paths_with_spaces_other_letters_and_relative_ones_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # C603
    folder = tmp_path / "mis données ö"
    folder.mkdir()
    write(folder / "テキスト.txt", "x")
    monkeypatch.chdir(tmp_path)
    assert read_documents("mis données ö/テキスト.txt").documents == ["x"]


def test_a_typo_in_a_path_names_the_nearest_one(tmp_path: Path) -> None:  # C603
    write(tmp_path / "train.jsonl", GOOD)
    typo = tmp_path / "trian.jsonl"
    assert error_of(typo) == f"file or folder not found: {typo}; did you mean {tmp_path / 'train.jsonl'}?"
    nowhere = tmp_path / "no" / "a.txt"
    assert error_of(nowhere) == (
        f"file or folder not found: {nowhere} (nor is there a folder {nowhere.parent})"
    )
    assert error_of(tmp_path / "zzz") == f"file or folder not found: {tmp_path / 'zzz'}"


@pytest.mark.parametrize(
    ("name", "advice"),
    [("a.json", "rename it to .jsonl"), ("a.jsonl.gz", "decompress"), ("a.parquet", "convert it to .jsonl")],
)
def test_formats_that_are_not_read_are_refused_with_advice(tmp_path: Path, name: str, advice: str) -> None:
    assert advice in error_of(write(tmp_path / name, GOOD))


def test_no_path_at_all_is_an_error() -> None:
    assert "no data file was given" in error_of([])


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use 'error' or 'skip'"):
        read_documents(write(tmp_path / "a.txt", "x"), on_bad_line="ignore")  # type: ignore[arg-type]
