"""Gloo's collectives: lines fitted to some sizes and groups against the times of the others.

    python scripts/bench/collectives_gloo.py            # sweeps, about half an hour on 2 cores
    python scripts/bench/collectives_gloo.py --keep DIR # again from the times that DIR holds

What is held out is fixed here, before anything is measured: of sizes those half way between powers
of two, of groups those of 3.  Sizes that are fitted and held out take turns in every round, in
changing order.  A time is the lower decile of its repetitions: what else runs on the machine only
ever adds (:attr:`primus_ext.collective_samples.Sample.quietest`).  That, and how much noise a new
line must beat, was settled on one sweep; the page is of another.  Writes
validation/gloo_collectives.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from primus_ext.collective_samples import Sample, Sweep, load
from primus_ext.cost.group_sizes import Host
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.cost.placement import Placement
from primus_ext.observe.collective_sweep import Wanted, sweep
from primus_ext.trace import Collective, CollectiveKind

FITTED = tuple(2**power for power in range(10, 25))
HELD_OUT = tuple(3 * 2**power for power in range(9, 23))
"""Bytes."""
HELD_OUT_MEMBERS = (3,)
PROCESSES = (2, 4)
"""Of a sweep; as many as this machine has cores, and twice as many."""
PAGE = Path(__file__).resolve().parents[2] / "validation" / "gloo_collectives.md"
BAR = 0.15
"""Median error that is asked for."""

Errors = dict[tuple[str, str, int], list[tuple[float, bool]]]
"""By kind, what was held out, and processes: signed relative errors, and whether the interval
holds the time."""


def measured(processes: int, rounds: int, folder: Path) -> Sweep:
    """The times in a folder, or new ones."""
    path = folder / f"gloo_{processes}.json"
    if path.is_file():
        return load(path)

    def told(done: int, total: int, _pids: Mapping[int, int]) -> None:
        if done % 500 == 0:
            sys.stderr.write(f"{processes} processes: {done}/{total}\n")

    wanted = Wanted(
        processes=processes, device="cpu", sizes=(*FITTED, *HELD_OUT), rounds=rounds,
        seconds=0.05, timeout=300.0,
    )  # fmt: skip
    return sweep(wanted, path, told)


def is_fitted(sample: Sample) -> bool:
    """Whether a sample is one that lines are fitted to."""
    known = min((abs(sample.bytes - size) / size, size in FITTED) for size in (*FITTED, *HELD_OUT))
    return sample.members not in HELD_OUT_MEMBERS and (known[1] or not sample.bytes)


def errors(found: Sweep) -> Errors:
    """Of everything that was held out."""
    fit = dataclasses.replace(found, samples=tuple(s for s in found.samples if is_fitted(s)))
    model = MeasuredCollectives([fit], "sweep", quiet=True)
    host = Host(found.processes, found.host_cores)
    collected: Errors = defaultdict(list)
    for sample in found.samples:
        if is_fitted(sample):
            continue
        groups = sample.members in HELD_OUT_MEMBERS
        # a variant is a curve of its own; the one of a pipeline is asked for by its group
        plain = sample.kind is CollectiveKind.SEND_RECV and not sample.variant
        if sample.variant == "uneven":
            continue
        asked = Collective(kind=sample.kind, group="pp" if plain else "tp", bytes=sample.bytes,
                           dtype=sample.dtype)  # fmt: skip
        answer = model.answer(asked, Placement(sample.members, 1, sample.members), host)
        if answer is None:
            raise SystemExit(f"{sample.kind} has no curve")
        off = answer.parts.seconds / sample.quietest - 1
        name = "send_recv, all at once" if sample.variant else str(sample.kind)
        held = "group" if groups else "size"
        inside = answer.low <= sample.quietest <= answer.high
        collected[name, held, found.processes].append((off, inside))
    return collected


def uneven(found: Sweep) -> float:
    """How many times as long an all-to-all of unlike parts takes as one of like parts, median."""
    times = {
        (s.variant, s.members, round(s.bytes, -2)): s.quietest
        for s in found.samples
        if s.kind is CollectiveKind.ALL_TO_ALL
    }
    ratios = []
    for (variant, members, size), seconds in times.items():
        if variant == "uneven":
            near = min(
                (key for key in times if not key[0] and key[1] == members),
                key=lambda key: abs(key[2] - size),
            )
            if abs(near[2] - size) <= 0.1 * size:
                ratios.append(seconds / times[near])
    return statistics.median(ratios)


def _cell(values: Sequence[tuple[float, bool]]) -> str:
    if not values:
        return "- | - | -"
    size = [abs(off) for off, _ in values]
    inside = statistics.mean(within for _, within in values)
    return f"{len(values)} | {statistics.median(size):.1%} | {inside:.0%}"


def page(sweeps: Sequence[Sweep]) -> str:
    """The page, Markdown."""
    together: Errors = defaultdict(list)
    for found in sweeps:
        for key, values in errors(found).items():
            together[key] += values
    first = sweeps[0]
    spread = statistics.median(s.spread for found in sweeps for s in found.samples)
    loads = [load for found in sweeps for load in found.settings["load_before"][:1]]
    lines = [
        "# Gloo's collectives: errors of fitted lines on held-out sizes and groups", "",
        "Written by `python scripts/bench/collectives_gloo.py`; what is held out is fixed there.",
        f"Machine: {first.product}, {first.host_cores} cores, torch {first.versions['torch']}, "
        f"{first.settings['rounds']} rounds.",
        f"Load of the machine (it is shared) {' and '.join(f'{x:.1f}' for x in loads)}; the median "
        f"of a sample moves {spread:.0%} from round to round (median).", "",
        f"Fitted: {len(FITTED)} powers of two from {FITTED[0]:,} to {FITTED[-1]:,} bytes, groups "
        "of 2 and, with 4 processes, of 4.  Held out: the "
        f"{len(HELD_OUT)} sizes half way between, and groups of "
        f"{', '.join(map(str, HELD_OUT_MEMBERS))} at all sizes.  All groups of a size run at once. "
        " `in` is the share of times that the answer's interval holds.", "",
        "| kind | held-out sizes | median | in | held-out groups | median | in |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in dict.fromkeys(key[0] for key in together):
        cells = [
            _cell([v for (k, held, _), vs in together.items() if (k, held) == (kind, name)
                   for v in vs])
            for name in ("size", "group")
        ]  # fmt: skip
        lines.append(f"| {kind} | {cells[0]} | {cells[1]} |")
    cells = [_cell([v for (_, held, _), vs in together.items() if held == name for v in vs])
             for name in ("size", "group")]  # fmt: skip
    lines += [f"| **all** | {cells[0]} | {cells[1]} |", ""]
    every = [abs(off) for values in together.values() for off, _ in values]
    median = statistics.median(every)
    verdict = "met" if median <= BAR else "missed"
    lines += [f"Median of all {len(every)}: {median:.1%}, the bar of {BAR:.0%} is {verdict}.", ""]
    lines += ["| processes | held-out sizes | median | in | held-out groups | median | in |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for processes in dict.fromkeys(key[2] for key in together):
        cells = [_cell([v for (_, h, p), vs in together.items() if (h, p) == (name, processes)
                        for v in vs]) for name in ("size", "group")]  # fmt: skip
        lines.append(f"| {processes} | {cells[0]} | {cells[1]} |")
    lines += ["", "An all-to-all whose largest part is three times the smallest takes "
              f"{statistics.median(uneven(found) for found in sweeps):.2f} times as long as an "
              "even one of the same bytes (median)."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, score and write."""
    parser = argparse.ArgumentParser(description="Errors of gloo's lines on held-out times.")
    parser.add_argument("--keep", type=Path, help="folder for the times, used again if there")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        sweeps = [measured(processes, asked.rounds, folder) for processes in PROCESSES]
    PAGE.write_text(page(sweeps))
    sys.stdout.write(PAGE.read_text())


if __name__ == "__main__":
    main()
