"""`--on`: which machine a text names, what is said of the reading, and what is refused with the nearest."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.planner.make_chip_table import DOCS, written

from shardwise.errors import ConfigError
from shardwise.planner.hardware import System, local_system, parse_system, shapes
from shardwise.runtime.chips import find_chip

# text → chip, shape of a slice or node, how many of them, JAX devices
READ = {
    # Google's names: TensorCores of a v4, v5p and tpu7x, two a chip; chips of a v5e and v6e
    "v4-8": ("v4", (2, 2, 1), 1, 4),
    "v4-256": ("v4", (4, 4, 8), 1, 128),
    "v4-8192": ("v4", (16, 16, 16), 1, 4096),
    "v5p-8": ("v5p", (2, 2, 1), 1, 4),
    "v5p-128": ("v5p", (4, 4, 4), 1, 64),
    "v5p-512": ("v5p", (4, 8, 8), 1, 256),
    "v5p-12288": ("v5p", (16, 16, 24), 1, 6144),
    "v5e-1": ("v5e", (1, 1), 1, 1),
    "v5litepod-16": ("v5e", (4, 4), 1, 16),
    "v5e-256": ("v5e", (16, 16), 1, 256),
    "v6e-128": ("v6e", (8, 16), 1, 128),
    "trillium-8": ("v6e", (2, 4), 1, 8),
    "tpu7x-8": ("tpu7x", (2, 2, 1), 1, 8),
    "tpu7x-128": ("tpu7x", (4, 4, 4), 1, 128),
    "7x-128": ("tpu7x", (4, 4, 4), 1, 128),
    "2x7x:4x4x4": ("tpu7x", (4, 4, 4), 2, 256),
    "ironwood-18432": ("tpu7x", (16, 24, 24), 1, 18432),
    # a shape or a number of chips
    "v5p:4x4x4": ("v5p", (4, 4, 4), 1, 64),
    "V5P:4X4X4": ("v5p", (4, 4, 4), 1, 64),
    "v4:8x4x4": ("v4", (4, 4, 8), 1, 128),
    "v5e:16x8": ("v5e", (8, 16), 1, 128),
    "tpu7x:4x4x4": ("tpu7x", (4, 4, 4), 1, 128),
    "tpu7x:1x1x1": ("tpu7x", (1, 1, 1), 1, 2),
    "v5p:64": ("v5p", (4, 4, 4), 1, 64),
    "v6e:64": ("v6e", (8, 8), 1, 64),
    # several slices
    "2xv5e:16x16": ("v5e", (16, 16), 2, 512),
    "4xv5p-128": ("v5p", (4, 4, 4), 4, 256),
    "2xtpu7x-128": ("tpu7x", (4, 4, 4), 2, 256),
    # GPUs, in nodes of eight
    "h100:64": ("h100", (8,), 8, 64),
    "h100:8": ("h100", (8,), 1, 8),
    "h100:4": ("h100", (4,), 1, 4),
    "8xh100": ("h100", (8,), 1, 8),
    "8xh100x4": ("h100", (8,), 4, 32),
    "4xb200x2": ("b200", (4,), 2, 8),
    "a100:16": ("a100-80", (8,), 2, 16),
    "a100-40:16": ("a100-40", (8,), 2, 16),
    "a100-80": ("a100-80", (1,), 1, 1),
    "8xa100-80x2": ("a100-80", (8,), 2, 16),
    "h200": ("h200", (1,), 1, 1),
    "cpu:2": ("cpu", (2,), 1, 2),
    "cpu": ("cpu", (1,), 1, 1),
}


@pytest.mark.parametrize(("text", "expected"), READ.items())
def test_a_text_names_a_machine(text: str, expected: tuple[str, tuple[int, ...], int, int]) -> None:
    system, _ = parse_system(text)
    assert (system.chip.name, system.shape, system.slices, system.num_devices) == expected
    assert system.num_chips == math.prod(system.shape) * system.slices


@pytest.mark.parametrize(
    ("text", "notes"),
    {
        "v4-256": ("v4-256 counts TensorCores: 128 chips, 4x4x8",),
        "v5p-2": ("v5p-2 counts TensorCores: 1 chip, 1x1x1",),
        "4xv5p-128": ("v5p-128 counts TensorCores: 64 chips, 4x4x4",),
        "v5e-16": ("v5e-16 is a slice of 4x4",),
        "v5p:64": ("v5p:64 is a slice of 4x4x4",),
        "v5p:8x4x4": ("a slice of 8x4x4 is Google's 4x4x8, turned",),
        "trillium:4x4": ("trillium is read as v6e",),
        "a100:8": ("a100 is read as a100-80",),
        "8xh100x4": ("8xh100x4 is read as 4 nodes of 8 h100s, 32 in all",),
        "h100:4": ("h100:4 is part of one node of 8",),
        "h100": ("h100 names no number: one h100 alone",),
        # nothing to explain
        "v5p:4x4x4": (), "2xv5e:16x16": (), "h100:64": (), "8xh100": (), "cpu:2": (), "cpu": (), "v6e-1": (),
    }.items(),
)  # fmt: skip
def test_what_could_be_read_otherwise_is_said(text: str, notes: tuple[str, ...]) -> None:
    assert parse_system(text)[1] == notes


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "v5p-100": "no v5p slice has 100 TensorCores, at 2 a chip; nearest: v5p-64 (2x4x4, 32 chips), v5p-128"
        " (4x4x4, 64 chips), v5p-256 (4x4x8, 128 chips)",
        "v5p-7": "no v5p slice has 7 TensorCores, at 2 a chip; nearest: v5p-2 (1x1x1, 1 chip), v5p-8",
        "v4-16384": "no v4 slice has 16384 TensorCores, at 2 a chip; nearest:",
        "v5p-17920": "v5p-12288 (16x16x24, 6144 chips)",
        "v5e-512": "no v5e slice has 512 chips; nearest: v5e-64 (8x8, 64 chips), v5e-128 (8x16, 128 chips),"
        " v5e-256 (16x16, 256 chips)",
        "v5p:100": "no v5p slice has 100 chips; nearest: v5p:64 (4x4x4, 64 chips), v5p:128",
        "v5p:3x3x3": "v5p has no slice of 3x3x3; nearest: v5p:2x2x4, v5p:2x4x4, v5p:4x4x4",
        "v4:1x1x1": "v4 has no slice of 1x1x1; nearest: v4:2x2x1",
        "v5e:4x16": "v5e has no slice of 4x16; nearest: v5e:4x8, v5e:8x8, v5e:8x16",
        "v5p:4x4": "v5p has no slice of 4x4 (its torus has 3 axes); nearest:",
        "v6e:16x16x4": "v6e has no slice of 16x16x4 (its torus has 2 axes); nearest: v6e:8x8,",
        "v5p-128x4": "4 TPU slices are spelled 4xv5p-128",
        "h100:12": "12 h100s do not fill nodes of 8; take h100:8 or h100:16",
        "64xh100": "a node has 8 h100s that share a switch; for 64 of them give h100:64 or 8xh100x8",
        "2xh100:8": "counts twice; give h100:8, or 8xh100x4 for 4 nodes",
        "h100-64": "h100s are counted with a colon: h100:64",
        "h100:8x8": "h100s lie in nodes, not in a torus; give h100:N",
        "cpu-4": "cpus are counted with a colon: cpu:4",
        "2xcpu:4": "simulated devices are named cpu:8",
        "v8p-4": "unknown chip 'v8p'; did you mean v5p?",
        "v3-32": "unknown chip 'v3' (known: v4, v5e,",
        "0xv5p-128": "has a 0; every number must be at least 1",
        "h100:0": "has a 0; every number must be at least 1",
        "v5p-0": "has a 0; every number must be at least 1",
        **dict.fromkeys(("", "v5p:", "v5p:axb", "h100:-1", "h100:8:8", "8 x h100", "v5p-٣٢", "v5p-128,v5p"),
                        "cannot be read; name a machine such as v5p-128, v5p:4x4x4, 2xv5e:16x16, h100:64,"),
    }.items(),
)  # fmt: skip
def test_a_machine_that_does_not_exist_is_refused_in_a_line_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_system(text)
    message = str(caught.value)
    assert message.startswith(f"--on {text!r}") and said in message and "\n" not in message


# From the tables of Cloud TPU's documentation: TensorCores of a v5p slice and its shape.
V5P = {
    8: (2, 2, 1), 16: (2, 2, 2), 64: (2, 4, 4), 128: (4, 4, 4), 256: (4, 4, 8), 512: (4, 8, 8),
    1024: (8, 8, 8), 2048: (8, 8, 16), 4096: (8, 16, 16), 8192: (16, 16, 16), 12288: (16, 16, 24),
}  # fmt: skip


@pytest.mark.parametrize(("cores", "shape"), V5P.items())
def test_a_number_of_chips_means_the_shape_that_google_gives_it(cores: int, shape: tuple[int, ...]) -> None:
    assert parse_system(f"v5p-{cores}")[0].shape == shape


@pytest.mark.parametrize("name", ["v4", "v5p", "tpu7x"])
def test_a_three_dimensional_slice_is_small_or_of_whole_cubes_up_to_the_largest(name: str) -> None:
    found = shapes(find_chip(name))
    large = [shape for shape in found if math.prod(shape) >= 64]
    assert all(size % 4 == 0 for shape in large for size in shape)
    assert max(map(math.prod, found)) == {"v4": 4096, "v5p": 6144, "tpu7x": 9216}[name]
    assert len(set(found)) == len(found) and {(4, 4, 12), (8, 12, 16), (4, 4, 68)} <= set(found)


WRAPS = {
    # slices of 4x4x4 and larger are full tori, smaller ones do not wrap (Cloud TPU documentation, TPU v5p)
    "v4:2x4x4": (False, False, False),
    "v4:4x4x4": (True, True, True),
    "v5p:2x2x1": (False, False, False),
    "v5p:4x4x8": (True, True, True),
    "tpu7x:2x2x4": (False, False, False),
    "tpu7x:8x16x16": (True, True, True),
    # an axis of 16 wraps (the scaling book, chapter on TPUs)
    "v5e:8x8": (False, False),
    "v5e:8x16": (False, True),
    "v5e:16x16": (True, True),
    "v6e:4x8": (False, False),
    "v6e:16x16": (True, True),
    "h100:64": (False,),
    "cpu:4": (False,),
}


@pytest.mark.parametrize(("text", "wraps"), WRAPS.items())
def test_an_axis_closes_into_a_ring_by_its_chips_rule(text: str, wraps: tuple[bool, ...]) -> None:
    assert parse_system(text)[0].wraps == wraps


def test_a_tpu_slice_has_a_name_that_the_compiler_takes_and_others_have_none() -> None:
    # the compiler refuses 1x2x2, since a host has 2x2x1
    names = {
        text: parse_system(text)[0].topology for text in ("v4-8", "2xv5litepod-256", "v7x-8", "h100:8", "cpu")
    }
    assert list(names.values()) == ["v4:2x2x1", "v5e:16x16", "tpu7x:2x2x1", None, None]


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "v5p-128": "v5p, one slice of 4x4x4 = 64 chips",
        "2xtpu7x-8": "tpu7x, 2 slices of 2x2x1 = 4 chips, 8 in all, 16 JAX devices",
        "v6e-1": "v6e, one slice of 1x1 = 1 chip",
        "8xh100x4": "h100, 4 nodes of 8 GPUs, 32 in all",
        "h100": "h100, one node of 1 GPU",
        "cpu:2": "2 simulated devices on this processor",
    }.items(),
)
def test_a_machine_is_told_in_words(text: str, words: str) -> None:
    assert str(parse_system(text)[0]) == words


def test_a_device_of_a_tpu7x_has_half_its_chips_memory() -> None:
    gib = 2**30
    memory = {text: parse_system(text)[0].hbm for text in ("tpu7x-8", "v5p-8", "h100:8")}
    assert memory == {"tpu7x-8": 96 * gib, "v5p-8": 95 * gib, "h100:8": 80 * gib}


def test_simulated_devices_share_the_machines_memory_and_rates() -> None:
    one, four = (parse_system(text)[0] for text in ("cpu", "cpu:4"))
    assert one.hbm == 4 * four.hbm > 0
    assert (one.flops_share, four.flops_share) == (1.0, 0.25)
    assert parse_system("h100:8")[0].flops_share == 1.0


def test_a_users_chips_can_be_named(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("h100-pcie: {like: h100, domain: {size: 2}}\nv5p.next: {like: v5p}\n")
    assert parse_system("h100-pcie:8", str(own))[0].shape == (2,)
    assert parse_system("2xh100-pcie", str(own))[0].num_devices == 2
    assert parse_system("v5p.next-128", str(own))[0].shape == (4, 4, 4)
    with pytest.raises(ConfigError, match="unknown chip 'h100-pcie'; did you mean h100"):
        parse_system("h100-pcie:8")


def test_the_page_on_planning_holds_the_table_and_names_machines_that_exist() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.planner.make_chip_table writes it anew"
    named = re.findall(r"`((?:[0-9]+x)?(?:v[456]|tpu7x|h100|cpu)[a-z]*[-:x]?[0-9x]*)`", page)
    assert len(named) > 15
    for text in named:
        parse_system(text)


def test_a_users_file_on_the_page_is_one_that_can_be_read(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(DOCS.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0])
    assert parse_system("h100-pcie:4", str(own))[0].shape == (2,)
    assert find_chip("my-cluster", str(own)).scale_out == 6.25e9


# --- the devices that are there


def tpu(kind: str, shape: tuple[int, int, int], cores: int = 1, slices: int = 1) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            device_kind=kind, platform="tpu", coords=[x, y, z], core_on_chip=core, slice_index=index
        )
        for index in range(slices)
        for z in range(shape[2])
        for y in range(shape[1])
        for x in range(shape[0])
        for core in range(cores)
    ]


def gpus(kind: str, count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(device_kind=kind, platform="gpu") for _ in range(count)]


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (tpu("TPU v5", (2, 2, 1)), "v5p:2x2x1"),
        (tpu("TPU v5", (4, 4, 8)), "v5p:4x4x8"),
        (tpu("TPU v5 lite", (16, 8, 1)), "v5e:8x16"),
        (tpu("TPU v6 lite", (4, 4, 1), slices=2), "2xv6e:4x4"),
        (tpu("TPU7x", (2, 2, 1), cores=2), "tpu7x:2x2x1"),
        (gpus("NVIDIA H100 80GB HBM3", 8), "h100:8"),
    ],
)
def test_the_devices_that_are_there_are_a_machine(
    devices: list[SimpleNamespace], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.devices", lambda: devices)
    assert local_system() == parse_system(text)[0]


def test_simulated_devices_are_a_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    assert local_system() == System(find_chip("cpu"), (len(jax.devices()),))


@pytest.mark.parametrize("devices", [gpus("AMD Instinct MI300X", 8), tpu("TPU v5", (4, 4, 4))[:-1]])
def test_devices_that_are_no_known_machine_are_none(
    devices: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.devices", lambda: devices)
    assert local_system() is None
