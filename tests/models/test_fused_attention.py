"""Which steps take tokamax's fused kernel, and that its TPU kernel, interpreted by Pallas, equals ours."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from shardwise.models.attention import Scores, Visibility, _fused, attention, fuses, row_by_row

B, T, K, G, E = 2, 256, 2, 3, 8  # two tiles of queries and of keys; three query heads share a kv head
PLACE = cast(Any, SimpleNamespace(on_cpu=True))


def _visible(window: int | None) -> Visibility:
    """Three documents in the first row, which the tiles cut; one and padding in the second."""
    parts = [[100, 100, 56], [200, 56]]
    segments = np.stack([np.repeat(range(1, len(row) + 1), row) for row in parts]).astype(np.int32)
    segments[1, 200:] = 0
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in parts]).astype(np.int32)
    held = None if window is None else jnp.int32(window)
    return Visibility(*(jnp.asarray(x) for x in (positions, segments) * 2), ordered=True, window=held)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 3.0)], ids=["full", "window, soft cap"])
def test_the_tpu_kernel_row_by_row_gives_our_results_and_gradients(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamax._src.ops.attention import pallas_mosaic_tpu, pallas_mosaic_tpu_vjp

    for kernel in (
        pallas_mosaic_tpu.PallasMosaicTpuFlashAttention,
        pallas_mosaic_tpu_vjp.PallasMosaicTpuFlashAttentionVjp,
    ):
        monkeypatch.setattr(kernel, "supported_on", lambda *_: True)
    # The interpreter calls back into Python, which that optimization of custom_vjp refuses.
    defvjp = jax.custom_vjp.defvjp
    monkeypatch.setattr(jax.custom_vjp, "defvjp", lambda self, f, b, **_: defvjp(self, f, b))
    rng = np.random.default_rng(0)
    shapes = (B, T, K, G, E), (B, T, K, E), (B, T, K, E), (B, T, K, G, E)
    q, k, v, cotangent = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    visible, scores = _visible(window), Scores(E**-0.5, softcap)

    def fused(*qkv: jax.Array) -> jax.Array:
        return row_by_row(partial(_fused, "tpu", scores), *qkv, visible)

    def blocks(*qkv: jax.Array) -> jax.Array:
        return attention(PLACE, *qkv, visible, scores, "xla")

    with pltpu.force_tpu_interpret_mode():
        out, pull = jax.vjp(jax.jit(fused), q, k, v)
        gradients = pull(cotangent)
    expected, pull = jax.vjp(jax.jit(blocks), q, k, v)
    real = visible.q_segments[..., None, None, None] > 0
    # Rows of padding see one another in both; float32 sums of up to 256 terms, in another order: 2⁻²⁴ · √256
    # of the largest is expected, ten times that allowed.
    for ours, theirs in zip((expected * real, *pull(cotangent)), (out * real, *gradients), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5 * float(jnp.abs(ours).max()))


def test_the_kernel_is_chosen_by_the_mesh_s_devices_and_by_what_the_kernel_takes() -> None:
    v5e = partial(fuses, "tpu", "TPU v5 lite")
    assert v5e(4096, 4096, False)
    assert v5e(128, 4096, False)  # prefill into a larger cache
    assert not v5e(1, 4096, False)  # decoding
    assert not v5e(4096, 4100, False)  # no whole tiles
    assert not v5e(4096, 4096, True)  # takes no bias, which ALiBi is
    assert not fuses("tpu", "TPU v4", 4096, 4096, False)
    assert fuses("gpu", "NVIDIA H100", 4096, 4096, True)
    assert not fuses("gpu", "NVIDIA H100", 1, 4096, False)
    assert not fuses("cpu", "cpu", 4096, 4096, False)


def test_tokamax_does_not_read_our_command_line() -> None:
    code = """
import sys
sys.argv = ["shardwise", "finetune", "model", "--steps", "3"]
import jax.numpy as jnp
from shardwise.models.attention import Scores, Visibility, _fused
ints, ones = jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4, 1, 1, 8))
print(_fused("cpu", Scores(1.0), ones, ones[:, :, :, 0], ones[:, :, :, 0], Visibility(*(ints,) * 4)).shape)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-500:]
    assert ran.stdout.strip() == "(1, 4, 1, 1, 8)"
