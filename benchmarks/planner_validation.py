"""Predicted against published step times: `python planner_validation.py --data published_runs.csv`.

Prints median and 90th percentile of the error by chip and by model, and the rank correlation within sweeps;
`--fit` prints the efficiency constants that planner/efficiency.py states. Not here: the reading of the runs
(published_runs.py).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from published_runs import Run, read, sweeps
from rich.console import Console
from rich.table import Table

from shardwise.errors import ShardwiseError
from shardwise.models.parameters import plan_model
from shardwise.planner.cost import cost
from shardwise.planner.hosting import host
from shardwise.planner.memory import memory

FEWEST = 10
"""Trust-A rows from which a chip has a constant of its own; one with fewer takes its class's."""


@dataclass(frozen=True)
class Compared:
    """One run, measured and predicted."""

    run: Run
    seconds: float
    """Predicted."""
    hbm: float
    """Bytes of a device, predicted."""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.seconds / self.run.seconds

    @property
    def error(self) -> float:
        """Of the step time."""
        return abs(self.ratio - 1)


def compare(run: Run, efficiency: float | None = None) -> Compared:
    """Predict one run."""
    plan = plan_model(run.config, run.mesh)
    assumed = replace(run.assumed, efficiency=efficiency)
    found = cost(plan, run.workload, host(run.system, run.mesh), assumed)
    return Compared(run, found.total, memory(plan, run.workload).total)


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="CSV of published runs")
    parser.add_argument("--out", default="planner_validation.json", help="JSON file for the numbers")
    parser.add_argument("--fit", action="store_true", help="print the constants that the runs give")
    parser.add_argument("--rows", action="store_true", help="print every run")
    options = parser.parse_args()
    runs, left = read(options.data)
    if options.fit:
        fit(runs)
        return 0
    compared, refused = [], []
    for run in runs:
        try:
            compared.append(compare(run))
        except ShardwiseError as error:
            refused.append((run.id, str(error)))
    console = Console(width=150)
    reasons = Counter(reason.split(" ")[0] for reason in left.values())
    console.print(
        f"{len(compared)} runs compared; left out: {sum(reasons.values())}"
        f" ({', '.join(f'{reason} {n}' for reason, n in reasons.most_common())})"
    )
    for id_, error in refused:
        console.print(f"refused: {id_}: {error}")
    dense = [c for c in compared if not c.run.config.num_experts]
    tables = {
        "by chip, trust A, dense": _table(dense, lambda c: c.run.chip, lambda c: c.run.trust == "A"),
        "by chip, all, dense": _table(dense, lambda c: c.run.chip),
        "by model and chip, all, dense": _table(dense, lambda c: f"{c.run.model} {c.run.chip}"),
        "mixture of experts, all": _table(
            [c for c in compared if c.run.config.num_experts], lambda c: c.run.chip
        ),
    }
    for title, rows in tables.items():
        _show(console, title, rows)
    ranks = _ranks(dense)
    table = Table(title="rank correlation of tokens a second a chip within sweeps", title_justify="left")
    for column in ("sweep", "runs", "Spearman"):
        table.add_column(column)
    for name, n, rho in ranks:
        table.add_row(name, str(n), f"{rho:.2f}")
    console.print(table)
    if ranks:
        console.print(f"median rank correlation {np.median([rho for *_, rho in ranks]):.2f}")
    if options.rows:
        for c in sorted(compared, key=lambda c: c.ratio):
            console.print(
                f"{c.ratio:6.2f}  {c.run.trust} {c.run.id}  {c.run.workload.remat}", highlight=False
            )
    _write(Path(options.out), compared, tables, ranks)
    return 0


_Rows = list[tuple[str, int, float, float, float]]


def _table(
    compared: Iterable[Compared],
    key: Callable[[Compared], str],
    keep: Callable[[Compared], bool] = lambda c: True,
) -> _Rows:
    """Name, runs, median ratio, median error, 90th percentile of the error; the last row is all."""
    kept = [c for c in compared if keep(c)]
    rows = []
    for kind in ("train", "decode"):
        of_kind = [c for c in kept if c.run.kind == kind]
        names = sorted({key(c) for c in of_kind})
        groups = [(f"{kind} {name}", [c for c in of_kind if key(c) == name]) for name in names]
        for name, group in [*groups, (f"{kind}, all", of_kind)]:
            if group:
                errors = [c.error for c in group]
                rows.append(
                    (name, len(group), float(np.median([c.ratio for c in group])), float(np.median(errors)),
                     float(np.quantile(errors, 0.9)))
                )  # fmt: skip
    return rows


def _show(console: Console, title: str, rows: _Rows) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "runs", "median predicted/measured", "median error", "90 % of errors below"):
        table.add_column(column)
    for name, n, ratio, error, high in rows:
        table.add_row(name, str(n), f"{ratio:.2f}", f"{error:.1%}", f"{high:.1%}")
    console.print(table)


def _ranks(compared: list[Compared]) -> list[tuple[str, int, float]]:
    """Spearman's correlation of predicted and measured throughput of a chip in each sweep."""
    by_id = {c.run.id: c for c in compared}
    found = []
    for group in sweeps([c.run for c in compared]):
        work = [run.workload.batch * run.workload.length / run.system.num_chips for run in group]
        measured = [w / run.seconds for w, run in zip(work, group, strict=True)]
        predicted = [w / by_id[run.id].seconds for w, run in zip(work, group, strict=True)]
        if len(set(measured)) > 1:
            rho = float(np.corrcoef(_order(measured), _order(predicted))[0, 1])
            found.append((group[0].sweep, len(group), rho))
    return found


def _order(values: list[float]) -> np.ndarray:
    """Ranks; equal values share the mean of theirs. Values within a percent count as equal: published
    figures are no more exact."""
    array = np.array(values)
    near = np.abs(array[:, None] / array[None] - 1) < 0.01
    return np.array([np.sum(array < v) + (np.sum(near[i]) - 1) / 2 for i, v in enumerate(array)])


def fit(runs: list[Run]) -> None:
    """Print for each chip the constant for which the median ratio is 1, and for each class the median of its
    chips' constants.

    Dense trust-A runs only. Nothing else is fitted.
    """
    kinds: tuple[Literal["train", "decode"], ...] = ("train", "decode")
    for kind in kinds:
        usable = [run for run in runs if run.kind == kind and run.trust == "A" and not run.config.num_experts]
        found: dict[str, list[float]] = {"tpu": [], "gpu": []}
        for chip in sorted({run.chip for run in usable}):
            group = [run for run in usable if run.chip == chip]
            constant = _constant(group)
            found[group[0].system.chip.kind].append(constant)
            note = "" if len(group) >= FEWEST else "  (takes its class's)"
            print(f"{kind:7} {chip:8} {len(group):3} runs  {constant:.3f}{note}")
        for name, constants in found.items():
            if constants:
                print(f"{kind:7} {name:8} {len(constants):3} chips {np.median(constants):.3f}")


def _constant(group: list[Run]) -> float:
    low, high = 0.05, 1.5
    for _ in range(20):
        middle = (low + high) / 2
        above = np.median([compare(run, middle).ratio for run in group]) > 1
        low, high = (middle, high) if above else (low, middle)
    return middle


def _write(
    path: Path, compared: list[Compared], tables: dict[str, _Rows], ranks: list[tuple[str, int, float]]
) -> None:
    rows = [
        {"id": c.run.id, "trust": c.run.trust, "measured_s": c.run.seconds, "predicted_s": c.seconds,
         "mesh": asdict(c.run.mesh), "hbm_predicted_gib": c.hbm / 2**30, "hbm_reported_gib": c.run.hbm_gib}
        for c in compared
    ]  # fmt: skip
    path.write_text(json.dumps({"runs": rows, "tables": tables, "ranks": ranks}, indent=1))


if __name__ == "__main__":
    raise SystemExit(main())
