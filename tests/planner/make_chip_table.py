"""Write the table of chips in docs/planning.md from the data; a test holds the page to it.

python -m tests.planner.make_chip_table   # from the root of the repository
"""

from __future__ import annotations

from pathlib import Path

from shardwise.runtime.chips import Chip, Domain, Torus, chips

DOCS = Path(__file__).parents[2] / "docs" / "planning.md"
START, END = "<!-- table of chips -->", "<!-- end of table of chips -->"
HEAD = (
    "chip", "bfloat16", "int8", "float8", "float32", "GiB", "GB/s", "fast network, one way", "beyond it",
    "latencies",
)  # fmt: skip


def table() -> str:
    """The table, and under it what each chip's numbers are from and where sources disagree."""
    rows = [HEAD, ("---",) + ("---:",) * 6 + ("---",) + ("---:",) * 2]
    rows += [_row(chip) for chip in chips().values()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    said = [f"- **{c.name}**: {c.source}. Doubtful: {c.doubts}." for c in chips().values()]
    return "\n".join([*lines, "", *said])


def _row(chip: Chip) -> tuple[str, ...]:
    rates = [
        f"{chip.peak[d] / 1e12:g}" if d in chip.peak else "–"
        for d in ("bfloat16", "int8", "float8", "float32")
    ]
    return (
        chip.name, *rates, "the host's" if chip.hbm is None else f"{chip.hbm / 2**30:g}",
        f"{chip.bandwidth / 1e9:g}", _fabric(chip), f"{chip.scale_out / 1e9:g}",
        f"{chip.latency * 1e6:g}, {chip.scale_out_latency * 1e6:g} µs",
    )  # fmt: skip


def _fabric(chip: Chip) -> str:
    fabric = chip.fabric
    if isinstance(fabric, Torus):
        return f"{fabric.axes}-D torus, {fabric.link / 1e9:g} a link, up to {fabric.most_chips:,} chips"
    if isinstance(fabric, Domain):
        return f"{fabric.size} on a switch, {fabric.link / 1e9:g} each"
    return "memory"


def written(page: str) -> str:
    """The page with the table as it is now."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    assert tail, f"{DOCS} lacks {START} or {END}"
    return f"{head}{START}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
