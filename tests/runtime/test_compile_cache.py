"""Compiled programs are kept in the user's cache folder, or where the environment says, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from shardwise.errors import ConfigError
from shardwise.runtime import compile_cache
from shardwise.runtime.compile_cache import enable_compile_cache

COMPILE = """
import sys
from shardwise.runtime.compile_cache import enable_compile_cache
enable_compile_cache(sys.argv[1])
import jax
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print(jax.jit(lambda x: (x @ x).sum() * 3)(jax.numpy.ones((8, 8))))
print(sum(name.endswith("compilation_cache/cache_hits") for name in hits))
"""


@pytest.fixture(autouse=True)
def restored_config() -> Iterator[None]:
    """JAX's settings are this process's: leave them as they were."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_default_is_the_users_cache_folder(tmp_path: Path) -> None:
    path = enable_compile_cache(environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert path is not None
    assert path.parent == tmp_path / "shardwise" / "xla"
    assert path.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(path)


def test_the_environment_names_another_folder_or_turns_it_off(tmp_path: Path) -> None:
    path = enable_compile_cache(environ={"SHARDWISE_COMPILE_CACHE": str(tmp_path / "here")})
    assert path is not None
    assert path.parent == tmp_path / "here"
    assert enable_compile_cache(environ={"SHARDWISE_COMPILE_CACHE": "off"}) is None


def test_an_unusable_folder_is_an_error_only_if_it_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="SHARDWISE_COMPILE_CACHE"):
        enable_compile_cache(tmp_path / "file" / "cache")
    assert enable_compile_cache(environ={"XDG_CACHE_HOME": str(tmp_path / "file")}) is None


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    environ = os.environ | {
        "PYTHONPATH": str(Path(compile_cache.__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    first, second = (
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert first[1] == "0"
    assert int(second[1]) >= 1
    assert first[0] == second[0] == "1536.0"
