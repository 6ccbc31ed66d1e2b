"""Numbers do not depend on the rules for parameters either, however unusual the table."""

from __future__ import annotations

import pytest
from tests.partition.numbers import CONFIG, assert_as_one_device, assert_decodes_as_one_device, tied

from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.plan import Plan
from shardwise.partition.presets import PRESETS
from shardwise.partition.rules import ACTIVATIONS, Rules

EVERYWHERE = ("dp", "fsdp", "tp")
BOTH = ("tp", "fsdp")
TABLES = {
    "easylm": PRESETS["easylm"],
    "fsdp on the dims that tp cuts": Rules().changed(
        {"mlp": BOTH, "heads": BOTH, "kv_heads": BOTH, "vocab": BOTH, "embed": ()}
    ),
    "tp on every input": Rules().changed(
        {"embed": ("tp", "fsdp"), "vocab": (), "heads": (), "kv_heads": (), "mlp": ()}
    ),
    "the batch over tp as well": PRESETS["fsdp"].changed(activations={"tokens": (EVERYWHERE, ())}),
    "parameters and the batch over tp": Rules().changed(
        activations={name: (EVERYWHERE, *((),) * (len(dims) - 1)) for name, dims in ACTIVATIONS.items()}
    ),
    "tp within heads": Rules().changed({"head_dim": ("tp",), "heads": (), "kv_heads": ()}),
    "tp within kv groups": Rules().changed({"q_per_kv": ("tp",), "heads": (), "kv_heads": ()}),
    "kv heads without heads": Rules().changed({"heads": ()}),
    "dp on parameters": Rules().changed({"mlp": ("dp",), "heads": ("dp", "tp")}),
    "scales over tp": Rules().changed({"vector": ("tp",)}),
}
QUICK = ("easylm", "fsdp on the dims that tp cuts", "tp on every input", "the batch over tp as well")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TABLES]


def made(table: str) -> Plan:
    config = tied(CONFIG) if table == "easylm" else CONFIG
    return plan_model(config, MeshSpec(2, 2, 2), TABLES[table])


@pytest.mark.parametrize("table", CASES)
def test_logits_loss_and_gradients_are_those_of_one_device(table: str) -> None:
    assert_as_one_device(made(table))


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_decoding_with_a_cache_gives_the_logits_of_one_device(table: str) -> None:
    assert_decodes_as_one_device(made(table))
