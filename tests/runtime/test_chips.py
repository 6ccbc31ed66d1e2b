"""The table of chips: its numbers are those that their makers publish, and a user's file is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.runtime import peak
from shardwise.runtime.chips import Chip, Domain, Torus, chip_of_device, chips, find_chip

GIB = 2**30
# Of a chip, written down apart from the table: FLOP/s in bfloat16, int8 and float8 (None: none published),
# bytes of memory, bytes a second from it, one way over a link (TPU) or into the switch (GPU), and between
# slices or nodes. TPUs: Cloud TPU documentation, links by the scaling book. GPUs: NVIDIA data sheets, dense.
PUBLISHED = {
    "v4": (275e12, 275e12, None, 32 * GIB, 1200e9, 45e9, 6.25e9),
    "v5e": (197e12, 393e12, None, 16 * GIB, 819e9, 45e9, 3.125e9),
    "v5p": (459e12, 918e12, 459e12, 95 * GIB, 2765e9, 90e9, 6.25e9),
    "v6e": (918e12, 1836e12, 918e12, 32 * GIB, 1638e9, 90e9, 12.5e9),
    "tpu7x": (2307e12, None, 4614e12, 192 * GIB, 7380e9, 100e9, 12.5e9),
    "a100-40": (312e12, 624e12, None, 40 * GIB, 1555e9, 300e9, 25e9),
    "a100-80": (312e12, 624e12, None, 80 * GIB, 2039e9, 300e9, 25e9),
    "h100": (989e12, 1979e12, 1979e12, 80 * GIB, 3350e9, 450e9, 50e9),
    "h200": (989e12, 1979e12, 1979e12, 141 * GIB, 4800e9, 450e9, 50e9),
    "b200": (2250e12, 4500e12, 4500e12, 180 * GIB, 8000e9, 900e9, 50e9),
}
LARGEST_SLICE = {"v4": 4096, "v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216}


def numbers(chip: Chip) -> tuple[float | None, ...]:
    assert chip.fabric is not None
    return (
        *(chip.peak.get(dtype) for dtype in ("bfloat16", "int8", "float8")),
        chip.hbm, chip.bandwidth, chip.fabric.link, chip.scale_out,
    )  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_chip_has_the_published_numbers(name: str) -> None:
    assert numbers(find_chip(name)) == PUBLISHED[name]


def test_every_chip_but_the_processor_has_published_numbers_here_and_all_say_where_theirs_are_from() -> None:
    assert set(chips()) == {*PUBLISHED, "cpu"}
    assert all(chip.source and chip.doubts for chip in chips().values())


@pytest.mark.parametrize(("name", "most"), LARGEST_SLICE.items())
def test_a_tpu_has_links_along_two_or_three_axes_and_a_largest_slice(name: str, most: int) -> None:
    torus = find_chip(name).fabric
    assert isinstance(torus, Torus)
    assert (torus.axes, torus.most_chips) == (2 if name in ("v5e", "v6e") else 3, most)


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100", "h200", "b200"])
def test_eight_gpus_share_a_switch(name: str) -> None:
    fabric = find_chip(name).fabric
    assert isinstance(fabric, Domain) and fabric.size == 8


def test_a_jax_device_is_half_of_a_tpu7x_and_the_whole_of_any_other_chip() -> None:
    assert {name: chip.devices for name, chip in chips().items() if chip.devices != 1} == {"tpu7x": 2}
    half = find_chip("tpu7x")
    assert half.flops("bfloat16") == 1153.5e12
    assert half.flops("float8") == 2307e12
    assert half.memory_bandwidth == 3690e9
    assert half.ring == 100e9  # both links of an axis, 200 GB/s, for two devices


def test_a_ring_sends_both_ways_along_an_axis_of_a_torus_and_one_way_into_a_switch() -> None:
    assert (find_chip("v5p").ring, find_chip("h100").ring) == (180e9, 450e9)


def test_a_product_that_a_chip_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        ConfigError, match="a100-80 has no rate for products in float8; it has float32, bfloat16"
    ):
        find_chip("a100-80").flops("float8")


@pytest.mark.parametrize(
    ("alias", "name"),
    {
        "v5litepod": "v5e", "trillium": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x", "a100": "a100-80",
        "H100-SXM": "h100", "V5P": "v5p",
    }.items(),
)  # fmt: skip
def test_chips_are_found_by_their_other_names_in_any_case(alias: str, name: str) -> None:
    assert find_chip(alias).name == name


@pytest.mark.parametrize(("typo", "near"), {"h10": "h100", "v5": "v5e", "tpu7": "tpu7x", "iron": ""}.items())
def test_an_unknown_chip_is_refused_with_the_nearest_and_all_known(typo: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_chip(typo)
    assert near in str(caught.value) and str(caught.value).endswith(f"(known: {', '.join(chips())})")


@pytest.mark.parametrize(
    ("kind", "name"),
    {
        "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
        "TPU7x": "tpu7x", "NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
    }.items(),
)  # fmt: skip
def test_a_chip_is_known_by_what_jax_calls_its_devices(kind: str, name: str) -> None:
    found = chip_of_device(kind, "tpu" if kind.startswith("TPU") else "gpu")
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "kind", ["TPU v3", "TPU v4 lite", "NVIDIA H20", "NVIDIA GB200", "AMD Instinct MI300X"]
)
def test_a_device_that_the_table_lacks_is_no_other_chip(kind: str) -> None:
    assert chip_of_device(kind, "tpu" if kind.startswith("TPU") else "gpu") is None


@pytest.mark.parametrize(("kind", "name"), {"TPU v5": "v5p", "TPU7x": "tpu7x", "NVIDIA H200": "h200"}.items())
def test_utilisation_is_measured_against_the_tables_rate_of_a_device(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Device:
        device_kind = kind
        platform = "tpu" if kind.startswith("TPU") else "gpu"

    peak.peak_flops.cache_clear()
    monkeypatch.setattr("jax.devices", lambda: [Device()] * 16)
    monkeypatch.setattr("jax.device_count", lambda: 16)
    try:
        flops, words = peak.peak_flops("bfloat16")
    finally:
        peak.peak_flops.cache_clear()
    assert flops == 16 * PUBLISHED[name][0] / find_chip(name).devices  # type: ignore[operator]
    assert words == f"16 × {kind}, bfloat16 peak"


# --- a user's file


def write(folder: Path, text: str) -> str:
    path = folder / "chips.yaml"
    path.write_text(text)
    return str(path)


def test_a_users_chip_takes_from_a_known_one_what_it_does_not_say(tmp_path: Path) -> None:
    own = write(
        tmp_path,
        "h100-pcie:\n  like: h100\n  hbm_gbs: 2000\n  peak_tflops: {bfloat16: 756}\n  domain: {size: 2}\n",
    )
    found, base = find_chip("h100-pcie", own), find_chip("h100")
    assert isinstance(found.fabric, Domain)
    assert (found.bandwidth, found.flops("bfloat16"), found.fabric.size) == (2000e9, 756e12, 2)
    assert (found.hbm, found.flops("float8"), found.fabric.link) == (base.hbm, 1979e12, 450e9)
    assert find_chip("h100", own) == base
    assert chip_of_device("NVIDIA H100 PCIe", "gpu") == base  # JAX's names of the known chip stay its own


def test_a_users_chip_may_be_all_its_own_or_replace_a_known_one(tmp_path: Path) -> None:
    own = write(
        tmp_path,
        "v9:\n  kind: tpu\n  peak_tflops: {bfloat16: 5000}\n  hbm_gib: 288\n  hbm_gbs: 10000\n"
        "  torus: {axes: 3, link_gbs: 150, wraps_from: 4, most_chips: 1024, cores_per_chip: 1,\n"
        "    slices: [2x2x1]}\n"
        "  scale_out_gbs: 25\n  latency_us: [1, 20]\n"
        "v5p: {like: v5p, hbm_gib: 96}\n",
    )
    assert find_chip("v9", own).flops("bfloat16") == 5e15
    assert find_chip("v5p", own).hbm == 96 * GIB
    assert find_chip("v5p").hbm == 95 * GIB


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "x: {like: h100, hbm_gb: 96}": "x has the unknown key 'hbm_gb'; did you mean hbm_gib?",
        "x: {like: h100, domain: {sise: 4}}": "x.domain has the unknown key 'sise'; did you mean size?",
        "x: {like: h100, peak_tflops: {bf16: 1}}": "x.peak_tflops has the unknown key 'bf16'",
        "x: {like: h1000}": "x.like is 'h1000'; known: v4",
        "x: {like: [h100]}": "x.like is ['h100']; known: v4",
        "x: {kind: gpu}": "x lacks peak_tflops, hbm_gib, hbm_gbs, scale_out_gbs, latency_us; give them, or",
        "x: {like: h100, hbm_gbs: fast}": "x.hbm_gbs is 'fast'; it must be a number above 0",
        "x: {like: h100, hbm_gib: -1}": "x.hbm_gib is -1; it must be a number above 0",
        "x: {like: h100, hbm_gib: null}": "x.hbm_gib is None; it must be a number above 0",
        "x: {like: h100, hbm_gbs: .inf}": "x.hbm_gbs is inf; it must be a number above 0",
        "x: {like: h100, devices: 0}": "x.devices is 0; it must be a whole number from 1",
        "x: {like: h100, domain: {size: 7.5}}": "x.domain.size is 7.5; it must be a whole number from 1",
        "x: {like: h100, also: hopper}": "x.also is 'hopper'; it must be a list of names in []",
        "x: {like: h100, latency_us: 3}": "x.latency_us is 3; it must be two numbers in []",
        "x: {like: h100, kind: tpu}": "x has a domain, which belongs to kind gpu, and is a tpu",
        "x: {like: h100, kind: npu}": "x.kind is 'npu'; it must be tpu, gpu or cpu",
        "x: {like: v5p, torus: {axes: 4}}": "x.torus.axes is 4; it must be 2 or 3",
        "x: {like: v5p, torus: {axes: 2}}": "x.torus.slices is",
        "x: {like: v5p, torus: {slices: 4x4x4}}": "it must be a list of shapes of 3 axes, such as 2x2x2",
        "My Chip: {like: h100}": "the name 'My Chip' could not be given to --on; use small letters",
        "- h100": "must map names of chips to their numbers",
        "x: 3": "must map names of chips to their numbers",
        "x: [": "is not YAML",
        "": "must map names of chips to their numbers",
    }.items(),
)
def test_a_mistake_in_a_users_file_is_one_line_with_the_fix(tmp_path: Path, text: str, said: str) -> None:
    own = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        chips(own)
    message = str(caught.value)
    assert said in message and own in message and "\n" not in message


def test_a_users_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml cannot be read"):
        chips("nowhere.yaml")
