"""Pseudo-perplexity and a classifier's log-likelihoods against transformers' own models.

Run with `-m parity` in an interpreter that has torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_roberta

from shardwise.data.labelled import LabelledText, encode
from shardwise.data.tokens import template
from shardwise.evaluation import labels, masked
from shardwise.evaluation.perplexity import tokenize_texts

from .conftest import load_on

torch = pytest.importorskip(
    "torch", reason="torch is not installed: the live comparison needs torch and transformers"
)

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
"""Of a mean of float32 logs of a few nats."""


def test_pseudo_perplexity_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    folder = write_roberta(tmp_path / "model")
    model = load_on(folder)
    theirs = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer, total, count = model.tokenizer, 0.0, 0
    for text in SENTENCES[:5]:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        rows = ids.repeat(len(ids) - 2, 1)
        places = torch.arange(1, len(ids) - 1)
        rows[torch.arange(len(places)), places] = tokenizer.mask_token_id
        with torch.no_grad():
            logs = theirs(rows).logits.double().log_softmax(-1)
        total -= float(logs[torch.arange(len(places)), places, ids[1:-1]].sum())
        count += len(places)
    before, behind = template(tokenizer)
    ours = masked.measure(
        model.plan, model.mesh, model.params, tokenize_texts(tokenizer, SENTENCES[:5]),
        frame=masked.Frame(tuple(before), tuple(behind), tokenizer.mask_token_id), length=64, batch=8,
        compute_dtype="float32", param_dtype="float32",
    )  # fmt: skip
    assert ours.tokens == count
    assert ours.nll == pytest.approx(total / count, abs=TOLERANCE)


def test_log_likelihoods_of_labels_of_pairs_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    names = {"0": "no", "1": "yes"}
    folder = write_roberta(tmp_path / "model", "ForSequenceClassification", id2label=names)
    model = load_on(folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = model.tokenizer
    pairs = list(zip(SENTENCES[:6], SENTENCES[6:12], strict=True))
    wanted = np.array([i % 2 for i in range(6)])
    with torch.no_grad():
        logs = np.array(
            [
                theirs(
                    torch.tensor([tokenizer(a, b, truncation="longest_first", max_length=40)["input_ids"]])
                )
                .logits.double()
                .log_softmax(-1)[0]
                .numpy()
                for a, b in pairs
            ]
        )
    texts = [LabelledText(a, b, i % 2) for i, (a, b) in enumerate(pairs)]
    encoded = encode(tokenizer, texts, model.config.labels, length=40, vocab_size=model.config.vocab_size)
    assert encoded.cut > 0
    ours = labels.measure(
        model.plan, model.mesh, model.params, encoded, length=40, batch=4, compute_dtype="float32",
        param_dtype="float32",
    )  # fmt: skip
    assert ours.nll == pytest.approx(-logs[np.arange(6), wanted].mean(), abs=TOLERANCE)
    assert ours.accuracy == (logs.argmax(-1) == wanted).mean()
