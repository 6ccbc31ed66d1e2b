"""The picture of `shardwise plan --plot`: memory and time of each mesh, and speed against devices.

Not here: the numbers (search.py). Matplotlib is an optional dependency.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.errors import ConfigError
from shardwise.planner.search import USABLE, Candidate, Ranking, search, sizes

_MOST = 10
_GIB = 2**30


def draw(path: str, model: str, ranking: Ranking) -> None:
    """Write the picture.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'shardwise[plot]'") from None
    shown = [*ranking.fitting, *ranking.refused][:_MOST]
    if not shown:
        raise ConfigError("--plot: there is no mesh to draw; no mesh of this machine takes the batch")
    figure, (memory, time, speed) = pyplot.subplots(1, 3, figsize=(19, 0.42 * len(shown) + 3))
    names = [f"{c.mesh}{'' if not c.refused else ' (no)'}" for c in shown]
    _bars(memory, names, [_memory(c) for c in shown])
    room = ranking.system.hbm * USABLE / _GIB
    memory.axvline(room, color="black", linestyle="--", linewidth=1)
    memory.set_title(f"memory of a device, GiB ({room:.0f} usable)")
    _bars(time, names, [_time(c) for c in shown])
    time.set_yticklabels([])
    time.set_title("time of a step, s")
    _speed(speed, ranking)
    figure.suptitle(f"{model} on {ranking.system}, {ranking.request.task}")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)


def _bars(axes: Any, names: list[str], parts: list[dict[str, float]]) -> None:
    """Stacked horizontal bars, the first on top."""
    left = [0.0] * len(parts)
    for label in dict.fromkeys(key for part in parts for key in part):
        widths = [part.get(label, 0.0) for part in parts]
        axes.barh(range(len(parts)), widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=4, frameon=False)


def _memory(c: Candidate) -> dict[str, float]:
    m = c.memory
    parts = {
        "weights": m.params, "gradients": m.grads, "AdamW": m.optimizer, "activations": m.activations,
        "cache": m.kv_cache,
    }  # fmt: skip
    return {name: size / _GIB for name, size in parts.items() if size}


def _time(c: Candidate) -> dict[str, float]:
    t = c.cost
    exposed = {f"messages over {axes}": seconds for axes, seconds in t.exposed.items()}
    return {
        "products": t.products - t.recomputed, "computed again": t.recomputed, "attention": t.attention,
        "memory": t.traffic, "optimizer": t.optimizer, **exposed,
    }  # fmt: skip


def _speed(axes: Any, ranking: Ranking) -> None:
    """Tokens a second of all devices on machines of this chip, the batch being as asked."""
    devices, speeds = [], []
    for system in sizes(ranking.system, at_most=max(64, 4 * ranking.system.num_chips)):
        found = search(replace(ranking.request, max_latency=None), system)
        if found.fitting:
            best = found.fitting[0]
            devices.append(system.num_devices)
            speeds.append(best.tokens_per_second * system.num_devices)
    axes.set_title("tokens a second, the same batch")
    if not devices:
        axes.text(0.5, 0.5, "fits no machine of this chip", ha="center")
        return
    axes.plot(devices, speeds, marker="o", label="predicted")
    axes.plot(
        devices, [speeds[0] * n / devices[0] for n in devices], linestyle=":", label="if it scaled fully"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(devices, [str(n) for n in devices], rotation=60)
    axes.set_xlabel("devices")
    axes.legend(fontsize=8)
