"""What every verb does between reading its options and its work: memory, devices, processes, compile cache.

The order matters: malloc before JAX allocates, devices and processes before JAX starts a backend.
"""

from __future__ import annotations

import sys

from shardwise.cli.options import MeshOptions, Options, ProcessOptions


def start(options: Options) -> None:
    """Prepares this process for JAX as the options say.

    Raises:
        ConfigError: devices or processes that are not to be had.
    """
    from shardwise.runtime import compile_cache, devices, distributed, memory

    memory.tune_malloc()
    wanted = options.devices if isinstance(options, MeshOptions) else None
    devices.configure_devices(wanted)
    if wanted is None:
        hint = devices.accelerator_hint()
        if hint is not None:
            print(f"warning: {hint}", file=sys.stderr)
    if isinstance(options, ProcessOptions):
        distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    compile_cache.enable_compile_cache()
