"""Both ends of the vocabulary on a mesh: look-up is exact, logits are the whole head's, padding is −inf."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.models.config import ModelConfig
from shardwise.models.head import Head, head_logits
from shardwise.models.parameters import plan_model
from shardwise.models.vocabulary import VocabMatrix, look_up
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.rows import put_rows
from shardwise.partition.rules import Override

VOCAB, EMBED, PATH = 101, 12, "embed/table"


def placement(sizes: tuple[int, int, int], *overrides: str) -> Placement:
    config = ModelConfig(
        vocab_size=VOCAB, embed_dim=EMBED, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=4,
        max_position=8, tie_embeddings=True,
    )  # fmt: skip
    plan = plan_model(config, MeshSpec(*sizes), overrides=[Override.parse(text) for text in overrides])
    mesh = build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices])
    return Placement(plan, mesh, jnp.dtype("float32"))


# fsdp 5 divides neither dim: the table is stored padded. The overrides cut it in other ways than the rules.
@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [((1, 1, 1), ()), ((2, 2, 2), ()), ((1, 5, 1), ()), ((1, 2, 2), ("embed/table=None,(fsdp,tp)",))],
)
def test_look_up_takes_the_very_rows_and_logits_are_of_the_whole_head(
    sizes: tuple[int, int, int], overrides: tuple[str, ...]
) -> None:
    place = placement(sizes, *overrides)
    d = place.plan[PATH]
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, EMBED)).astype(np.float32)
    rows = 2 * place.plan.batch_multiple()
    tokens = np.resize(np.arange(VOCAB), (rows, 60)).astype(np.int32)
    assert {0, VOCAB - 1} <= set(tokens.ravel().tolist())
    hidden = rng.normal(size=(rows, 3, EMBED)).astype(np.float32)

    @jax.jit
    def both(stored: jax.Array, tokens: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        looked_up = look_up(place, VocabMatrix.of(place, PATH, stored), tokens, d.true_shape[1])
        return looked_up, head_logits(place, Head.of(place, PATH, stored), hidden)

    stored = place.plan.padding.pad(table, d.axes, d.shape)
    given = put_rows(place.plan, place.mesh, {"tokens": tokens, "hidden": hidden})
    embedded, logits = both(
        jax.device_put(stored, place.plan.sharding(place.mesh, PATH)), given["tokens"], given["hidden"]
    )
    np.testing.assert_array_equal(embedded, table[tokens])
    assert logits.shape[-1] == d.shape[0]
    # float32 sums of 12 products
    np.testing.assert_allclose(logits[..., :VOCAB], hidden @ table.T, atol=12 * 2**-24 * 20)
    assert np.isneginf(np.asarray(logits)[..., VOCAB:]).all()
