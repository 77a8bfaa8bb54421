"""CPU time of ``primus-ext validate``, cold and warm, by part of its work.

    python scripts/bench/validate.py RUNS.yaml [--every 12] [--from 0]

Of the programs that stand for the runs of a file every twelfth is taken, ordered by source and by
what they have in common, with all the runs that it stands for.  They are validated twice as a user
would, with a cache that is empty at first.  Printed are the CPU seconds of all processes together,
those scaled to the whole file by the number of programs, both also in units: a unit is the CPU time
of the fixed pure-Python loop of ``cold_projection.py``, timed before and after.  Where the seconds
go is measured beside: reading the file and finding its programs, and pricing the traces of the
sample in one process.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cold_projection import REPO, unit_s

from primus_ext.runner import bulk, peaks, pricing, runs, validate

_COMMAND = "import sys; from primus_ext.cli import main; sys.exit(main())"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--from", dest="first", type=int, default=0)
    asked = parser.parse_args()
    chosen = runs.load(asked.runs)
    start = time.process_time()
    gathered = validate.gather(runs.load(asked.runs), lambda run: bool(peaks.published(run)))
    fixed = time.process_time() - start
    report("reading the file, finding its programs", fixed, unit_s())
    names = ordered(gathered, {run["id"]: run for run in chosen})
    taken = names[asked.first :: asked.every]
    ids = [one.name for name in taken for one in gathered.served[name]]
    scale = len(names) / len(taken)
    print(f"{len(taken)} of {len(names)} programs, {len(ids)} of {len(gathered.jobs)} runs")
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ, "PRIMUS_EXT_CACHE": cache, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"
        }  # fmt: skip
        command = [sys.executable, "-c", _COMMAND, "validate", str(asked.runs)]
        command += [word for name in ids for word in ("--run", name)]
        for temperature in ("cold", "warm"):
            code = measured(temperature, command, environment, scale, fixed)
            if code:
                return code
        os.environ.update(environment)  # all of which the names of cached traces depend on
        own = {name: gathered.programs[name] for name in taken}
        pricing_alone(own, gathered.served, scale)
    return 0


def ordered(gathered: validate.Gathered, by_id: Mapping[str, runs.Run]) -> list[str]:
    """Names of programs by source, those that have most in common side by side."""

    def place(name: str) -> tuple[Any, ...]:
        source = runs.source(by_id[gathered.served[name][0].name])
        return source, bulk.likeness(gathered.programs[name]), name

    return sorted(gathered.programs, key=place)


def measured(
    name: str, command: Sequence[str], environment: Mapping[str, str], scale: float, fixed: float
) -> int:
    """Run a command, print what it took of all processes, and return its exit code.

    Args:
        name: What is printed.
        command: Of the sample.
        environment: Its.
        scale: Programs of the whole file over those of the sample.
        fixed: Of its CPU seconds, those that the whole file takes no more of.
    """
    before, unit = resource.getrusage(resource.RUSAGE_CHILDREN), unit_s()
    start = time.monotonic()
    code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    wall, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    report(f"{name} ({wall:.0f} s by the clock)", cpu, (unit + unit_s()) / 2, scale, fixed)
    return code.returncode


def pricing_alone(
    programs: Mapping[str, dict[str, Any]], served: Mapping[str, Sequence[pricing.Wanted]],
    scale: float,
) -> None:  # fmt: skip
    """Load and price what is in the cache, in this process."""
    texts: dict[str, str] = {}
    unit = unit_s()

    def loading() -> None:
        bulk.answers(programs, lambda name, answer: texts.update({name: answer.text}), 1)

    def pricing_them() -> None:
        for name, text in texts.items():
            if text:
                pricing.price(text, served[name])

    report("of it, finding traces in the cache", timed(loading), unit, scale)
    report("of it, reading and pricing them", timed(pricing_them), unit, scale)


def timed(work: Callable[[], None]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def report(name: str, cpu: float, unit: float, scale: float = 1.0, fixed: float = 0.0) -> None:
    """Print one line."""
    line = f"{name}: {cpu:.1f} s CPU = {cpu / unit:,.0f} units"
    if scale != 1.0:
        whole = fixed + (cpu - fixed) * scale
        line += f"; whole file {whole:,.0f} s = {whole / unit:,.0f} units"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
