"""Small programs compiled for 8 fake devices, whose collectives and products are known.

Not here: programs written by hand (test_hlo_text.py) and whole steps (test_audited_steps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.errors import ShardwiseError
from shardwise.partition.mesh import MeshSpec, build_mesh
from shardwise.planner import partitioned
from shardwise.planner.collectives import Collective
from shardwise.planner.partitioned import PartitionedModule, partitioned_lowering

SPEC = MeshSpec(2, 2, 2)


def mesh(spec: MeshSpec = SPEC) -> jax.sharding.Mesh:
    return build_mesh(spec, jax.devices()[: spec.num_devices])


def array(shape: tuple[int, ...], *spec: Any, on: jax.sharding.Mesh | None = None) -> jax.ShapeDtypeStruct:
    """A float32 argument cut as `spec` says."""
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(on or mesh(), PartitionSpec(*spec))
    )


def audit(f: Callable[..., Any], *args: Any) -> PartitionedModule:
    return partitioned_lowering(jax.jit(f).lower(*args))


def brief(collectives: list[Collective]) -> list[tuple[Any, ...]]:
    return [(c.op, c.axes, c.payload, c.count, c.in_loop) for c in collectives]


def test_each_collective_of_a_shard_map_is_found_with_its_bytes_and_axes() -> None:
    @partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=PartitionSpec("dp", "tp"),
        out_specs=(PartitionSpec(),) * 5,
        check_vma=False,
    )
    def f(x: jax.Array) -> tuple[jax.Array, ...]:  # [4, 8] on each device: 128 bytes
        return (
            jax.lax.psum(x, "tp"),
            jax.lax.all_gather(x, "fsdp", axis=0, tiled=True),
            jax.lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
            jax.lax.all_to_all(x, "dp", split_axis=0, concat_axis=1, tiled=True),
            jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
        )

    found = audit(f, array((8, 16), "dp", "tp")).collectives(mesh())
    assert sorted(brief(found)) == [
        ("all-gather", ("fsdp",), 256, 1, False),
        ("all-reduce", ("tp",), 128, 1, False),
        ("all-to-all", ("dp",), 128, 1, False),
        ("collective-permute", ("fsdp",), 128, 1, False),
        ("reduce-scatter", ("tp",), 128, 1, False),
    ]
    assert {c.dtype for c in found} == {"float32"}
    assert {c.phase for c in found} == {"forward"}
    assert all("test_partitioned.py:" in c.cause for c in found)


@pytest.mark.parametrize(
    "axes", [("dp",), ("fsdp",), ("tp",), ("dp", "fsdp"), ("dp", "tp"), ("fsdp", "tp"), ("dp", "fsdp", "tp")]
)
def test_every_set_of_axes_is_told_apart(axes: tuple[str, ...]) -> None:
    @partial(jax.shard_map, mesh=mesh(), in_specs=PartitionSpec(axes), out_specs=PartitionSpec())
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, axes)

    assert [c.axes for c in audit(f, array((8,), axes)).collectives(SPEC)] == [axes]


def test_groups_are_places_in_the_mesh_whatever_the_order_of_its_devices() -> None:
    order = np.asarray(jax.devices())[[5, 0, 3, 6, 1, 7, 2, 4]].reshape(2, 2, 2)
    shuffled = jax.sharding.Mesh(order, ("dp", "fsdp", "tp"))

    @partial(jax.shard_map, mesh=shuffled, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec())
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "fsdp")

    found = audit(f, array((8,), "fsdp", on=shuffled)).collectives(shuffled)
    assert [c.axes for c in found] == [("fsdp",)]


def test_counts_multiply_through_nested_scans_of_a_shard_map() -> None:
    @partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=PartitionSpec("tp"),
        out_specs=PartitionSpec("tp"),
        check_vma=False,
    )
    def f(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.ppermute(jnp.sin(x), "tp", [(0, 1), (1, 0)]), None

        def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x, _ = jax.lax.scan(inner, x, None, length=3)
            return x * jax.lax.pmean(x, "fsdp"), None

        return jax.lax.scan(outer, jax.lax.ppermute(x, "dp", [(0, 1), (1, 0)]), None, length=5)[0]

    found = brief(audit(f, array((8,), "tp")).collectives(SPEC))
    assert sorted(found) == [
        ("all-reduce", ("fsdp",), 16, 5, True),
        ("collective-permute", ("dp",), 16, 1, False),
        ("collective-permute", ("tp",), 16, 15, True),
    ]


def test_a_loop_that_ends_by_its_data_counts_once_with_a_note() -> None:
    @partial(
        jax.shard_map, mesh=mesh(), in_specs=PartitionSpec("tp"), out_specs=PartitionSpec(), check_vma=False
    )
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0] < 100.0, lambda x: jax.lax.psum(x, "tp") + 1, x)

    (c,) = audit(f, array((8,), "tp")).collectives(SPEC)
    assert (c.count, c.in_loop) == (1, True)
    assert "unknown length" in c.note


def product(keep: PartitionSpec) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """xᵀy, made whole on every device before each keeps what `keep` says, in another dtype."""

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        whole = jax.lax.with_sharding_constraint(x.T @ y, NamedSharding(mesh(), PartitionSpec()))
        cast = jnp.swapaxes(whole.astype(jnp.bfloat16), 0, 1)
        return jax.lax.with_sharding_constraint(cast, NamedSharding(mesh(), keep))

    return f


BATCH = ("dp", "fsdp", "tp")
FACTORS = array((8, 16), BATCH), array((8, 4), BATCH)


@pytest.mark.parametrize("partitioner", ["Shardy", "GSPMD"])
def test_a_sum_of_which_each_device_keeps_a_part_is_a_reduce_scatter(partitioner: str) -> None:
    if partitioner == "GSPMD" and not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has no partitioner but Shardy")
    if partitioner == "GSPMD":
        jax.config.update("jax_use_shardy_partitioner", False)
    try:
        module = audit(product(PartitionSpec(None, BATCH)), *FACTORS)
    finally:
        if partitioner == "GSPMD":
            jax.config.update("jax_use_shardy_partitioner", True)
    (c,) = module.collectives(SPEC)
    assert (c.op, c.axes, c.dtype, c.payload) == ("reduce-scatter", BATCH, "float32", 256)
    assert c.note == "compiled as all-reduce + slice"


def test_a_sum_that_every_device_keeps_is_an_all_reduce() -> None:
    (c,) = audit(product(PartitionSpec()), *FACTORS).collectives(SPEC)
    assert (c.op, c.axes, c.payload, c.note) == ("all-reduce", BATCH, 256, "")


def test_a_sum_cut_along_some_of_its_axes_is_told_in_two_parts() -> None:
    found = audit(product(PartitionSpec(None, "fsdp")), *FACTORS).collectives(SPEC)
    assert brief(found) == [
        ("reduce-scatter", ("fsdp",), 256, 1, False),
        ("all-reduce", ("dp", "tp"), 128, 1, False),
    ]


def test_products_are_those_of_one_device_times_the_scan() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), PartitionSpec(("dp", "fsdp"))))
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, w)[0] @ w[0].T

    # 8 rows over dp and fsdp, 16 columns over tp: 2 × 16 · 8 a device; the last contracts the cut dim
    flops = audit(f, array((8, 16), ("dp", "fsdp")), array((3, 16, 16), None, None, "tp")).flops()
    assert (flops.in_loops, flops.outside) == (3 * 2 * 2 * 16 * 8, 2 * 2 * 8 * 16)


def test_a_gradient_is_told_by_its_parameter_and_of_the_backward_phase() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        slope = jax.grad(lambda w: jnp.sum(jnp.square(x @ w)))(params["top/w"])
        return params["top/w"] - 0.5 * slope

    (c,) = audit(f, {"top/w": array((16, 4))}, array((8, 16), "fsdp")).collectives(SPEC)
    assert (c.op, c.axes, c.payload, c.phase) == ("all-reduce", ("fsdp",), 256, "backward")
    assert c.cause.startswith("gradient of top/w: ")


def test_an_argument_that_is_sent_is_named() -> None:
    def f(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh(), PartitionSpec()))
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, params["layers/w"])[0]

    given = {"layers/w": array((3, 16, 16), None, "fsdp")}
    (c,) = partitioned_lowering(jax.jit(f).lower(given, array((8, 16)))).collectives(SPEC)
    assert (c.op, c.axes, c.count) == ("all-gather", ("fsdp",), 3)
    assert c.cause.startswith("layers/w: ")


def test_a_program_for_one_device_has_products_but_no_collectives() -> None:
    one = mesh(MeshSpec())
    module = audit(lambda x: x @ x, array((4, 4), on=one))
    assert module.collectives(one) == []
    assert module.flops().total == 2 * 4 * 4 * 4


def test_a_program_in_the_compile_cache_is_compiled_again_and_the_cache_stays_on(tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    lowered = jax.jit(lambda x: jnp.cos(x @ x.T)).lower(array((8, 8), "fsdp"))
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        # the very options of the audit: the folder is no part of the cache's key
        (tmp_path / "dump").mkdir()
        lowered.compile(compiler_options=partitioned._options(str(tmp_path / "dump")))
        stored = sorted(tmp_path.glob("*-cache"))
        assert stored, "nothing was stored, so nothing is shown"
        assert partitioned_lowering(lowered).collectives(SPEC)
        assert sorted(tmp_path.glob("*-cache")) == stored
        jax.jit(lambda x: jnp.sin(x @ x.T)).lower(array((8, 8), "fsdp")).compile()
        assert len(sorted(tmp_path.glob("*-cache"))) > len(stored)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_a_compiler_that_writes_no_module_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioned, "_options", lambda folder: {})
    with pytest.raises(ShardwiseError, match="left no module"):
        audit(lambda x: x + 3, array((8,), "fsdp"))
