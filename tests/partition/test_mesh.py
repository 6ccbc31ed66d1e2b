"""Mesh specs are read in every documented spelling, fitted to the devices, or refused in a helpful line."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.api import resolve_mesh
from shardwise.errors import MeshError
from shardwise.partition.mesh import MeshSpec, build_mesh, default_mesh, over_slices


def refusal(text: str, devices: int = 8, kind: str = "cpu") -> str:
    """The message with which a mesh is refused, which must be one line."""
    with pytest.raises(MeshError) as caught:
        MeshSpec.parse(text).resolve(devices, kind)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1,-1,1", (1, -1, 1)),
        (" 2 , 2 , 2 ", (2, 2, 2)),
        ("dp:1,fsdp:-1,tp:1", (1, -1, 1)),
        ("dp=2,fsdp=2,tp=2", (2, 2, 2)),
        ("tp:4,dp:2", (2, 1, 4)),
        ("tp:4", (1, 1, 4)),
        ("mp:4", (1, 1, 4)),
        ("dp:1,fsdp:-1,mp:2", (1, -1, 2)),
        ("dp = 2, tp : 4", (2, 1, 4)),
    ],
)
def test_every_documented_spelling_is_read(text: str, sizes: tuple[int, int, int]) -> None:
    assert MeshSpec.parse(text) == MeshSpec(*sizes)


@pytest.mark.parametrize("text", ["!1,-1,2", "! dp:1,fsdp:-1,tp:2"])
def test_a_leading_exclamation_mark_allows_splitting_physical_axes(text: str) -> None:
    spec = MeshSpec.parse(text)
    assert spec == MeshSpec(1, -1, 2, split_physical=True)
    resolved = spec.resolve(8)
    assert resolved.split_physical
    assert str(resolved) == "!dp:1,fsdp:4,tp:2"


# The cases of C606, then further mistakes; each with words that its message must have.
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-1,-1,1", ["more than one -1", "dp", "fsdp", "tp", "8 cpu devices"]),
        ("0,8,1", ["the size of dp is 0", "fsdp", "tp", "8 cpu devices"]),
        ("2,2", ["2 numbers", "dp,fsdp,tp", "8 cpu devices"]),
        ("16,1,1", ["dp:16,fsdp:1,tp:1", "needs 16 devices", "8 cpu devices"]),
        ("3,2,1", ["dp:3,fsdp:2,tp:1", "needs 6 devices", "8 cpu devices"]),
        ("1,1,1", ["needs 1 device,", "8 cpu devices"]),
        ("3,-1,1", ["multiple of 3 devices", "8 cpu devices"]),
        ("", ["1,-1,1"]),
        ("1,2,3,4", ["4 numbers", "3 axes"]),
        ("2,fsdp:2,tp:2", ["'2'", "dp:1,fsdp:-1,tp:1"]),
        ("dp:2,,tp:2", ["''", "dp:1,fsdp:-1,tp:1"]),
        ("dp:2:2", ["'dp:2:2'"]),
        ("dp:2,ep:4", ["unknown axis 'ep'", "dp, fsdp, tp"]),
        ("dp:2,fdsp:4", ["unknown axis 'fdsp'", "dp, fsdp, tp", "did you mean 'fsdp'?"]),
        ("tp:2,mp:4", ["'tp' twice, 2 and 4; keep one"]),
        ("dp:2,dp:4", ["'dp' twice, 2 and 4; keep one"]),
        ("8", ["1 number,", "3 axes"]),
        ("tp8", ["cannot be read at 'tp8'"]),
        ("two,2,2", ["dp is 'two'", "whole number"]),
        ("2.0,2,2", ["dp is '2.0'"]),
        ("1_0,1,1", ["dp is '1_0'"]),
        ("-2,2,2", ["dp is -2", "at least 1"]),
        ("!!1,1,8", ["dp is '!1'"]),
        ("auto", ["planner", "1,-1,1"]),
    ],
)
def test_a_bad_mesh_is_refused_in_one_line_that_says_why(text: str, words: list[str]) -> None:
    with pytest.raises(MeshError) as caught:
        resolve_mesh(text, "train", jax.devices())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("size", [0, -2, 2.0, "2", None])
def test_a_size_that_no_axis_can_have_is_refused_in_python_too(size: Any) -> None:
    with pytest.raises(MeshError, match=f"the size of tp is {size!r}; give -1 or at least 1"):
        MeshSpec(tp=size)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("-1,1,2", "dp:4,fsdp:1,tp:2"),
        ("dp=2,fsdp=2,tp=2", "dp:2,fsdp:2,tp:2"),
        ("1,-1,1", "dp:1,fsdp:8,tp:1"),
        ("mp:8", "dp:1,fsdp:1,tp:8"),
        ("tp:8,fsdp:-1", "dp:1,fsdp:1,tp:8"),
    ],
)
def test_a_good_mesh_prints_its_resolved_sizes_by_name(text: str, printed: str) -> None:
    assert str(resolve_mesh(text, "train", jax.devices())) == printed


def test_without_a_mesh_training_is_all_fsdp_and_the_rest_all_tp() -> None:
    assert resolve_mesh(None, "train", jax.devices()) == MeshSpec(1, 8, 1)
    assert resolve_mesh(None, "generate", jax.devices()) == MeshSpec(1, 1, 8)
    assert default_mesh("train").resolve(1) == default_mesh("score").resolve(1) == MeshSpec(1, 1, 1)


SIZES = st.integers(1, 12)


@given(SIZES, SIZES, SIZES, st.sampled_from([None, "dp", "fsdp", "tp"]), st.integers(1, 64))
def test_resolving_takes_exactly_all_devices_or_names_meshes_that_do(
    dp: int, fsdp: int, tp: int, inferred: str | None, devices: int
) -> None:
    sizes = {"dp": dp, "fsdp": fsdp, "tp": tp} | ({inferred: -1} if inferred else {})
    known = math.prod(size for size in sizes.values() if size > 0)
    fits = devices % known == 0 if inferred else devices == known
    spec = MeshSpec(**sizes)
    if fits:
        resolved = spec.resolve(devices)
        assert resolved.num_devices == devices
        assert all(resolved.sizes[axis] == size for axis, size in sizes.items() if size > 0)
        return
    with pytest.raises(MeshError) as caught:
        spec.resolve(devices, "cpu")
    message = str(caught.value)
    offered = message.split("meshes that fit: ")[1].split(";")[0].split(" or ")
    assert 1 <= len(offered) <= 3
    assert all(MeshSpec.parse(text).resolve(devices).num_devices == devices for text in offered)
    # The command that the message gives must work.
    count = int(message.split("--devices cpu:")[1])
    assert spec.resolve(count).num_devices == count


def test_the_nearest_mesh_comes_first() -> None:
    assert "fit: dp:1,fsdp:4,tp:2 or" in refusal("1,3,2")
    assert "fit: dp:2,fsdp:4,tp:1 or" in refusal("2,3,1")
    assert "fit: dp:1,fsdp:1,tp:8 or" in refusal("1,1,16")
    assert "fit: dp:2,fsdp:2,tp:2 or dp:4,fsdp:1,tp:2 or dp:4,fsdp:2,tp:1;" in refusal("4,2,2")
    assert "meshes that fit: dp:1,fsdp:1,tp:1" in refusal("1,1,2", 1)


def test_the_hint_at_fake_devices_counts_those_that_an_inferred_axis_can_take() -> None:
    assert refusal("3,-1,1").endswith("--devices cpu:6")
    assert refusal("1,-1,16").endswith("--devices cpu:16")
    assert refusal("2,2,4").endswith("--devices cpu:16")
    assert refusal("2,2,1").endswith("--devices cpu:4")


def test_fake_devices_are_offered_to_owners_of_accelerators_only_where_theirs_are_too_few() -> None:
    assert "--devices" not in refusal("2,2,1", 8, "gpu")
    assert refusal("4,4,1", 8, "tpu").endswith("--devices cpu:16")


def test_one_device_is_not_called_devices() -> None:
    assert "there are 1 gpu device;" in refusal("1,1,2", 1, "gpu")
    assert "there are 8 devices;" in refusal("1,1,2", 8, "")


@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 2, 2), (4, 1, 2), (-1, 2, 1)])
def test_the_device_mesh_has_the_named_axes_and_every_device_once(sizes: tuple[int, int, int]) -> None:
    spec = MeshSpec(*sizes)
    mesh = build_mesh(spec)
    assert dict(mesh.shape) == spec.resolve(8).sizes
    assert {device.id for device in mesh.devices.flat} == {device.id for device in jax.devices()}
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def test_a_device_mesh_can_be_made_of_some_of_the_devices() -> None:
    mesh = build_mesh(MeshSpec(fsdp=2, tp=2), jax.devices()[4:])
    assert {device.id for device in mesh.devices.flat} == {device.id for device in jax.devices()[4:]}
    with pytest.raises(MeshError, match="needs 4 devices, but there are 3 cpu devices"):
        build_mesh(MeshSpec(fsdp=2, tp=2), jax.devices()[:3])


def test_the_network_between_slices_is_given_to_dp_first_then_fsdp_and_never_to_tp() -> None:
    assert over_slices(MeshSpec(4, 2, 2), 2) == ((2, 2, 2), (2, 1, 1))
    assert over_slices(MeshSpec(1, 8, 2), 2) == ((1, 4, 2), (1, 2, 1))
    with pytest.raises(MeshError, match="cannot span 2 slices: dp or fsdp must be a multiple of 2"):
        over_slices(MeshSpec(1, 1, 8), 2)
