"""What a device can do, for predicted times. A first few; sources beside the numbers.

Not here: predicting (predict.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak rates of one device and of its link to its neighbours."""

    name: str
    flops: float
    """Matrix products a second, bfloat16 (float32 on a CPU)."""
    memory: float
    """Bytes a second from its memory."""
    link: float
    """Bytes a second that one device sends in a ring."""
    latency: float
    """Seconds that a message takes to the next device, however small."""


DEVICES: dict[str, Device] = {
    # Google Cloud's page on v5p: 459 TFLOP/s, 2,765 GB/s, 4,800 Gbit/s of interconnect over 6 links; a ring
    # along one torus axis sends both ways. A microsecond a hop: the scaling book (jax-ml.github.io).
    "tpu": Device("TPU v5p", 459e12, 2765e9, 180e9, 1e-6),
    # NVIDIA's data sheet of the H100 SXM: 989 TFLOP/s dense, 3.35 TB/s, NVLink 900 GB/s both ways together.
    "gpu": Device("H100 SXM", 989e12, 3350e9, 450e9, 3e-6),
    # Two cores with AVX-512, measured: products 150 GFLOP/s in float32, memory 34 GB/s; simulated devices
    # exchange through memory, and each meeting costs some tens of microseconds.
    "cpu": Device("CPU, two cores", 150e9, 34e9, 8e9, 40e-6),
}
"""By JAX's platform name."""
