"""What chips can do: the table in chips.yaml, and a user's own file of the same form.

Not here: how chips are put together (planner/hardware.py) and what is predicted from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from shardwise.errors import ConfigError

Kind = Literal["tpu", "gpu", "cpu"]
_DTYPES = ("float64", "float32", "bfloat16", "int8", "float8")


@dataclass(frozen=True)
class Torus:
    """A TPU's interconnect: links to its neighbours along each axis."""

    axes: int
    """2 or 3."""
    link: float
    """Bytes a second over one link, one way."""
    wraps_from: int
    """A 3-D slice wraps where all its dims are multiples of this; an axis of a 2-D one if it is this long."""
    most_chips: int
    """In one slice."""
    cores_per_chip: int
    """TensorCores; where there are two, names such as v5p-128 count them instead of chips."""
    slices: tuple[tuple[int, ...], ...]
    """Shapes that Google's tables list, spelled as there; a 3-D torus has boxes of 4×4×4 cubes besides."""


@dataclass(frozen=True)
class Domain:
    """GPUs that share a switch."""

    size: int
    """GPUs."""
    link: float
    """Bytes a second from one GPU into the switch, one way."""


@dataclass(frozen=True)
class Chip:
    """One chip; `per_device` gives what one JAX device has of it."""

    name: str
    kind: Kind
    peak: Mapping[str, float]
    """Dense products, FLOP/s (of int8: operations a second), by the inputs' dtype."""
    hbm: float | None
    """Bytes of memory; None for a CPU, which uses the host's."""
    bandwidth: float
    """Bytes a second from memory."""
    fabric: Torus | Domain | None
    """The fast network; None for a CPU."""
    scale_out: float
    """Bytes a second of one chip, one way, between slices or nodes."""
    latency: float
    """Seconds of one hop in the fast network."""
    scale_out_latency: float
    """Seconds of one hop between slices or nodes."""
    devices: int
    """JAX devices in one chip."""
    source: str
    doubts: str
    """Where sources disagree, or say nothing."""
    also: tuple[str, ...] = ()
    """Other names."""
    kinds: tuple[str, ...] = ()
    """JAX's `device_kind`; of a GPU, how it begins."""

    def flops(self, dtype: str) -> float:
        """Peak of one JAX device for products of this dtype, FLOP/s.

        Raises:
            ConfigError: the chip has no such products.
        """
        if dtype not in self.peak:
            raise ConfigError(
                f"{self.name} has no rate for products in {dtype}; it has {', '.join(self.peak)}"
            )
        return self.peak[dtype] / self.devices

    @property
    def memory_bandwidth(self) -> float:
        """Bytes a second of one JAX device from its memory."""
        return self.bandwidth / self.devices

    @property
    def ring(self) -> float:
        """Bytes a second that one JAX device sends in a ring along one axis of the fast network."""
        if isinstance(self.fabric, Torus):
            return 2 * self.fabric.link / self.devices
        return self.fabric.link if self.fabric is not None else self.scale_out


@lru_cache(maxsize=8)
def chips(extra: str | None = None) -> dict[str, Chip]:
    """All known chips by name.

    Args:
        extra: a YAML file of more, in the form of chips.yaml; an entry with `like: NAME` takes from that chip
            what it does not say itself. Its names win.

    Raises:
        ConfigError: the file cannot be read or says something unknown.
    """
    import yaml

    table = yaml.safe_load(resources.files("shardwise.runtime").joinpath("chips.yaml").read_text("utf-8"))
    if extra is not None:
        try:
            own = yaml.safe_load(Path(extra).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chips: {extra} cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"chips: {extra} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(own, dict) or not all(isinstance(entry, dict) for entry in own.values()):
            raise ConfigError(f"chips: {extra} must map names of chips to their numbers")
        for name, entry in own.items():
            table[str(name)] = _completed(str(name), entry, table, extra)
    return {name: _chip(name, entry, extra or "chips.yaml") for name, entry in table.items()}


def find_chip(name: str, extra: str | None = None) -> Chip:
    """A chip by one of its names, in any case.

    Raises:
        ConfigError: unknown; gives the nearest.
    """
    known = chips(extra)
    names = {alias.lower(): chip for chip in known.values() for alias in (*chip.also, chip.name)}
    found = names.get(name.strip().lower())
    if found is None:
        near = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown chip {name!r}{hint} (known: {', '.join(known)})")
    return found


def chip_of_device(device_kind: str, platform: str) -> Chip | None:
    """The chip of a JAX device; None where the table has none."""
    kinds = [
        (kind, chip)
        for chip in chips().values()
        for kind in chip.kinds
        # a longer name is another TPU (`TPU v4 lite`), but the same GPU (`NVIDIA H100 80GB HBM3`)
        if device_kind == kind or (chip.kind == "gpu" and device_kind.startswith(kind))
    ]
    if kinds:
        return max(kinds, key=lambda item: len(item[0]))[1]
    return chips()["cpu"] if platform == "cpu" else None


_KEYS = (
    "kind", "also", "peak_tflops", "hbm_gib", "hbm_gbs", "torus", "domain", "scale_out_gbs", "latency_us",
    "devices", "kinds", "source", "doubts",
)  # fmt: skip
_NEEDED = ("kind", "peak_tflops", "hbm_gib", "hbm_gbs", "scale_out_gbs", "latency_us")
_TORUS = ("axes", "link_gbs", "wraps_from", "most_chips", "cores_per_chip", "slices")
_DOMAIN = ("size", "nvlink_gbs")


def _completed(name: str, entry: dict[str, Any], table: dict[str, Any], where: str) -> dict[str, Any]:
    """An entry with what it takes from the chip that it is like; tables in it are completed too."""
    if "like" not in entry:
        return entry
    like = entry["like"]
    if not isinstance(like, str) or like not in table:
        raise ConfigError(f"chips: {where}: {name}.like is {like!r}; known: {', '.join(table)}")
    whole = {k: v for k, v in table[like].items() if k not in ("also", "kinds")}
    for key, value in entry.items():
        if key == "like":
            continue
        inner = isinstance(value, dict) and isinstance(whole.get(key), dict)
        whole[key] = whole[key] | value if inner else value
    return whole


@dataclass(frozen=True)
class _Reader:
    """The values of one entry, checked; `where` names it in messages."""

    entry: dict[str, Any]
    where: str

    def fail(self, key: str, value: Any, must: str) -> NoReturn:
        raise ConfigError(f"chips: {self.where}.{key} is {value!r}; it must be {must}")

    def number(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self.fail(key, value, "a number above 0")
        return float(value)

    def whole(self, value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(key, value, "a whole number from 1")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        found = self.entry.get(key, [])
        if not isinstance(found, list):
            self.fail(key, found, "a list of names in []")
        return tuple(map(str, found))

    def table(self, key: str, keys: tuple[str, ...], partial: bool = False) -> dict[str, Any]:
        if key not in self.entry:
            raise ConfigError(f"chips: {self.where} lacks {key} with {', '.join(keys)}")
        found = self.entry[key]
        if not isinstance(found, dict):
            self.fail(key, found, f"a table of {', '.join(keys)}")
        _refuse_unknown(found, keys, f"{self.where}.{key}")
        if not partial and (missing := [k for k in keys if k not in found]):
            raise ConfigError(f"chips: {self.where}.{key} lacks {', '.join(missing)}")
        return found

    def torus(self) -> Torus:
        t = self.table("torus", _TORUS)
        axes = self.whole(t["axes"], "torus.axes")
        if axes not in (2, 3):
            self.fail("torus.axes", axes, "2 or 3")
        texts = t["slices"] if isinstance(t["slices"], list) else []
        shapes = [re.fullmatch("x".join(["([1-9][0-9]*)"] * axes), str(text)) for text in texts]
        if None in shapes or not shapes:
            self.fail(
                "torus.slices",
                t["slices"],
                f"a list of shapes of {axes} axes, such as {'x'.join('2' * axes)}",
            )
        wraps, most, cores = (
            self.whole(t[key], f"torus.{key}") for key in ("wraps_from", "most_chips", "cores_per_chip")
        )
        slices = tuple(tuple(map(int, shape.groups())) for shape in shapes if shape)
        return Torus(axes, self.number(t["link_gbs"], "torus.link_gbs") * 1e9, wraps, most, cores, slices)

    def domain(self) -> Domain:
        d = self.table("domain", _DOMAIN)
        size = self.whole(d["size"], "domain.size")
        return Domain(size, self.number(d["nvlink_gbs"], "domain.nvlink_gbs") * 1e9)


def _chip(name: str, entry: dict[str, Any], where: str) -> Chip:
    read = _Reader(entry, f"{where}: {name}")
    if not re.fullmatch(r"[a-z][a-z0-9._-]*", name):
        raise ConfigError(
            f"chips: {where}: the name {name!r} could not be given to --on; use small letters, digits, - . _"
        )
    _refuse_unknown(entry, _KEYS, read.where)
    if missing := [key for key in _NEEDED if key not in entry]:
        raise ConfigError(
            f"chips: {read.where} lacks {', '.join(missing)}; give them, or start from another chip with"
            " `like: NAME`"
        )
    kind, hbm, latency = entry["kind"], entry["hbm_gib"], entry["latency_us"]
    if kind not in get_args(Kind):
        read.fail("kind", kind, "tpu, gpu or cpu")
    for key, of in (("torus", "tpu"), ("domain", "gpu")):
        if key in entry and kind != of:
            raise ConfigError(f"chips: {read.where} has a {key}, which belongs to kind {of}, and is a {kind}")
    if not isinstance(latency, list) or len(latency) != 2:
        read.fail("latency_us", latency, "two numbers in []: in the fast network, and beyond it")
    near, far = (read.number(value, "latency_us") * 1e-6 for value in latency)
    peak = read.table("peak_tflops", _DTYPES, partial=True)
    return Chip(
        name=name,
        kind=kind,
        peak={k: read.number(v, f"peak_tflops.{k}") * 1e12 for k, v in peak.items()},
        # what a CPU's devices have is known only on the machine
        hbm=None if hbm is None and kind == "cpu" else read.number(hbm, "hbm_gib") * 2**30,
        bandwidth=read.number(entry["hbm_gbs"], "hbm_gbs") * 1e9,
        fabric=read.torus() if kind == "tpu" else read.domain() if kind == "gpu" else None,
        scale_out=read.number(entry["scale_out_gbs"], "scale_out_gbs") * 1e9,
        latency=near,
        scale_out_latency=far,
        devices=read.whole(entry.get("devices", 1), "devices"),
        source=str(entry.get("source", where)),
        doubts=str(entry.get("doubts", "")),
        also=read.texts("also"),
        kinds=read.texts("kinds"),
    )


def _refuse_unknown(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in found:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"chips: {where} has the unknown key {key!r}{hint}")
