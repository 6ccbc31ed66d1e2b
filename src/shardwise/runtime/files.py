"""Small text files that a command writes besides its work, never over another.

Not here: models and training checkpoints (checkpoints/), and metrics, which grow (training/metrics.py).
"""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError


def write_new(what: str, path: str | Path, text: str) -> None:
    """Write a file that must not exist yet, and the folders above it that there are not.

    Args:
        what: the file is, for messages: `plan file`.

    Raises:
        ConfigError: it exists, or cannot be written.
    """
    try:
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:  # also no such user, a zero byte
        raise ConfigError(f"{what} {path} cannot be written: {why(error)}") from None
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise ConfigError(f"{what} {path} exists already; name another or remove it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} {path} cannot be written: {why(error)}") from None


def why(error: Exception) -> str:
    """The reason of an error of the file system, in its own words, with the path if it is another's."""
    if isinstance(error, IsADirectoryError):
        return "it is a folder; name a file in it"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{error.filename} is a file, or lies below one" if error.filename else str(error)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
