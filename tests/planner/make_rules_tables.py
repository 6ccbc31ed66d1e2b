"""Write the tables of docs/planning.md on full FSDP, tensor parallelism and the head, from the planner.

python -m tests.planner.make_rules_tables   # from the root of the repository; half a minute
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.families import config_from_hf
from shardwise.families.presets import preset
from shardwise.models.config import ModelConfig
from shardwise.models.parameters import plan_model
from shardwise.partition.mesh import MeshSpec
from shardwise.partition.rules import HeadLayout
from shardwise.planner.cost import cost
from shardwise.planner.hardware import parse_system
from shardwise.planner.hosting import host
from shardwise.planner.search import Candidate, Request, search
from shardwise.steps.workload import Workload

from .make_chip_table import DOCS

MODELS = ("llama3-8b", "gpt-neox-20b", "llama3-70b", "llama3.1-405b")
JOBS = ((64, 1), (256, 1), (1024, 1), (1024, 4), (4096, 4), (4096, 16))
"""Devices and batch in M tokens."""


def model(name: str) -> ModelConfig:
    """A preset."""
    return config_from_hf(preset(name))


def best(name: str, chip: str, devices: int, millions: int) -> tuple[Candidate | None, Candidate | None]:
    """The best mesh without tp, and the best with it."""
    config = model(name)
    length = min(4096, config.max_position)
    request = Request(config, "train", millions * 2**20 // length, length)
    found = search(request, parse_system(f"{chip}:{devices}")[0]).fitting
    return next((c for c in found if c.mesh.tp == 1), None), next((c for c in found if c.mesh.tp > 1), None)


def training(chip: str) -> Iterator[str]:
    """MFU of both, by model and job."""
    heads = [f"{devices:,} × {millions}M" for devices, millions in JOBS]
    yield f"| {chip} | " + " | ".join(heads) + " |"
    yield "| --- |" + " --- |" * len(JOBS)
    for name in MODELS:
        cells = []
        for devices, millions in JOBS:
            without, with_tp = best(name, chip, devices, millions)
            left = f"{without.mfu:.0%}" if without else "–"
            right = f"{with_tp.mfu:.0%} (tp {with_tp.mesh.tp})" if with_tp else "–"
            if without and (not with_tp or without.cost.total <= with_tp.cost.total):
                left = f"**{left}**"
            elif with_tp:
                right = f"**{right}**"
            cells.append(f"{left}, {right}")
        yield f"| {name} | " + " | ".join(cells) + " |"


def heads() -> Iterator[str]:
    """Milliseconds of a decoding step of BLOOM-176B on A100s, by tp and layout of the head."""
    layouts: tuple[HeadLayout, ...] = ("replicated", "hidden", "vocab")
    yield "| tp | batch | replicated | hidden | vocab | vocab saves |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: |"
    config = model("bloom-176b")
    for tp in (2, 4, 8):
        for batch in (1, 32):
            system, mesh = parse_system(f"a100-80:{tp}")[0], MeshSpec(tp=tp)
            workload = Workload(
                "decode", batch, 1, capacity=2048, compute_dtype="bfloat16", param_dtype="bfloat16"
            )
            times = [
                cost(plan_model(config, mesh, head_layout=layout), workload, host(system, mesh)).total * 1e3
                for layout in layouts
            ]
            shown = " | ".join(f"{time:.1f}" for time in times)
            yield f"| {tp} | {batch} | {shown} | {1 - times[2] / times[0]:.1%} |"


BLOCKS = {
    "training on v5p": lambda: training("v5p"),
    "training on h100": lambda: training("h100"),
    "head of bloom": heads,
}


def written(page: str) -> str:
    """The page with the tables as they are now."""
    for name, lines in BLOCKS.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        assert after, f"{DOCS} lacks {start} or {end}"
        page = f"{before}{start}\n\n" + "\n".join(lines()) + f"\n\n{end}{after}"
    return page


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
