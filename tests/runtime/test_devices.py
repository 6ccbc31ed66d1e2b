"""Devices are chosen before JAX starts, wrong choices refused, an unused accelerator pointed out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.runtime import devices
from shardwise.runtime.devices import DeviceSpec, accelerator_hint, configure_devices, parse_devices


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, in which JAX has not started."""
    source = str(Path(devices.__file__).parents[2])
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=inherited | {"PYTHONPATH": source} | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("cpu", DeviceSpec("cpu")),
        ("cpu:8", DeviceSpec("cpu", 8)),
        ("GPU", DeviceSpec("gpu")),
        ("tpu", DeviceSpec("tpu")),
    ],
)
def test_known_specs_are_read(text: str, spec: DeviceSpec) -> None:
    assert parse_devices(text) == spec


@pytest.mark.parametrize(
    "text", ["cpu:0", "cpu:x", "cpu:-1", "cpu:", "cpu:1.5", "cpu:²", "banana:3", "gpu:2", "", ":4"]
)
def test_wrong_specs_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: cpu, cpu:N") as caught:
        parse_devices(text)
    assert f"'{text}'" in str(caught.value)


def test_more_simulated_devices_than_cores_start_with_patient_collectives() -> None:
    code = """
import os
from shardwise.runtime.devices import configure_devices
configure_devices("cpu:64")
import jax
assert jax.device_count() == 64 and jax.default_backend() == "cpu"
assert "--xla_cpu_collective_call_terminate_timeout_seconds=77" in os.environ["XLA_FLAGS"]
assert os.environ["XLA_FLAGS"].count("terminate_timeout") == 1
assert "--xla_cpu_collective_call_warn_stuck_timeout_seconds=" in os.environ["XLA_FLAGS"]
configure_devices("cpu:64")
configure_devices("cpu")
"""
    done = run_python(code, XLA_FLAGS="--xla_cpu_collective_call_terminate_timeout_seconds=77")
    assert done.returncode == 0, done.stderr


def test_none_leaves_jax_alone() -> None:
    code = """
import os, sys
from shardwise.runtime.devices import configure_devices
configure_devices(None)
assert "jax" not in sys.modules and "XLA_FLAGS" not in os.environ
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_backend_that_runs_already_is_not_silently_kept() -> None:
    # tests/conftest.py started JAX with eight devices.
    configure_devices("cpu:8")
    import jax

    assert jax.device_count() == 8
    with pytest.raises(ConfigError, match="JAX runs on 8 cpu devices already"):
        configure_devices("cpu:4")
    with pytest.raises(ConfigError, match="already"):
        configure_devices("tpu")


@pytest.mark.parametrize(("spec", "extra"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_an_accelerator_without_its_plugin_is_refused_with_the_extra(
    spec: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_backend_is_up", lambda: False)
    monkeypatch.setattr(devices, "_has_module", lambda name: False)
    with pytest.raises(ConfigError, match=rf"pip install 'shardwise\[{extra}\]'"):
        configure_devices(spec)


def _nvidia(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()


def _nvidia_driver(root: Path) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").touch()


def _tpu(root: Path) -> None:
    (root / "dev").mkdir()
    (root / "dev/accel0").touch()


def _tpu_vfio(root: Path, vendor: str = "0x1ae0") -> None:
    (root / "dev/vfio").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:00:04.0").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:00:04.0/vendor").write_text(vendor + "\n")


@pytest.mark.parametrize(
    ("machine", "extra"), [(_nvidia, "cuda"), (_nvidia_driver, "cuda"), (_tpu, "tpu"), (_tpu_vfio, "tpu")]
)
def test_an_accelerator_that_jax_cannot_use_gives_a_hint(machine, extra: str, tmp_path: Path) -> None:
    machine(tmp_path)
    hint = accelerator_hint(root=tmp_path, environ={}, has_module=lambda name: False)
    assert hint is not None
    assert f"pip install 'shardwise[{extra}]'" in hint


def test_no_hint_without_accelerator_with_its_plugin_or_if_the_processor_was_asked_for(
    tmp_path: Path,
) -> None:
    assert accelerator_hint(root=tmp_path, environ={}, has_module=lambda name: False) is None
    _nvidia(tmp_path)
    assert accelerator_hint(root=tmp_path, environ={}, has_module=lambda n: n == "jax_cuda12_plugin") is None
    environ = {"JAX_PLATFORMS": "cpu"}
    assert accelerator_hint(root=tmp_path, environ=environ, has_module=lambda name: False) is None


def test_another_vendors_card_behind_vfio_is_no_tpu_unless_the_environment_says_so(tmp_path: Path) -> None:
    _tpu_vfio(tmp_path, vendor="0x8086")
    assert accelerator_hint(root=tmp_path, environ={}, has_module=lambda name: False) is None
    environ = {"TPU_WORKER_ID": "0"}
    assert accelerator_hint(root=tmp_path, environ=environ, has_module=lambda name: False) is not None
