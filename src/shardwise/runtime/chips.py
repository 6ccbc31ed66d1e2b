"""What chips can do: the table in chips.yaml, and a user's own file of the same form.

Not here: how chips are put together (planner/hardware.py) and what is predicted from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

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
    """How JAX's `device_kind` begins."""

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
        near = get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown chip {name!r}{hint} Known: {', '.join(known)}")
    return found


def chip_of_device(device_kind: str, platform: str) -> Chip | None:
    """The chip of a JAX device; None where the table has none."""
    kinds = [(kind, chip) for chip in chips().values() for kind in chip.kinds if device_kind.startswith(kind)]
    if kinds:
        return max(kinds, key=lambda item: len(item[0]))[1]
    return chips()["cpu"] if platform == "cpu" else None


_KEYS = (
    "kind", "also", "peak_tflops", "hbm_gib", "hbm_gbs", "torus", "domain", "scale_out_gbs", "latency_us",
    "devices", "kinds", "source", "doubts",
)  # fmt: skip
_TORUS = ("axes", "link_gbs", "wraps_from", "most_chips", "cores_per_chip")
_DOMAIN = ("size", "nvlink_gbs")


def _completed(name: str, entry: dict[str, Any], table: dict[str, Any], where: str) -> dict[str, Any]:
    if "like" not in entry:
        return entry
    if entry["like"] not in table:
        raise ConfigError(f"chips: {where}: {name}.like is {entry['like']!r}; known: {', '.join(table)}")
    base = {k: v for k, v in table[entry["like"]].items() if k not in ("also", "kinds")}
    return base | {k: v for k, v in entry.items() if k != "like"}


def _chip(name: str, entry: dict[str, Any], where: str) -> Chip:
    def number(value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"chips: {where}: {name}.{key} is {value!r}; it must be a number above 0")
        return float(value)

    def table(key: str, keys: tuple[str, ...], partial: bool = False) -> dict[str, float]:
        found = entry[key]
        if not isinstance(found, dict):
            raise ConfigError(f"chips: {where}: {name}.{key} is {found!r}; it must map {', '.join(keys)}")
        _refuse_unknown(found, keys, f"{where}: {name}.{key}")
        missing = [k for k in keys if k not in found]
        if missing and not partial:
            raise ConfigError(f"chips: {where}: {name}.{key} lacks {', '.join(missing)}")
        return {k: number(v, f"{key}.{k}") for k, v in found.items()}

    _refuse_unknown(entry, _KEYS, f"{where}: {name}")
    needed = ("kind", "peak_tflops", "hbm_gib", "hbm_gbs", "scale_out_gbs", "latency_us")
    if missing := [key for key in needed if key not in entry]:
        raise ConfigError(
            f"chips: {where}: {name} lacks {', '.join(missing)}; give them, or start from another chip with"
            " `like: NAME`"
        )
    if entry["kind"] not in get_args(Kind):
        raise ConfigError(f"chips: {where}: {name}.kind is {entry['kind']!r}; it must be tpu, gpu or cpu")
    fabric: Torus | Domain | None = None
    if entry["kind"] == "tpu":
        t = table("torus", _TORUS) if "torus" in entry else _lacking(name, "torus", where)
        fabric = Torus(
            int(t["axes"]), t["link_gbs"] * 1e9, int(t["wraps_from"]), int(t["most_chips"]),
            int(t["cores_per_chip"]),
        )  # fmt: skip
    elif entry["kind"] == "gpu":
        d = table("domain", _DOMAIN) if "domain" in entry else _lacking(name, "domain", where)
        fabric = Domain(int(d["size"]), d["nvlink_gbs"] * 1e9)
    latency = entry["latency_us"]
    if not isinstance(latency, list) or len(latency) != 2:
        raise ConfigError(f"chips: {where}: {name}.latency_us is {latency!r}; it must be two numbers")
    near, far = (number(value, "latency_us") * 1e-6 for value in latency)
    hbm = entry["hbm_gib"]
    return Chip(
        name=name,
        kind=entry["kind"],
        peak={k: v * 1e12 for k, v in table("peak_tflops", _DTYPES, partial=True).items()},
        hbm=None if hbm is None else number(hbm, "hbm_gib") * 2**30,
        bandwidth=number(entry["hbm_gbs"], "hbm_gbs") * 1e9,
        fabric=fabric,
        scale_out=number(entry["scale_out_gbs"], "scale_out_gbs") * 1e9,
        latency=near,
        scale_out_latency=far,
        devices=int(number(entry.get("devices", 1), "devices")),
        source=str(entry.get("source", where)),
        doubts=str(entry.get("doubts", "")),
        also=tuple(map(str, entry.get("also", ()))),
        kinds=tuple(map(str, entry.get("kinds", ()))),
    )


def _lacking(name: str, key: str, where: str) -> dict[str, float]:
    raise ConfigError(f"chips: {where}: {name} lacks {key}")


def _refuse_unknown(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in found:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"chips: {where} has the unknown key {key!r}{hint}")
