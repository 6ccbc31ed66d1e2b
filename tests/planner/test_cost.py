"""Predicted step times against sums worked out by hand from sizes, rates and bandwidths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.models.attention import query_block
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.collectives import Collective
from shardwise.planner.cost import ATTENTION_SHARE, Assumed, Cost, collective_seconds, cost, mfu
from shardwise.planner.efficiency import efficiency
from shardwise.planner.hardware import parse_system
from shardwise.planner.hosting import host
from shardwise.steps.optimizer import OptimizerConfig
from shardwise.steps.workload import Workload

V, D, L, H, K, E, F = 32000, 1024, 4, 8, 2, 128, 4096
CONFIG = ModelConfig(
    vocab_size=V, embed_dim=D, num_layers=L, num_heads=H, num_kv_heads=K, head_dim=E, mlp_dim=F,
    max_position=8192,
)  # fmt: skip
KERNELS = L * (2 * D * H * E + 2 * D * K * E + 3 * D * F) + V * D
"""Parameters in products."""


def predicted(on: str, mesh: str, workload: Workload, config: ModelConfig = CONFIG, **assumed: Any) -> Cost:
    system, _ = parse_system(on)
    spec = MeshSpec.parse(mesh)
    return cost(plan_model(config, spec), workload, host(system, spec), Assumed(**assumed))


def train(batch: int = 8, length: int = 1024, **more: Any) -> Workload:
    return Workload("train", batch, length, compute_dtype="bfloat16", optimizer=OptimizerConfig(), **more)


def test_products_of_one_device_are_six_flops_a_parameter_and_token_at_the_chips_rate() -> None:
    found = predicted("h100", "1,1,1", train())
    rate = 989e12 * efficiency(parse_system("h100")[0].chip, "train")
    tokens = 8 * 1024
    # The rows of the embedding that are looked up are no product; its gradient is none either.
    assert found.products == pytest.approx(6 * KERNELS * tokens / rate, rel=1e-6)
    assert found.tokens == tokens
    assert found.communication == 0 and found.hidden == {}
    assert found.recomputed == 0


def test_attention_takes_the_visible_half_at_its_own_share_of_the_rate() -> None:
    length = 4096
    one, two = (predicted("h100", "1,1,1", train(2, n)) for n in (length, 2 * length))
    rate = 989e12 * efficiency(parse_system("h100")[0].chip, "train") * ATTENTION_SHARE
    # Forward 4·H·E a pair of tokens, backward 2.5 times that, half of the pairs visible.
    wanted = 3.5 * 4 * H * E * L * 2 * length * length / 2 / rate
    # A block of queries is computed with all keys up to its last one.
    assert wanted <= one.attention <= wanted * (1 + query_block(length) / length) * (1 + 1e-9)
    assert 3.5 < two.attention / one.attention <= 4


def test_the_optimizer_reads_and_writes_seven_arrays_of_the_parameters() -> None:
    params = KERNELS + V * D + D * (2 * L + 1)
    for mesh, share in (("1,1,1", 1), ("1,8,1", 8)):
        on = "h100" if share == 1 else "h100:8"
        assert predicted(on, mesh, train()).optimizer == pytest.approx(
            7 * 4 * params / share / 3350e9, rel=1e-3
        )


def test_remat_computes_a_layers_products_again() -> None:
    none, full = (predicted("h100", "1,1,1", train(remat=remat)) for remat in ("none", "full"))
    assert none.recomputed == 0
    assert full.total > none.total
    again = full.products - none.products
    layers = L * (
        2 * D * H * E + 2 * D * K * E + 2 * D * F
    )  # down_proj closes the layer and is not made again
    rate = 989e12 * efficiency(parse_system("h100")[0].chip, "train")
    assert again == pytest.approx(2 * layers * 8 * 1024 / rate, rel=1e-6)


def test_messages_of_fsdp_hide_behind_products_and_those_of_tp_do_not() -> None:
    big = train(64, 4096)
    fsdp, tp = predicted("h100:8", "1,8,1", big), predicted("h100:8", "1,1,8", big)
    assert sum(fsdp.hidden.values()) > 0
    assert fsdp.communication < 0.5 * sum(fsdp.hidden.values())  # the first layer's and the last one's
    assert tp.exposed["tp"] > 0 and sum(tp.hidden.values()) == pytest.approx(0)
    little = predicted("h100:8", "1,8,1", train(8, 128))
    assert little.communication > sum(little.hidden.values())  # too few products to hide them


def test_a_ring_takes_its_bytes_over_its_bandwidth_and_a_delay() -> None:
    system, _ = parse_system("h100:8")
    hosting = host(system, MeshSpec(1, 8, 1))
    gather = Collective("all-gather", ("fsdp",), "bfloat16", 8_000_000_000, 3, True, "forward", "x")
    assert collective_seconds(gather, hosting) == pytest.approx(3 * 7 / 8 * 8e9 / 450e9 + 3 * 7 * 3e-6)
    reduce = replace(gather, op="all-reduce")
    assert collective_seconds(reduce, hosting) == pytest.approx(
        2 * 3 * 7 / 8 * 8e9 / 450e9 + 3 * 2 * 7 * 3e-6
    )
    small = replace(reduce, payload=8, count=1)
    assert collective_seconds(small, hosting) == pytest.approx(
        3 * (3e-6 + 8 / 450e9)
    )  # three rounds of eight


def test_decoding_reads_parameters_and_cache_once_a_token() -> None:
    workload = Workload("decode", 4, 1, capacity=2048, compute_dtype="bfloat16", param_dtype="bfloat16")
    found = predicted("h100", "1,1,1", workload)
    cache = 2 * L * 4 * 2048 * K * E * 2
    looked_up = 4 * D * 2
    reads = 2 * KERNELS + looked_up + cache + 2 * D * (2 * L + 1)
    reached = 3350e9 * efficiency(parse_system("h100")[0].chip, "decode")
    assert found.total == pytest.approx(reads / reached, rel=1e-3)
    assert found.bound == "memory"
    shorter = predicted("h100", "1,1,1", replace(workload, capacity=1024))
    assert found.total - shorter.total == pytest.approx(cache / 2 / reached, rel=1e-6)


def test_a_window_bounds_what_is_read_of_the_cache() -> None:
    workload = Workload("decode", 4, 1, capacity=2048, compute_dtype="bfloat16", param_dtype="bfloat16")
    whole = predicted("h100", "1,1,1", workload)
    half = predicted("h100", "1,1,1", workload, replace(CONFIG, windows=(512, 0, 512, 0)))
    cache = 2 * L * 4 * 2048 * K * E * 2
    reached = 3350e9 * efficiency(parse_system("h100")[0].chip, "decode")
    assert whole.total - half.total == pytest.approx((cache / 2) * 3 / 4 / reached, rel=1e-6)


def test_utilisation_counts_neither_padding_nor_what_is_made_again() -> None:
    system, _ = parse_system("h100:8")
    values = {}
    for name, mesh, remat in (
        ("plain", "1,8,1", "none"),
        ("again", "1,8,1", "full"),
        ("padded", "1,1,8", "none"),
    ):
        spec = MeshSpec.parse(mesh)
        hosting = host(system, spec)
        found = cost(plan_model(CONFIG, spec), train(remat=remat), hosting)
        values[name] = found
        assert mfu(found, hosting, "bfloat16") == pytest.approx(
            found.model_flops / found.total / (8 * 989e12)
        )
    assert len({found.model_flops for found in values.values()}) == 1


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="v4 has no rate for products in float8"):
        predicted("v4-8", "1,4,1", train(), product_dtype="float8")


def test_simulated_devices_share_their_processor() -> None:
    one, four = predicted("cpu:1", "1,1,1", train(4, 64)), predicted("cpu:4", "1,4,1", train(4, 64))
    assert four.products == pytest.approx(one.products)
