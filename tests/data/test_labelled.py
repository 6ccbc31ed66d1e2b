"""Labelled texts: reading, names and ids of labels, the tokenizer's form, cutting, rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import write_roberta

from shardwise.checkpoints.reader import open_checkpoint
from shardwise.checkpoints.tokenizer import load_tokenizer
from shardwise.data.labelled import (
    LabelledDataset,
    LabelledText,
    encode,
    ids_of,
    names_of,
    read_labelled,
)
from shardwise.errors import DataError

NAMES = ("no", "yes")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(open_checkpoint(write_roberta(tmp_path_factory.mktemp("r") / "model")))


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labelled(*labels: str | int) -> list[LabelledText]:
    return [LabelledText("text", None, label) for label in labels]


def test_fields_are_read_by_name_and_truth_values_become_names(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"q": "is it?", "p": "It is.", "a": True}, {"q": "x", "p": "", "a": 3})
    texts, skipped = read_labelled([file], text_field="q", pair_field="p", label_field="a")
    assert texts == [LabelledText("is it?", "It is.", "true"), LabelledText("x", "", 3)]
    assert skipped == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no field 'label'"),
        ({"text": "a", "labels": 1}, "did you mean --label-field labels"),
        ({"txt": "a", "label": 1}, "did you mean --text-field txt"),
        ({"text": "a", "label": 0.5}, "field 'label' is a fraction"),
        ({"text": "a", "label": None}, "field 'label' is a JSON null"),
        ({"text": "a", "label": [1]}, "field 'label' is a JSON array"),
        ({"text": 5, "label": 1}, "field 'text' is a JSON number"),
    ],
)
def test_a_line_without_text_or_label_is_named_or_skipped(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "a", "label": "b"}, row)
    with pytest.raises(DataError, match=f"a.jsonl:2: .*{message}"):
        read_labelled([file])
    texts, skipped = read_labelled([file], on_bad_line="skip")
    assert (len(texts), [line.line for line in skipped]) == (1, [2])


def test_a_missing_second_text_names_its_option(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "a", "text_2": "b", "label": 1})
    with pytest.raises(DataError, match="did you mean --pair-field text_2"):
        read_labelled([file], pair_field="text2")


def test_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="give a .jsonl file"):
        read_labelled([str(tmp_path / "a.txt")])


def test_new_labels_are_sorted_names_or_numbers_from_zero() -> None:
    assert names_of(labelled("b", "a", "b", "c")) == ("a", "b", "c")
    assert names_of(labelled(1, 0, 2, 1)) == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("a", "a"), "all 2 texts have the label 'a'"),
        (("a", 1), "labels are mixed"),
        ((1, 2), "must run from 0 without gaps"),
        ((-1, 0), "must run from 0 without gaps"),
        ((0, 10**12), "must run from 0 without gaps"),
    ],
)
def test_labels_that_make_no_classifier_are_refused(labels: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        names_of(labelled(*labels))


def test_labels_are_found_by_name_or_number() -> None:
    np.testing.assert_array_equal(ids_of(labelled("yes", 0, "no", 1), NAMES), [1, 0, 0, 1])
    # Where the names are numbers, a number is a name.
    np.testing.assert_array_equal(ids_of(labelled(1, "3", 2), ("1", "2", "3")), [0, 2, 1])


@pytest.mark.parametrize("label", ["maybe", 2, -1])
def test_a_label_that_the_model_has_not_is_refused_with_those_it_has(label: str | int) -> None:
    with pytest.raises(DataError, match=r"text 2 has the label .* do not include: 0=no, 1=yes"):
        ids_of(labelled("yes", label), NAMES)


@pytest.mark.parametrize("pair", [None, "I'll take the <mask> and </s> too."])
def test_texts_are_encoded_as_the_tokenizer_itself_does(tokenizer: Any, pair: str | None) -> None:
    texts = [LabelledText("The early bird catches the worm.", pair, "no"), LabelledText("", pair, "yes")]
    encoded = encode(tokenizer, texts, NAMES, length=64, vocab_size=len(tokenizer))
    for i, text in enumerate(texts):
        given = [text.text] if pair is None else [text.text, pair]
        wanted = tokenizer(*given, split_special_tokens=True)["input_ids"]
        ids = encoded.store.tokens[encoded.store.offsets[i] : encoded.store.offsets[i + 1]]
        assert ids.tolist() == wanted
    np.testing.assert_array_equal(encoded.labels, [0, 1])
    assert encoded.cut == 0


@pytest.mark.parametrize("length", [7, 12, 13])
@pytest.mark.parametrize(
    ("first", "second"), [("a" * 30, "b" * 3), ("a" * 2, "b" * 30), ("a" * 30, "b" * 30)]
)
def test_long_pairs_are_cut_as_transformers_cuts_them(
    tokenizer: Any, length: int, first: str, second: str
) -> None:
    encoded = encode(
        tokenizer, [LabelledText(first, second, 0)], NAMES, length=length, vocab_size=len(tokenizer)
    )
    wanted = tokenizer(first, second, truncation="longest_first", max_length=length)["input_ids"]
    assert encoded.store.tokens.tolist() == wanted
    assert encoded.cut == 1


def test_a_length_without_room_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="--length 2 leaves no room"):
        encode(tokenizer, labelled("no"), NAMES, length=2, vocab_size=len(tokenizer))


def test_a_row_holds_one_text_and_its_label_and_each_epoch_each_text_once(tokenizer: Any) -> None:
    texts = [LabelledText(f"text {i}", None, i % 2) for i in range(5)]
    encoded = encode(tokenizer, texts, NAMES, length=16, vocab_size=len(tokenizer))
    rows = LabelledDataset(encoded, 16, seed=3, epochs=2)
    assert len(rows) == 10
    orders = []
    for epoch in range(2):
        seen = []
        for index in range(5 * epoch, 5 * epoch + 5):
            row = rows[index]
            used = int(row["segment_ids"].sum())
            text = tokenizer.decode(row["tokens"][1 : used - 1])
            number = int(text.removeprefix("text "))
            seen.append(number)
            assert row["targets"][0] == number % 2
            assert row["weights"].tolist() == [1.0] + [0.0] * 15
            np.testing.assert_array_equal(row["positions"], [*range(used), *[0] * (16 - used)])
        assert sorted(seen) == list(range(5))
        orders.append(seen)
    assert orders[0] != orders[1]
