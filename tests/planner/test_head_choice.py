"""Which head layout is the cheapest for which job, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.rules import HeadLayout
from shardwise.planner.head_choice import HeadChoice, LayoutCost, choose_head_layout
from shardwise.runtime.chips import Torus, chips
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Task, Workload

BIG = ModelConfig(
    vocab_size=262144, embed_dim=640, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=256, mlp_dim=2048,
    max_position=4096,
)  # fmt: skip
TIED = replace(BIG, tie_embeddings=True)
CHIPS = {"tpu": chips()["v5p"], "gpu": chips()["h100"], "cpu": chips()["cpu"]}
LAYOUTS = {"vocab", "hidden", "replicated"}


def workload(task: Task, batch: int = 8, **more: Any) -> Workload:
    length = 1 if task == "decode" else 512
    optimizer = OptimizerConfig() if task == "train" else None
    return Workload(task, batch, length, capacity=512, optimizer=optimizer, **more)


def choice(
    task: Task, config: ModelConfig = BIG, tp: int = 2, batch: int = 8, device: str = "tpu", **more: Any
) -> HeadChoice:
    def make(layout: HeadLayout) -> Any:
        return plan_model(config, MeshSpec(tp=tp), head_layout=layout)

    return choose_head_layout(make, workload(task, batch, **more), CHIPS[device])


def costs(task: Task, **more: Any) -> dict[str, LayoutCost]:
    return {c.layout: c for c in choice(task, **more).costs}


@pytest.mark.parametrize("device", CHIPS)
@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("config", [BIG, TIED], ids=["untied", "tied"])
def test_decoding_with_a_large_vocabulary_cuts_the_vocabulary_and_repeats_the_head_last(
    config: ModelConfig, tp: int, device: str
) -> None:
    assert [c.layout for c in choice("decode", config, tp, device=device).costs] == [
        "vocab",
        "hidden",
        "replicated",
    ]


@pytest.mark.parametrize("task", ["train", "score", "prefill"])
def test_other_work_on_a_large_vocabulary_cuts_it_too(task: Task) -> None:
    assert choice(task).layout == "vocab"


def test_a_head_that_is_read_faster_than_a_message_travels_is_best_repeated() -> None:
    assert choice("decode", replace(BIG, vocab_size=64)).layout == "replicated"


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("task", ["train", "prefill", "decode", "score"])
def test_both_cuts_take_the_same_flops_and_weight_bytes(task: Task, tp: int) -> None:
    found = costs(task, tp=tp)
    vocab, hidden, whole = (found[name] for name in ("vocab", "hidden", "replicated"))
    assert (vocab.flops, vocab.weight_bytes) == (hidden.flops, hidden.weight_bytes)
    assert (whole.flops, whole.weight_bytes) == (tp * vocab.flops, tp * vocab.weight_bytes)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_hidden_split_moves_twice_the_bytes_of_gathering_the_logits_of_the_vocab_split(tp: int) -> None:
    found = costs("decode", tp=tp, choose="logits")
    logits = 8 * BIG.vocab_size * 4
    assert found["vocab"].moved == (tp - 1) / tp * logits
    assert found["hidden"].moved == 2 * found["vocab"].moved
    assert found["replicated"].moved == 0


def test_the_hidden_split_moves_far_more_than_decoding_from_shards() -> None:
    found = costs("decode")
    assert found["hidden"].moved > 10_000 * found["vocab"].moved > 0


def test_the_hidden_split_moves_far_more_than_training_from_shards() -> None:
    found = costs("train")
    assert found["hidden"].moved > 100 * found["vocab"].moved > 0


@pytest.mark.parametrize("task", ["train", "decode"])
def test_a_tied_table_counts_the_look_up_as_well(task: Task) -> None:
    alone, tied = costs(task), costs(task, config=TIED)
    tokens = 8 * (1 if task == "decode" else 512)
    rows = tokens * BIG.embed_dim * 4  # bytes of looked-up rows
    more = {name: tied[name].moved - alone[name].moved for name in LAYOUTS}
    # over two devices: an all-reduce sends the rows once, an all-gather half of them
    assert more == {"vocab": rows, "hidden": rows / 2, "replicated": 0}


def test_all_layouts_are_compared_and_equal_ones_keep_an_order() -> None:
    def same(layout: HeadLayout) -> Any:
        return plan_model(BIG, MeshSpec(tp=2), head_layout="vocab")

    found = choose_head_layout(same, workload("decode"), CHIPS["tpu"])
    assert [c.layout for c in found.costs] == ["vocab", "hidden", "replicated"]
    assert len({c.seconds for c in found.costs}) == 1


def test_of_equal_times_the_one_that_sends_less_comes_first() -> None:
    fabric = CHIPS["tpu"].fabric
    assert isinstance(fabric, Torus)
    free = replace(CHIPS["tpu"], fabric=replace(fabric, link=float("inf")), latency=0.0)  # sending is free
    small = replace(BIG, vocab_size=2048)
    found = choose_head_layout(
        lambda layout: plan_model(small, MeshSpec(tp=2), head_layout=layout), workload("decode"), free
    )
    vocab, hidden, _ = found.costs
    assert (vocab.layout, hidden.layout) == ("vocab", "hidden")
    assert vocab.seconds == hidden.seconds and vocab.moved < hidden.moved


def test_the_comparison_is_told_with_bytes_messages_flops_and_time_of_each_layout() -> None:
    first, *lines = choice("decode").lines()
    assert first.startswith("head layout vocab: the cheapest of three (head, a step on one device; times for")
    assert [line.split()[0] for line in lines] == ["vocab", "hidden", "replicated"]
    for line in lines:
        assert all(word in line for word in ("ms", "weight", "GFLOP", "messages"))
        assert len(line) <= 80
    summary = choice("decode", TIED).summary()
    assert summary.startswith("head layout vocab (auto") and all(layout in summary for layout in LAYOUTS)
