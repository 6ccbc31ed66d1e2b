"""Every spelling of who takes part in a collective, and the mesh axes that it means."""

from __future__ import annotations

import pytest

from shardwise.planner.replica_groups import (
    expand_groups,
    expand_pairs,
    group_axes,
    pair_axes,
    varying_axes,
)

SIZES = {"dp": 2, "fsdp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0, 2}, {1, 3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh[a=2,b=4] {b}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=1,'c'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
    ],
)
def test_groups_are_expanded(text: str, groups: list[list[int]]) -> None:
    assert expand_groups(text, 8) == groups


def test_an_unknown_spelling_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown spelling: something"):
        expand_groups("something", 8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tp",)),
        ("{{2,0},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", ("dp",)),
        ("{{0,4,2,6},{1,3,5,7}}", ("dp", "fsdp")),
        ("{{0,1,4,5},{2,3,6,7}}", ("dp", "tp")),
        ("{}", ("dp", "fsdp", "tp")),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
        ("{{0,1}}", None),
    ],
)
def test_groups_are_told_as_mesh_axes(groups: str, axes: tuple[str, ...] | None) -> None:
    assert group_axes(expand_groups(groups, 8), SIZES) == axes


def test_axes_of_one_device_are_never_named() -> None:
    assert group_axes([[0, 1, 2, 3]], {"dp": 1, "fsdp": 4, "tp": 1}) == ("fsdp",)
    assert pair_axes([(0, 1), (1, 0)], {"dp": 1, "fsdp": 2, "tp": 1}) == ("fsdp",)


def test_a_permute_runs_over_the_axes_in_which_its_pairs_differ() -> None:
    pairs = expand_pairs("{{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}")
    assert pair_axes(pairs, SIZES) == ("fsdp",)
    assert pair_axes([(0, 3)], SIZES) == ("fsdp", "tp")
    assert pair_axes([(5, 5)], SIZES) == ()


def test_a_number_of_each_device_varies_along_axes() -> None:
    assert varying_axes([0, 0, 8, 8, 0, 0, 8, 8], SIZES) == ("fsdp",)
    assert varying_axes([0, 1, 2, 3, 0, 1, 2, 3], SIZES) == ("fsdp", "tp")
    assert varying_axes([7] * 8, SIZES) == ()
