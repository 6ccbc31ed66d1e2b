"""What loading a checkpoint holds in host memory beside the arrays on the devices.

    MALLOC_MMAP_THRESHOLD_=65536 python benchmarks/load_memory.py --model FOLDER --mesh dp:1,fsdp:2,tp:2

The memory map of the file is not counted (the kernel drops its pages when it needs them). Devices are
simulated: the arrays themselves lie in this process too and are taken off. With MALLOC_MMAP_THRESHOLD_ set,
freed blocks leave the process at once, so that the figure is what is held, not what malloc keeps for later.
Not here: speed beside a peer (versus_transformers.py).
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time

from shardwise.partition.mesh import MeshSpec
from shardwise.runtime.devices import configure_devices
from shardwise.runtime.memory import anonymous_rss_bytes


class _Peak:
    """The most anonymous memory in use between start and stop, looked at every half millisecond."""

    def __init__(self) -> None:
        self.before = self.bytes = anonymous_rss_bytes() or 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self.bytes = max(self.bytes, anonymous_rss_bytes() or 0)

    def stop(self) -> int:
        """Bytes above the start."""
        self._done.set()
        self._watcher.join()
        return self.bytes - self.before


def main() -> None:
    """Load, watch, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--mesh", default="dp:1,fsdp:1,tp:1", help="all sizes given")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    parser.add_argument("--apart", action="store_true", help="one array per layer, as for generation")
    args = parser.parse_args()
    spec = MeshSpec.parse(args.mesh)
    configure_devices(f"cpu:{math.prod(spec.sizes.values())}")
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        print("warning: MALLOC_MMAP_THRESHOLD_ is not set; freed blocks that malloc keeps are counted too")

    import jax

    from shardwise.api import open_model, plan
    from shardwise.checkpoints.load import load_params
    from shardwise.families import config_from_hf
    from shardwise.partition.mesh import build_mesh

    # What does not grow with the weights comes first: JAX's own start, modules, the file's header.
    checkpoint = open_model(args.model)
    the_plan = plan(config_from_hf(checkpoint.hf_config), spec)
    mesh = build_mesh(spec)
    jax.block_until_ready([jax.device_put(0.0, device) for device in jax.devices()])
    watch, start = _Peak(), time.perf_counter()
    params = load_params(checkpoint, the_plan, mesh, args.dtype, stacked=not args.apart)
    jax.block_until_ready(params)
    seconds, peak = time.perf_counter() - start, watch.stop()
    pieces = [shard.data.nbytes for value in params.values() for shard in value.addressable_shards]
    beside = peak - sum(pieces)
    print(f"{args.model} on {spec}: {sum(pieces) / 1e6:,.1f} MB on devices in {seconds:.1f} s"
          f" ({sum(pieces) / seconds / 1e9:.2f} GB/s)")  # fmt: skip
    print(f"held beside them at most {beside / 1e6:,.1f} MB = {beside / max(pieces):.2f} × the largest"
          f" per-device array ({max(pieces) / 1e6:,.1f} MB); at most 2 are allowed")  # fmt: skip


if __name__ == "__main__":
    main()
