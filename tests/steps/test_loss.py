"""The vocab-parallel loss equals a float64 reference, in chunks and over padding, without ever all logits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.models.config import ModelConfig
from shardwise.models.head import Head
from shardwise.models.parameters import plan_model
from shardwise.partition.constraints import Placement
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.partition.rows import put_rows
from shardwise.steps import loss
from shardwise.steps.loss import chunk_length, cross_entropy
from shardwise.steps.score import token_scores

VOCAB, EMBED, LENGTH, Z_LOSS = 101, 12, 7, 0.02
HEAD = "lm_head/kernel"
# float32 sums of at most 140 tokens · 101 ids · 12 features, in unknown order; 2⁻²⁴ each, growing with the
# root.
TOLERANCE = 2**-24 * math.sqrt(140 * 101 * 12)


def placement(*sizes: int, vocab: int = VOCAB, embed: int = EMBED, dtype: str = "float32") -> Placement:
    config = ModelConfig(
        vocab_size=vocab, embed_dim=embed, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, mlp_dim=4,
        max_position=8,
    )  # fmt: skip
    plan = plan_model(config, MeshSpec(*sizes))
    return Placement(plan, build_mesh(plan.mesh, jax.devices()[: plan.mesh.num_devices]), jnp.dtype(dtype))


def inputs(rows: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    weights = rng.random((rows, LENGTH)) * (rng.random((rows, LENGTH)) < 0.7)
    assert (weights == 0).any() and (weights > 0).any()
    head = rng.normal(size=(VOCAB, EMBED))
    targets = rng.integers(0, VOCAB, (rows, LENGTH))
    hidden = rng.normal(size=(rows, LENGTH, EMBED))
    hidden[0, :3] = head[targets[0, :3]] * 2  # some targets are the likeliest ids
    targets[0, 3:6] = (0, VOCAB - 1, VOCAB // 2)
    return {
        "hidden": (hidden * scale).astype(np.float32),
        "head": head.astype(np.float32),
        "targets": targets.astype(np.int32),
        "weights": weights.astype(np.float32),
    }


def reference(given: dict[str, np.ndarray], z_loss: float = Z_LOSS) -> dict[str, Any]:
    """All in float64, with all logits."""
    x, w, targets = given["hidden"].astype(np.float64), given["head"].astype(np.float64), given["targets"]
    weights = given["weights"].astype(np.float64)
    logits = x @ w.T
    best = logits.max(-1)
    lse = best + np.log(np.exp(logits - best[..., None]).sum(-1))
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    one_hot = targets[..., None] == np.arange(w.shape[0])
    probabilities = np.exp(logits - lse[..., None])
    slopes = weights[..., None] * (probabilities * (1 + 2 * z_loss * lse)[..., None] - one_hot)
    return {
        "loss": (weights * (lse - picked + z_loss * lse**2)).sum(),
        "d_hidden": slopes @ w,
        "d_head": np.einsum("btv,btd->vd", slopes, x),
        "nll": lse - picked,
        "right": picked >= best,
    }


def put(place: Placement, given: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """hidden, head, targets, weights on the mesh; the head padded and cut as the plan says."""
    d = place.plan[HEAD]
    head = place.plan.padding.pad(given["head"], d.axes, d.shape)
    rows = {name: array for name, array in given.items() if name != "head"}
    on_mesh = put_rows(place.plan, place.mesh, rows)
    head = jax.device_put(head, place.plan.sharding(place.mesh, HEAD))
    return on_mesh["hidden"], head, on_mesh["targets"], on_mesh["weights"]


def loss_and_gradients(place: Placement, z_loss: float = Z_LOSS) -> Callable[..., Any]:
    def total(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        return cross_entropy(place, hidden, Head.of(place, HEAD, head), targets, weights, z_loss)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))


def in_chunks_of(
    monkeypatch: pytest.MonkeyPatch, place: Placement, rows: int, positions: int, length: int
) -> None:
    """Make the loss take `positions` at a time on this mesh."""
    local, vocab = rows // place.plan.batch_multiple(), place.plan.padding.vocab // place.plan.mesh.tp
    monkeypatch.setattr(loss, "CHUNK_BYTES", local * vocab * 4 * positions)
    assert chunk_length(local, length, vocab) == positions


# fsdp 5 divides neither the vocabulary nor embed, so that the head is stored padded.
MESHES = [(1, 1, 1), (1, 1, 4), (1, 5, 1), (2, 2, 2)]


@pytest.mark.parametrize("sizes", MESHES)
def test_loss_and_gradients_equal_float64_with_z_loss_weights_padding_and_a_padded_chunk(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]
) -> None:
    place = placement(*sizes)
    rows = 2 * place.plan.batch_multiple()
    in_chunks_of(monkeypatch, place, rows, 3, LENGTH)  # 3 + 3 + 1 and two positions of filling
    step = loss_and_gradients(place)
    for scale in (
        1.0,
        60.0,
    ):  # logits up to about ±1000, whose powers overflow unless the greatest is taken off
        given = inputs(rows, scale)
        want = reference(given)
        value, (d_hidden, d_head) = step(*put(place, given))
        d = place.plan[HEAD]
        true = place.plan.padding.trim(np.asarray(d_head), d.axes)
        np.testing.assert_allclose(value, want["loss"], rtol=TOLERANCE)
        np.testing.assert_allclose(
            d_hidden, want["d_hidden"], atol=TOLERANCE * np.abs(want["d_hidden"]).max()
        )
        np.testing.assert_allclose(true, want["d_head"], atol=TOLERANCE * np.abs(want["d_head"]).max())
        np.testing.assert_array_equal(np.asarray(d_head), place.plan.padding.pad(true, d.axes, d.shape))
        assert d_head.sharding.is_equivalent_to(place.plan.sharding(place.mesh, HEAD), 2)

    nothing = step(*put(place, given | {"weights": np.zeros_like(given["weights"])}))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(nothing))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 1, 4), (2, 2, 2)])
def test_token_scores_equal_float64_and_says_which_targets_are_the_likeliest(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]
) -> None:
    place = placement(*sizes)
    rows = 2 * place.plan.batch_multiple()
    in_chunks_of(monkeypatch, place, rows, 3, LENGTH)
    given = inputs(rows)
    want = reference(given)
    assert 1 <= want["right"].sum() < want["right"].size

    @jax.jit
    def score(hidden: jax.Array, head: jax.Array, targets: jax.Array, _: jax.Array) -> Any:
        return token_scores(place, hidden, Head.of(place, HEAD, head), targets)

    scores = score(*put(place, given))
    assert scores.keys() == {"nll", "right"}
    nll, right = scores["nll"], scores["right"]
    assert nll.shape == (rows, LENGTH)
    np.testing.assert_allclose(nll, want["nll"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(right, want["right"])


def test_bfloat16_inputs_are_summed_in_float32() -> None:
    place = placement(1, 1, 1, dtype="bfloat16")
    given = inputs(2)
    narrow = {n: (a.astype(jnp.bfloat16) if n in ("hidden", "head") else a) for n, a in given.items()}
    want = reference(
        {n: np.asarray(a, np.float64) if a.dtype == jnp.bfloat16 else a for n, a in narrow.items()}
    )
    value, (d_hidden, d_head) = loss_and_gradients(place)(*put(place, narrow))
    # A product of two bfloat16 is exact in float32, so the loss is as good as before;
    np.testing.assert_allclose(value, want["loss"], rtol=TOLERANCE)
    # the slopes are rounded to bfloat16 (2⁻⁹) before they are multiplied, and the result once more.
    assert d_hidden.dtype == d_head.dtype == jnp.bfloat16
    for got, name in ((d_hidden, "d_hidden"), (d_head, "d_head")):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want[name], atol=3 * 2**-9 * np.abs(want[name]).max()
        )


def largest_buffer(compiled: str) -> int:
    """Elements of the largest array of floats in a compiled program."""
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled)
    assert shapes
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_logits_are_held_for_one_chunk_of_tokens_and_one_shard_of_the_vocabulary_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab, embed, rows, length, positions = 999, 16, 2, 64, 8
    place = placement(1, 1, 2, vocab=vocab, embed=embed)
    shapes = (
        jax.ShapeDtypeStruct((rows, length, embed), jnp.float32),
        jax.ShapeDtypeStruct((vocab + 1, embed), jnp.float32, sharding=place.plan.sharding(place.mesh, HEAD)),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.float32),
    )

    def compiled() -> str:
        return loss_and_gradients(place).lower(*shapes).compile().as_text()

    # One chunk that holds all positions: then all logits of the shard must show, or the search below sees
    # nothing.
    assert largest_buffer(compiled()) == rows * length * 500
    in_chunks_of(monkeypatch, place, rows, positions, length)
    assert largest_buffer(compiled()) == rows * positions * 500 == 500 * embed


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 200_000), st.sampled_from([4, 8]))
def test_chunks_cover_the_length_evenly_and_stay_below_the_limit(
    rows: int, length: int, vocab: int, size: int
) -> None:
    step = chunk_length(rows, length, vocab, size)
    chunks = -(-length // step)
    assert 1 <= step <= length
    assert step == 1 or step * rows * vocab * size <= loss.CHUNK_BYTES
    assert chunks * step - length < chunks  # evenly: no chunk is short by more than one position's share
    # No fewer chunks would do.
    assert chunks == 1 or -(-length // (chunks - 1)) * rows * vocab * size > loss.CHUNK_BYTES
