"""JAX's persistent compilation cache, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import ConfigError

# With a size limit JAX also takes a file lock around every read and write; without one, two processes can
# read what the other has half written.
_MAX_BYTES = 4 << 30


def cache_folder(folder: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Where compiled things are kept; made by whoever writes there. None if turned off.

    Args:
        folder: where; None: SHARDWISE_COMPILE_CACHE, or else ${XDG_CACHE_HOME:-~/.cache}/shardwise/xla.
        environ: for tests; None is os.environ. SHARDWISE_COMPILE_CACHE=off turns the cache off.
    """
    environ = os.environ if environ is None else environ
    asked = str(folder) if folder is not None else environ.get("SHARDWISE_COMPILE_CACHE", "")
    if asked == "off":
        return None
    home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(asked).expanduser() if asked else Path(home).expanduser() / "shardwise" / "xla"


def enable_compile_cache(
    folder: str | Path | None = None, *, environ: Mapping[str, str] | None = None
) -> Path | None:
    """Makes JAX keep compiled programs on disk, so that the next run of the same program does not compile.

    Args:
        folder, environ: as for cache_folder. In the folder each kind of processor has its own: machine code
            for another one could crash.
    Returns:
        The folder in use; None if turned off.
    Raises:
        ConfigError: if a folder that was asked for cannot be written. The default one is left unused then.
    """
    environ = os.environ if environ is None else environ
    base, asked = cache_folder(folder, environ), folder or environ.get("SHARDWISE_COMPILE_CACHE")
    if base is None:
        return None
    path = base / _processor()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        if asked:
            raise ConfigError(
                f"compile cache: cannot write {base}; set SHARDWISE_COMPILE_CACHE to a folder or to off"
            )
        return None
    import jax

    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path


def _processor() -> str:
    """A short name of this kind of processor: architecture and a digest of the instructions that it has."""
    features = ""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        features = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
