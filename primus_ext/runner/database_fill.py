"""``primus-ext db missing`` and ``measure``: what configurations need, and getting it."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from primus_ext.cost.latency_db import Device, LatencyDatabase, Row, default_path
from primus_ext.cost.latency_db.planning import Planner
from primus_ext.cost.latency_db.prices import Prices
from primus_ext.report import latency
from primus_ext.report.progress import ProgressBar
from primus_ext.runner import child, configurations, local_device
from primus_ext.runner.configurations import Needs
from primus_ext.runner.microbench import Microbench
from primus_ext.runner.outcome import Exit, UsageError
from primus_ext.trace import Op

_USUAL = "h100"
"""What programs are recorded for where no accelerator is at hand."""
Rows = Callable[[Op, Mapping[str, Any]], Row]


@dataclasses.dataclass(slots=True)
class Filled:
    """What measuring has brought."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    device_s: float = 0.0
    """Seconds that the device was busy, warm-up and repeated attempts included."""
    unsteady: list[str] = dataclasses.field(default_factory=list)
    """Ops whose samples scatter: the device may be throttling."""
    left: dict[str, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    """By verdict (refused, oom, failed), one sentence each."""
    cannot: list[Op] = dataclasses.field(default_factory=list)

    def take(self, op: Op, answer: Mapping[str, Any], row: Rows) -> Row | None:
        """Note one answer; the row, if it is a good one."""
        if answer["status"] != "ok":
            self.left[answer["status"]].append(answer["message"])
            self.cannot.append(op)
            return None
        made = row(op, answer)
        self.rows.append(made)
        self.device_s += answer["device_s"]
        if not made.steady:
            self.unsteady.append(
                f"{op.name} scatters by {100 * made.spread:.0f} %: the device may be throttling"
            )
        return made


def known(database: LatencyDatabase, device: Device) -> dict[Op, float]:
    """Seconds of what was measured on a device."""
    prices = Prices.of(database, device=device)
    return {row.op: row.median for row in prices.rows}


def fill(
    database: LatencyDatabase, bench: Microbench, needs: Needs, *, everything: bool = False,
    sweep: bool = False, budget_s: float | None = None, progress: child.Progress,
) -> Filled:  # fmt: skip
    """Measure until every wanted op has a time or an interval that is narrow enough.

    Args:
        database: Gets every row as soon as it is there.
        bench: The device.
        needs: What is wanted.
        everything: Measure each wanted op that was never measured, instead of interpolating.
        sweep: Measure the same layers with fewer tokens too, where that tells more for its cost.
        budget_s: Stop after so many seconds of device time.
        progress: Told what runs.
    """
    filled, seconds = Filled(), known(database, bench.device)
    more = frozenset[Op]().union(*needs.sweep.values()) if sweep else ()
    planner = Planner(needs.configurations, more)

    def batch() -> Iterable[Op]:
        if everything:
            return sorted(planner.wanted - seconds.keys() - set(filled.cannot), key=repr)
        return planner.next(seconds, filled.cannot)

    while chosen := batch():
        for op in chosen:
            if budget_s is not None and filled.device_s >= budget_s:
                return filled
            progress(len(filled.rows), len(planner.wanted), op.name)
            row = filled.take(op, bench.answer(op), bench.row)
            if row is not None:
                database.add([row])
                seconds[op] = row.median
    return filled


def missing(
    path: Path | None, models: Path, accelerator: str | None, device: str | None
) -> int:
    """Print how much of what configurations need is in the database.

    Raises:
        UsageError: The file of models, the product or the device can't be used.
    """
    with ProgressBar() as bar, Microbench(_device(device)) as bench:
        needs = _needs(models, accelerator, bar.update)
        with LatencyDatabase(path or default_path(os.environ)) as database:
            seconds = known(database, bench.device)
        rows = _by_family(Planner(needs.configurations), seconds)
        said = [f"on {bench.device.product}, for {len(needs.configurations)} configurations:"]
    said += [f"not allowed: {name}: {why}" for name, why in needs.refused.items()]
    latency.lines(said, Console())
    latency.table(rows, Console())
    return Exit.DONE


def _by_family(planner: Planner, seconds: Mapping[Op, float]) -> list[dict[str, Any]]:
    """Signatures by family; what would be measured is what makes a configuration uncertain."""
    between, doubts = planner.between(seconds), {doubt.op for doubt in planner.doubts(seconds)}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for op in planner.wanted:
        found = counts[op.family]
        found["signatures"] += 1
        found["measured"] += op in seconds
        found["interpolated"] += op in between - doubts
        found["to measure"] += op in doubts
        found["negligible"] += op not in seconds and op not in between | doubts
    names = ("signatures", "measured", "interpolated", "negligible", "to measure")
    return [
        {"family": str(family), **{name: found[name] for name in names}}
        for family, found in sorted(counts.items())
    ]


def measure(
    path: Path | None, models: Path, accelerator: str | None, device: str | None, repetitions: int,
    everything: bool, sweep: bool, budget_s: float | None,
) -> int:  # fmt: skip
    """Measure what configurations need and the database lacks.

    Raises:
        UsageError: The file of models, the product or the device can't be used.
    """
    if repetitions < 1:
        raise UsageError(f"--repetitions={repetitions} is not legal: 1 or more")
    with ProgressBar() as bar, Microbench(_device(device), repetitions) as bench:
        needs = _needs(models, accelerator, bar.update)
        with LatencyDatabase(path or default_path(os.environ)) as database:
            filled = fill(
                database, bench, needs, everything=everything, sweep=sweep, budget_s=budget_s,
                progress=bar.update,
            )  # fmt: skip
            said = [
                f"{len(filled.rows):,} ops measured on {bench.device.product} in "
                f"{filled.device_s:.1f} s of its time; they are in {database.path}"
            ]
    said += [f"not allowed: {name}: {why}" for name, why in needs.refused.items()]
    for verdict, messages in filled.left.items():
        said += [f"{verdict}: {message}" for message in dict.fromkeys(messages)]
    said += [f"unsteady: {words}" for words in dict.fromkeys(filled.unsteady)]
    latency.lines(said, Console())
    return Exit.DONE


def _needs(models: Path, accelerator: str | None, progress: child.Progress) -> Needs:
    here = local_device.find(os.environ)
    target = accelerator or (here and here.accelerator) or _USUAL
    try:
        return configurations.needs(configurations.read(models), target, progress)
    except child.ChildError as error:
        raise UsageError(str(error)) from error


def _device(asked: str | None) -> str:
    if asked:
        return asked
    return "cuda" if local_device.find(os.environ) is not None else "cpu"
