"""Where a mesh's axes lie on a machine, and with what bandwidth; what JAX itself refuses is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from jax._src.mesh_utils import _create_device_mesh_for_nd_torus  # the reference: JAX's own assignment

from shardwise.errors import MeshError
from shardwise.partition.mesh import MeshSpec
from shardwise.planner.hardware import parse_system
from shardwise.planner.hosting import host
from shardwise.planner.search import meshes

V5P, V5E, V6E, TPU7X, NVLINK, NIC = 90e9, 45e9, 90e9, 100e9, 450e9, 50e9
"""One link one way; of an H100 into its switch and into the network."""


def link(on: str, mesh: str, axis: str) -> float:
    system, _ = parse_system(on)
    return host(system, MeshSpec.parse(mesh)).links[axis].bandwidth


@pytest.mark.parametrize(
    ("on", "mesh", "axis", "bandwidth"),
    [
        # a ring carries both ways at once, and rings along several torus axes add up
        ("v5p:4x4x4", "1,16,4", "tp", 2 * V5P),
        ("v5p:4x4x4", "1,16,4", "fsdp", 4 * V5P),
        ("v5p:4x4x4", "1,64,1", "fsdp", 6 * V5P),
        ("v5e:16x16", "1,16,16", "tp", 2 * V5E),
        # below 4x4x4, and below 16 on a 2-D chip, nothing wraps
        ("v5p:2x2x2", "1,2,4", "tp", 2 * V5P),
        ("v5e:8x8", "1,8,8", "tp", V5E),
        ("v5e:8x16", "1,8,16", "tp", 2 * V5E),
        ("v5e:8x16", "1,8,16", "fsdp", V5E),
        # between slices every chip of a group in a slice brings its own share: 3.125 GB/s
        ("2xv5e:16x16", "2,256,1", "dp", 3.125e9),
        ("2xv5e:16x16", "1,512,1", "fsdp", 4 * V5E),
        ("2xv5e:16x16", "1,32,16", "fsdp", min(2 * V5E, 16 * 3.125e9)),
        # two devices of a chip share its links, unless one group has both
        ("tpu7x:4x4x4", "1,32,4", "tp", 2 * TPU7X / 2),
        ("tpu7x:4x4x4", "1,128,1", "fsdp", 6 * TPU7X),
        ("tpu7x:4x4x4", "1,64,2", "tp", 6 * TPU7X),
        # GPUs: in a node NVLink; beyond it a NIC for each member of the group in a node
        ("h100:8", "1,1,8", "tp", NVLINK),
        ("h100:64", "1,8,8", "tp", NVLINK),
        ("h100:64", "1,8,8", "fsdp", NIC),
        ("h100:64", "1,64,1", "fsdp", min(NVLINK, 8 * NIC)),
        ("h100:64", "1,32,2", "fsdp", 4 * NIC),
        ("h100:64", "8,8,1", "fsdp", NVLINK),
        ("h100:64", "8,8,1", "dp", NIC),
    ],
)  # fmt: skip
def test_bandwidth_of_an_axis(on: str, mesh: str, axis: str, bandwidth: float) -> None:
    assert link(on, mesh, axis) == pytest.approx(bandwidth)


@pytest.mark.parametrize("on", ["v5p:4x4x8", "v5p:2x2x4", "v5e:4x8", "v6e:16x16", "v4:4x8x8", "v5p:4x4x12"])
def test_what_jax_can_host_is_hosted_and_nothing_else(on: str) -> None:
    system, _ = parse_system(on)
    torus = np.array([SimpleNamespace(id=i) for i in range(system.num_devices)], dtype=object)
    hosted = 0
    for mesh in meshes(system.num_devices):
        try:
            _create_device_mesh_for_nd_torus(torus.reshape(system.shape), tuple(mesh.sizes.values()))
            theirs = True
        except NotImplementedError:
            theirs = False
        if theirs:
            host(system, mesh)
            hosted += 1
        else:
            with pytest.raises(MeshError, match="no torus axes make up"):
                host(system, mesh)
    assert hosted >= 3


def test_an_axis_may_take_part_of_a_torus_axis_where_the_mesh_says_so() -> None:
    system, _ = parse_system("v5e:16x16")
    with pytest.raises(MeshError, match="no torus axes make up tp 4, with 16x16 left; !dp:1,fsdp:64,tp:4"):
        host(system, MeshSpec(1, 64, 4))
    found = host(system, MeshSpec(1, 64, 4, split_physical=True))
    assert found.links["tp"].bandwidth == V5E  # four neighbours of sixteen are a line
    assert found.links["fsdp"].bandwidth > V5E


def test_another_number_of_devices_is_refused_with_the_nearest_meshes() -> None:
    system, _ = parse_system("h100:8")
    with pytest.raises(MeshError, match="needs 4 devices, but there are 8 h100"):
        host(system, MeshSpec(1, 2, 2))


def test_tp_does_not_span_slices() -> None:
    system, _ = parse_system("2xv5e:2x2")
    with pytest.raises(MeshError, match="dp or fsdp must be a multiple of 2"):
        host(system, MeshSpec(1, 1, 8))


def test_a_ring_over_nodes_waits_for_each_node_once_not_for_each_gpu() -> None:
    system, _ = parse_system("h100:512")
    found = host(system, MeshSpec(1, 512, 1)).links["fsdp"]
    assert found.delay == pytest.approx(63 * 10e-6 + 7 * 3e-6)
