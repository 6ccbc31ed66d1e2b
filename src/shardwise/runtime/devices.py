"""Which devices JAX uses, chosen before it starts, simulated ones too; a hint at an unused accelerator.

Not here: meshes over the devices (partition/mesh.py). JAX is imported only inside functions.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.errors import ConfigError

Platform = Literal["cpu", "gpu", "tpu"]

_PLATFORMS: dict[str, Platform] = {"cpu": "cpu", "gpu": "gpu", "tpu": "tpu"}
_ALLOWED = "allowed: cpu, cpu:N (N simulated devices, N from 1), gpu, tpu"

# Simulated devices take turns on the cores, so a collective may wait long for its last participant; XLA would
# take that for a deadlock (after 40 s) and end the process.
_PATIENCE_FLAGS = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    "xla_cpu_collective_timeout_seconds": 1200,
}

_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_ROCM_PLUGINS = ("jax_rocm7_plugin", "jax_rocm60_plugin")
_PCI_VENDOR_GOOGLE = "0x1ae0"


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed `--devices`."""

    platform: Platform
    """The kind of device."""
    count: int | None = None
    """How many simulated devices; None: as many as there are (a processor is one)."""


def parse_devices(spec: str) -> DeviceSpec:
    """Reads `cpu`, `cpu:8`, `gpu` or `tpu`.

    Raises:
        ConfigError: for anything else.
    """
    name, colon, count = spec.strip().lower().partition(":")
    platform = _PLATFORMS.get(name)
    if platform is None:
        raise ConfigError(f"--devices '{spec}': no such kind of device; {_ALLOWED}")
    if not colon:
        return DeviceSpec(platform)
    if platform != "cpu":
        raise ConfigError(
            f"--devices '{spec}': only the processor can be simulated several times; {_ALLOWED}"
        )
    if not (count.isascii() and count.isdecimal() and int(count) > 0):
        raise ConfigError(f"--devices '{spec}': '{count}' is not a number of devices; {_ALLOWED}")
    return DeviceSpec(platform, int(count))


def configure_devices(spec: str | None) -> None:
    """Makes JAX use the devices that `spec` names; starts no backend itself.

    Args:
        spec: as for `parse_devices`; None leaves the choice to JAX (and JAX_PLATFORMS).
    Raises:
        ConfigError: for a spec that cannot be read, an accelerator that the installed JAX does not support,
            or if JAX runs on other devices already.
    """
    if spec is None:
        return
    wanted = parse_devices(spec)
    if _backend_is_up():
        _require_running(spec, wanted)
        return
    platforms = "cpu"
    if wanted.platform == "gpu":
        platforms = f"{_gpu_platform(spec)},cpu"
    elif wanted.platform == "tpu":
        if not _has_module("libtpu"):
            raise ConfigError(
                f"--devices '{spec}': JAX has no TPU support here; pip install 'shardwise[tpu]'"
            )
        platforms = "tpu,cpu"
    if wanted.count is not None and wanted.count > _cores():
        raise_collective_timeouts()
    import jax

    jax.config.update("jax_platforms", platforms)
    if wanted.count is not None:
        jax.config.update("jax_num_cpu_devices", wanted.count)


def raise_collective_timeouts(environ: MutableMapping[str, str] | None = None) -> None:
    """Adds flags to XLA_FLAGS with which collectives on simulated devices wait longer.

    A flag that the user has set keeps its value. Works only before JAX starts a backend.

    Args:
        environ: for tests; None is os.environ.
    """
    environ = os.environ if environ is None else environ
    flags = environ.get("XLA_FLAGS", "")
    present = {flag.partition("=")[0].lstrip("-") for flag in flags.split()}
    added = [f"--{name}={seconds}" for name, seconds in _PATIENCE_FLAGS.items() if name not in present]
    environ["XLA_FLAGS"] = " ".join([*flags.split(), *added])


def accelerator_hint(
    *,
    root: Path = Path("/"),
    environ: MutableMapping[str, str] | None = None,
    has_module: Callable[[str], bool] | None = None,
) -> str | None:
    """Says if this machine has a GPU or TPU that the installed JAX would silently leave unused.

    Args:
        root: for tests; where /dev, /proc and /sys are looked for.
        environ: for tests; None is os.environ.
        has_module: for tests; whether a module is installed.
    Returns:
        One line that names the extra to install, or None.
    """
    environ = os.environ if environ is None else environ
    has_module = _has_module if has_module is None else has_module
    if environ.get("JAX_PLATFORMS", "") not in ("", "cuda", "gpu", "tpu"):
        return None
    text = "this machine has {what}, but JAX runs on the processor only; pip install 'shardwise[{extra}]'"
    if _has_nvidia_gpu(root) and not any(map(has_module, _CUDA_PLUGINS)):
        return text.format(what="an NVIDIA GPU", extra="cuda")
    if _has_tpu(root, environ) and not has_module("libtpu"):
        return text.format(what="a TPU", extra="tpu")
    return None


def _has_nvidia_gpu(root: Path) -> bool:
    return (root / "dev/nvidia0").exists() or (root / "proc/driver/nvidia/version").exists()


def _has_tpu(root: Path, environ: MutableMapping[str, str]) -> bool:
    if (root / "dev/accel0").exists():
        return True
    # Newer TPU machines hand the chips out by VFIO, as they would any other PCI device.
    if not (root / "dev/vfio").is_dir():
        return False
    if "TPU_ACCELERATOR_TYPE" in environ or "TPU_WORKER_ID" in environ:
        return True
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(path.read_text(encoding="ascii").strip() == _PCI_VENDOR_GOOGLE for path in vendors)


def _gpu_platform(spec: str) -> str:
    if any(map(_has_module, _CUDA_PLUGINS)):
        return "cuda"
    if any(map(_has_module, _ROCM_PLUGINS)):
        return "rocm"
    raise ConfigError(f"--devices '{spec}': JAX has no GPU support here; pip install 'shardwise[cuda]'")


def running_processors() -> int:
    """How many (simulated) processors JAX runs on already; 0 if it has not started, or runs on others."""
    if not _backend_is_up():
        return 0
    import jax

    return jax.device_count() if jax.default_backend() == "cpu" else 0


def _backend_is_up() -> bool:
    """Whether JAX has started a backend, after which its devices are fixed."""
    if "jax" not in sys.modules:
        return False
    # JAX has no public question for this; asking for devices would itself start a backend.
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _require_running(spec: str, wanted: DeviceSpec) -> None:
    import jax

    platform, count = jax.default_backend(), jax.device_count()
    names = {"gpu": ("gpu", "cuda", "rocm")}.get(wanted.platform, (wanted.platform,))
    if platform not in names or wanted.count not in (None, count):
        raise ConfigError(
            f"--devices '{spec}': JAX runs on {count} {platform} device{'s' if count > 1 else ''} already; "
            "choose devices before anything uses JAX"
        )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
