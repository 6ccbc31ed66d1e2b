"""What both ends of the vocabulary move and compute, predicted: look-up, head, loss, choice of a token.

Follows models/vocabulary.py, models/head.py and the steps that use them, layout by layout. Not here: the
layers between (predict.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.models.vocabulary import vocab_cut
from shardwise.partition.plan import Decision
from shardwise.planner.predict import Flops, Ledger
from shardwise.steps.sampling import BISECTIONS


@dataclass(frozen=True)
class _Matrix:
    """A [V, D] parameter as VocabMatrix takes it."""

    path: str
    vocab: tuple[str, ...]
    """Axes that cut V at use."""
    contract: tuple[str, ...]
    """Axes that cut D at use."""
    inside: bool
    """Whether fsdp is gathered inside the shard_map, so that the gradient is scattered there."""
    rows: int
    """V on one device at use."""
    width: int
    """D on one device at use."""
    cut_by_fsdp: bool

    @classmethod
    def of(cls, ledger: Ledger, d: Decision) -> _Matrix:
        vocab, contract, gathered = vocab_cut(ledger.plan, d.path)
        v, w = d.use_shape if gathered is None else d.shape
        cut_by_fsdp = bool(ledger.spread(["fsdp"])) and any("fsdp" in axes for axes in d.spec)
        return cls(
            d.path, vocab, contract, gathered is not None, v // ledger.plan.mesh.size(vocab),
            w // ledger.plan.mesh.size(contract), cut_by_fsdp,
        )  # fmt: skip


def predict_ends(ledger: Ledger) -> None:
    """Record both ends of the vocabulary."""
    plan = ledger.plan
    micro = ledger.workload.grad_accum_steps if ledger.trains else 1
    scaled, gathered = plan.config.embed_scale != 1, set[tuple[str, bool]]()
    for d in plan.decisions:
        if d.use.kind in ("embedding", "positions"):
            # What was looked up in two tables is added up: both have one gradient, which is gathered once.
            of_words = d.use.kind == "embedding"
            gradient = (words_activation(ledger) if of_words else "residual", of_words and scaled)
            _look_up(ledger, d, _Matrix.of(ledger, d), micro, None if gradient in gathered else gradient[0])
            gathered.add(gradient)
    task = ledger.workload.task
    if task == "hidden":
        words = words_activation(ledger)
        ledger.reshard(ledger.shape(words), plan.activation(words), ((), (), ()), ledger.compute, 1,
                       "forward", "hidden states", "whole hidden states, to every device")  # fmt: skip
        return
    if plan.head_path is None:
        _classifier(ledger, micro)
        return
    head = _Matrix.of(ledger, plan[plan.head_path])
    _gather(ledger, head, plan[plan.head_path], micro, "head")
    if task == "train":
        _loss(ledger, head, micro)
    elif task == "score":
        _scores(ledger, head)
    else:
        _last_or_all(ledger, head)


def _classifier(ledger: Ledger, micro: int) -> None:
    """Around a classifier's kernels, which are predicted as all kernels are."""
    plan, workload, here, wide = ledger.plan, ledger.workload, "classifier/out_proj/kernel", ledger.wide
    _whole_words(ledger, micro, "classifier/dense/kernel")
    batch, shape = plan.batch_axes(), ledger.shape("label_logits")
    if workload.task == "train":
        ledger.add("all-reduce", batch, wide, 1, micro, "forward", here, "the loss", micro > 1)
    elif workload.task == "score":
        for dtype in (wide, "bool"):
            ledger.add("all-gather", batch, dtype, workload.batch, 1, "forward", here,
                       "the scores, to every device")  # fmt: skip
    else:
        ledger.reshard(shape, plan.activation("label_logits"), ((), (), ()), wide, 1, "forward", here,
                       "whole logits, to every device")  # fmt: skip


def words_activation(ledger: Ledger) -> str:
    """The activation that a token's row of the table becomes, and that the head takes: `words` where these
    have another width than the residual stream."""
    return "residual" if ledger.plan.config.word_axis == "embed" else "words"


def head_cause(path: str) -> str:
    """The `cause` of what the output head moves, where `path` is its matrix (a tied table has two uses)."""
    return f"{path} as head"


def _gather(ledger: Ledger, m: _Matrix, d: Decision, micro: int, use: str) -> None:
    if m.cut_by_fsdp:
        elements = ledger.local(d.shape, d.at_use())
        cause = head_cause(m.path) if use == "head" else m.path
        ledger.add("all-gather", ("fsdp",), ledger.compute, elements, micro, "forward", cause,
                   "weights gathered just before use", micro > 1)  # fmt: skip


def _look_up(ledger: Ledger, d: Decision, m: _Matrix, micro: int, gives: str | None) -> None:
    """A table of words or positions.

    Args:
        gives: the activation whose gradient is gathered for it; None where that is done already.
    """
    c = ledger.compute
    _gather(ledger, m, d, micro, "look-up")
    loop = micro > 1
    tokens = ledger.rows * ledger.workload.length
    ledger.add("all-reduce", m.vocab, c, tokens * m.width, micro, "forward", m.path,
               "each device looks up its own ids; one of the terms is not zero", loop)  # fmt: skip
    ledger.add("all-gather", m.contract, c, tokens * d.use_shape[1], micro, "forward", m.path,
               "each device has its part of every row", loop)  # fmt: skip
    whole = (ledger.plan.batch_axes(), (), ())
    if not ledger.trains:
        return
    if gives is not None:
        ledger.reshard(ledger.shape(gives), ledger.plan.activation(gives), whole, c, micro, "backward",
                       m.path, f"gradient of {gives} gathered", loop)  # fmt: skip
    batch = ledger.spread(ledger.plan.batch_axes())
    elements = m.rows * m.width
    others = tuple(axis for axis in batch if axis != "fsdp" or not m.inside)
    ledger.add("all-reduce", others, c, elements, micro, "backward", m.path,
               "gradient summed over the batch", loop)  # fmt: skip
    if m.inside:
        ledger.add("reduce-scatter", ("fsdp",), c, elements, micro, "backward", m.path,
                   "gradient summed and scattered", loop)  # fmt: skip


def _product(ledger: Ledger, m: _Matrix, tokens: int, runs: int) -> None:
    amount = 2 * tokens * m.rows * m.width * runs
    ledger.flops.append(Flops(head_cause(m.path), "forward", amount))
    if ledger.trains:
        ledger.flops.append(Flops(head_cause(m.path), "backward", 2 * amount))


def _chunked(ledger: Ledger, m: _Matrix, micro: int, sums: int) -> None:
    """The chunked logits of every token, with `sums` sums of a number a token."""
    rows, wide = ledger.rows, ledger.wide
    step, chunks = ledger.chunks(m.rows)
    runs, here = micro * chunks, head_cause(m.path)
    _whole_words(ledger, micro, here)
    ledger.add("all-reduce", m.contract, wide, rows * step * m.rows, runs, "forward", here,
               "partial logits of a chunk added", True)  # fmt: skip
    if m.vocab:
        ledger.add("all-reduce", m.vocab, wide, rows * step, runs * (1 + sums), "forward", here,
                   "a maximum and sums of one number a token", True)  # fmt: skip
    _product(ledger, m, rows * step, runs)


def _whole_words(ledger: Ledger, micro: int, cause: str) -> None:
    words, whole = words_activation(ledger), (ledger.plan.batch_axes(), (), ())
    ledger.reshard(ledger.shape(words), ledger.plan.activation(words), whole, ledger.compute, micro,
                   "forward", cause, f"{words} gathered for the head", micro > 1)  # fmt: skip


def _last_words(ledger: Ledger, cause: str) -> None:
    """What the head takes of the last position alone, picked where it lies and then held whole."""
    name, plan = words_activation(ledger), ledger.plan
    batch, _, width = ledger.shape(name)
    rows, length, features = plan.activation(name)
    shape, spec = (batch, 1, width), (rows, (), features)
    if ledger.workload.task == "prefill":
        ledger.add("all-reduce", length, ledger.compute, ledger.local(shape, spec), 1, "forward", cause,
                   f"the last position's {name}")  # fmt: skip
    ledger.reshard(shape, spec, (plan.batch_axes(), (), ()), ledger.compute, 1, "forward", cause,
                   f"{name} gathered for the head")  # fmt: skip


def _loss(ledger: Ledger, m: _Matrix, micro: int) -> None:
    plan, c, loop, here = ledger.plan, ledger.compute, micro > 1, head_cause(m.path)
    _chunked(ledger, m, micro, sums=2)
    batch = ledger.spread(plan.batch_axes())
    ledger.add("all-reduce", batch, ledger.wide, 1, micro, "forward", here, "the loss", loop)
    tokens = ledger.rows * ledger.workload.length
    ledger.add("all-reduce", m.vocab, c, tokens * m.width, micro, "backward", here,
               "gradient of the hidden states: partial sums added", loop)  # fmt: skip
    ledger.add("all-gather", m.contract, c, tokens * m.width * plan.mesh.size(m.contract), micro, "backward",
               here, "gradient of the hidden states gathered", loop)  # fmt: skip
    elements = m.rows * m.width
    if m.inside:
        ledger.add("reduce-scatter", ("fsdp",), c, elements, micro, "backward", here,
                   "gradient summed and scattered", loop)  # fmt: skip
        elements //= plan.mesh.fsdp
    ledger.add("all-reduce", [a for a in batch if a != "fsdp" or not m.inside], c, elements, micro,
               "backward", here, "gradient summed over the batch", loop)  # fmt: skip
    if plan.config.head_bias:
        ledger.add("all-reduce", batch, c, m.rows, micro, "backward", "lm_head/bias",
                   "gradient summed over the batch", loop)  # fmt: skip


def _scores(ledger: Ledger, m: _Matrix) -> None:
    workload, here = ledger.workload, head_cause(m.path)
    _chunked(ledger, m, 1, sums=2)
    everyone, tokens = ledger.plan.batch_axes(), workload.batch * workload.length
    for dtype in (ledger.wide, "bool"):
        ledger.add("all-gather", everyone, dtype, tokens, 1, "forward", here, "the scores, to every device")
    if not workload.top_n:
        return
    step, chunks = ledger.chunks(m.rows)
    candidates = min(workload.top_n, m.rows) * ledger.plan.mesh.size(m.vocab)
    for dtype in (ledger.wide, "int32"):
        ledger.add("all-gather", m.vocab, dtype, ledger.rows * step * candidates, chunks, "forward", here,
                   "each shard's likeliest ids", True)  # fmt: skip
        ledger.add("all-gather", everyone, dtype, tokens * workload.top_n, 1, "forward", here,
                   "the likeliest ids, to every device")  # fmt: skip


def _last_or_all(ledger: Ledger, m: _Matrix) -> None:
    """Logits of all positions (`logits`) or of the last (`prefill`, `decode`), and the choice among them."""
    plan, workload, here, wide = ledger.plan, ledger.workload, head_cause(m.path), ledger.wide
    length = workload.length if workload.task == "logits" else 1
    rows = ledger.rows * length
    if workload.task == "logits":
        _whole_words(ledger, 1, here)
    else:
        _last_words(ledger, here)
    _product(ledger, m, rows, 1)
    ledger.add("all-reduce", m.contract, wide, rows * m.rows, 1, "forward", here, "partial logits added")
    batch = plan.batch_axes()
    if workload.task == "logits" or workload.choose == "logits":
        shape = (workload.batch, length, m.rows * plan.mesh.size(m.vocab))
        ledger.reshard(shape, (batch, (), m.vocab), ((), (), ()), wide, 1, "forward", here,
                       "whole logits, to every device")  # fmt: skip
        return
    # The greatest and the lowest id that has it; drawing: that of the logits and of what is drawn, the sum of
    # what top-k keeps, and for top-k and top-p each a bisection with a count of what lies above.
    chosen = 5 + 2 * (BISECTIONS + 1) if workload.choose == "sample" else 2
    ledger.add("all-reduce", m.vocab, "float32", rows, chosen, "forward", here,
               "maxima, counts and sums of one number a row")  # fmt: skip
    if workload.choose == "sample":
        ledger.add("all-gather", m.vocab, "int32", rows * plan.mesh.size(m.vocab), 2, "forward", here,
                   "counts of ties")  # fmt: skip
    ledger.add("all-gather", batch, "int32", workload.batch, 1, "forward", here, "the ids, to every device")
