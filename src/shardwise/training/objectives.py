"""What a run learns: the next token, hidden tokens, or labels of texts; each with its data and measurement.

Not here: the loop (jobs.py), rows (data/) and losses (steps/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardwise.checkpoints.load import load_params
from shardwise.checkpoints.reader import Checkpoint
from shardwise.data.labelled import LabelledDataset, LabelledText, counted, encode, names_of, read_labelled
from shardwise.data.loader import RowDataset
from shardwise.data.masking import MaskedDataset, Vocabulary
from shardwise.data.packing import PackedDataset
from shardwise.data.text import SkippedLine, read_documents
from shardwise.data.tokens import TokenStore, tokenize_documents
from shardwise.errors import ConfigError, DataError
from shardwise.evaluation import labels, perplexity
from shardwise.evaluation.scores import Scorer, stacked
from shardwise.families import config_from_hf, with_head
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import Params, declared_params, init_params
from shardwise.steps.build import Step

if TYPE_CHECKING:
    from shardwise.cli.options import TrainingOptions

Say = Callable[[str], None]


class Rows(RowDataset, Protocol):
    """Rows to train on."""

    rows_per_epoch: int


@dataclass(frozen=True)
class HeldOut:
    """What a held-out measurement gives."""

    metrics: dict[str, float]
    """For the metrics file, by name."""
    text: str
    """For the reader."""


@dataclass(frozen=True)
class Data:
    """The rows to train on, and how to measure on other texts."""

    rows: Rows
    fingerprint: str
    """Of the training data: equal ones mean equal rows."""
    measure: Callable[[Step, Params], HeldOut] | None
    """Measures parameters on --eval-data; None without it."""
    held_out_digest: bytes
    """Of what `measure` measures on."""


@dataclass(frozen=True)
class Objective:
    """What a run learns, and the model for it."""

    hf_config: dict[str, Any]
    """The model's, with the head that the objective needs."""
    read: Callable[[Any, ModelConfig], Data]
    """(tokenizer, model config) → the data."""
    new: frozenset[str] = frozenset()
    """Paths of parameters that the checkpoint has not, since it has another head; they are drawn."""

    def load(self, source: Checkpoint, step: Step, dtype: str, seed: int) -> Params:
        """The checkpoint's parameters, and freshly drawn ones in the new places."""
        plan, mesh = step.plan, step.mesh
        params = load_params(source, plan, mesh, dtype, stacked=True, without=self.new)
        if self.new:
            drawn = init_params(plan, mesh, seed, np.dtype(dtype), only=self.new)
            params |= drawn
        return {path: params[path] for path in plan.paths}


def prepare(options: TrainingOptions, source: Checkpoint, say: Say) -> Objective:
    """The objective that the options ask for, checked against the model.

    Raises:
        ConfigError: the model cannot learn it.
        DataError: the labels cannot be read.
    """
    config = config_from_hf(source.hf_config)
    if options.objective == "causal":
        if not config.causal:
            raise ConfigError(
                f"{source.path}: {config.family} is an encoder, which reads whole texts and has no next"
                " token to predict; use --objective mlm or --objective classify"
            )
        return Objective(source.hf_config, partial(_read_causal, options, say))
    if options.objective == "mlm":
        if config.causal:
            raise ConfigError(
                f"--objective mlm: {config.family} models read from left to right and cannot see"
                " what stands behind a hidden token; train an encoder, such as roberta-base"
            )
        hf = source.hf_config if config.head == "vocab" else with_head(source.hf_config, "vocab")
        return _with_new(options, config, hf, partial(_read_masked, options, say), say)
    texts = _labelled(options, options.data, say)
    hf = source.hf_config
    if config.head != "labels":
        hf = with_head(hf, "labels", names_of(texts))
    return _with_new(options, config, hf, partial(_read_classify, options, say, texts), say)


def _with_new(
    options: TrainingOptions, old: ModelConfig, hf: dict[str, Any], read: Any, say: Say
) -> Objective:
    """The objective with the parameters that its head adds to the model's, said aloud."""
    config = config_from_hf(hf)
    new = {p.path for p in declared_params(config)} - {p.path for p in declared_params(old)}
    if new:
        say(f"new head, drawn with --seed {options.seed}: {', '.join(sorted(new))}")
    return Objective(hf, read, frozenset(new))


def _read_causal(options: TrainingOptions, say: Say, tokenizer: Any, config: ModelConfig) -> Data:
    store = _tokenized(options, tokenizer, config, say)
    rows = PackedDataset(store, options.length, seed=options.seed, epochs=options.epochs)
    _say_size(store, rows, say)
    if short := int((np.diff(store.offsets) < 2).sum()):
        say(f"warning: {short:,} of the documents have fewer than two tokens, so that none is trained on")
    if options.eval_data is None:
        return Data(rows, store.fingerprint, None, b"")
    texts = perplexity.tokenize_texts(tokenizer, _documents(options, (options.eval_data,), say))
    if not any(map(len, texts)):
        raise DataError(f"--eval-data: {options.eval_data} has no token to score; name another file")
    prefix = perplexity.prefix_token(tokenizer)

    def measure(step: Step, params: Params) -> HeldOut:
        found = perplexity.measure(
            step.plan, step.mesh, params, texts, prefix_token=prefix, length=options.length,
            batch=options.global_batch, compute_dtype=options.compute_dtype, param_dtype=options.param_dtype,
        )  # fmt: skip
        metrics = {
            "eval_nll": found.nll, "eval_perplexity": found.perplexity, "eval_tokens": found.tokens,
        }  # fmt: skip
        return HeldOut(metrics, str(found))

    digest = _digest([len(texts)], *(tokens.tobytes() for tokens in texts))
    return Data(rows, store.fingerprint, measure, digest)


def _read_masked(options: TrainingOptions, say: Say, tokenizer: Any, config: ModelConfig) -> Data:
    vocabulary = Vocabulary.of(tokenizer)
    store = _tokenized(options, tokenizer, config, say)
    packed = PackedDataset(store, options.length, seed=options.seed, epochs=options.epochs)
    rows = MaskedDataset(packed, vocabulary, options.mask_probability, options.seed)
    _say_size(store, packed, say)
    if options.eval_data is None:
        return Data(rows, store.fingerprint, None, b"")
    documents = _documents(options, (options.eval_data,), say)
    held = tokenize_documents(tokenizer, documents, vocab_size=config.vocab_size)
    # The same places each time, whatever the run's seed, so that measurements can be compared.
    held_rows = MaskedDataset(
        PackedDataset(held, options.length, seed=0, epochs=1, shuffle=False), vocabulary,
        options.mask_probability, seed=0,
    )  # fmt: skip
    if not any(row["weights"].any() for row in _all(held_rows)):
        raise DataError(
            f"--eval-data: of {options.eval_data} no token was hidden, it is too short; name another"
        )

    def measure(step: Step, params: Params) -> HeldOut:
        scorer = Scorer.fitting(
            step.plan, step.mesh, options.global_batch, options.length, rows=len(held_rows),
            longest=options.length, compute_dtype=options.compute_dtype, param_dtype=options.param_dtype,
        )  # fmt: skip
        found = scorer(params, stacked(_all(held_rows), scorer.batch))
        text = f"nll {found.nll:.4f}  right {found.accuracy:.1%}  on {found.scored:,} hidden tokens"
        metrics = {
            "eval_nll": found.nll, "eval_accuracy": found.accuracy, "eval_tokens": found.scored,
        }  # fmt: skip
        return HeldOut(metrics, text)

    return Data(rows, store.fingerprint, measure, held.fingerprint.encode())


def _read_classify(
    options: TrainingOptions, say: Say, texts: Sequence[LabelledText], tokenizer: Any, config: ModelConfig
) -> Data:
    def encoded(texts: Sequence[LabelledText], what: str) -> Any:
        found = encode(tokenizer, texts, config.labels, length=options.length, vocab_size=config.vocab_size)
        say(f"{what}: {len(texts):,} texts; labels {counted(found.labels, config.labels)}")
        if found.cut:
            say(
                f"warning: {found.cut:,} of them are longer than --length {options.length}: they lose their"
                " ends"
            )
        return found

    data = encoded(texts, "data")
    rows = LabelledDataset(data, options.length, seed=options.seed, epochs=options.epochs)
    if options.eval_data is None:
        return Data(rows, data.fingerprint, None, b"")
    held = encoded(_labelled(options, (options.eval_data,), say), "held-out data")

    def measure(step: Step, params: Params) -> HeldOut:
        found = labels.measure(
            step.plan, step.mesh, params, held, length=options.length, batch=options.global_batch,
            compute_dtype=options.compute_dtype, param_dtype=options.param_dtype,
        )  # fmt: skip
        metrics = {
            "eval_nll": found.nll, "eval_accuracy": found.accuracy, "eval_texts": found.texts,
        }  # fmt: skip
        return HeldOut(metrics, str(found))

    return Data(rows, data.fingerprint, measure, held.fingerprint.encode())


def _all(rows: RowDataset) -> Any:
    return (rows[i] for i in range(len(rows)))


def _digest(sizes: list[int], *parts: bytes) -> bytes:
    return hashlib.sha256(repr(sizes).encode() + b"".join(parts)).digest()


def _documents(options: TrainingOptions, paths: tuple[str, ...], say: Say) -> list[str]:
    result = read_documents(paths, text_field=options.text_field, on_bad_line=options.on_bad_line)
    _say_skipped(result.skipped, say)
    return result.documents


def _labelled(options: TrainingOptions, paths: tuple[str, ...], say: Say) -> list[LabelledText]:
    texts, skipped = read_labelled(
        paths, text_field=options.text_field, pair_field=options.pair_field,
        label_field=options.label_field, on_bad_line=options.on_bad_line,
    )  # fmt: skip
    _say_skipped(skipped, say)
    return texts


def _say_skipped(skipped: list[SkippedLine], say: Say) -> None:
    if skipped:
        where = ", ".join(f"{line.file}:{line.line}" for line in skipped[:5])
        say(f"{len(skipped)} lines skipped: {where}{' …' if len(skipped) > 5 else ''}")


def _tokenized(options: TrainingOptions, tokenizer: Any, config: ModelConfig, say: Say) -> TokenStore:
    documents = _documents(options, options.data, say)
    return tokenize_documents(tokenizer, documents, vocab_size=config.vocab_size)


def _say_size(store: TokenStore, rows: PackedDataset, say: Say) -> None:
    say(
        f"data: {store.num_documents:,} documents, {store.num_tokens:,} tokens,"
        f" {rows.rows_per_epoch:,} rows an epoch"
    )
