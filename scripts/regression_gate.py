"""Hold projected step times fixed: compare with ``validation/predictions.csv``, or write it.

``python scripts/regression_gate.py`` projects the runs of ``validation/gate_runs.yaml`` and fails
(exit code 3) where a step time differs from the committed one by more than 0.1 %, naming the run
and the terms that moved.  A change that means to move them runs it once with ``--write`` and
commits the new table, whose errors against what was measured stand beside.  Kernels are priced by
formulas alone, so that it does not matter whether the optional tables are installed.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from primus_ext.runner import pricing, runs, validate  # noqa: E402
from primus_ext.runner.outcome import Exit  # noqa: E402

RUNS = ROOT / "validation" / "gate_runs.yaml"
TABLE = ROOT / "validation" / "predictions.csv"
TOLERANCE = 1e-3
"""Share of a step time by which it may differ."""
_HEAD = ("id", "measured_s", "predicted_s", "error_percent")


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """The projected step of a run, seconds."""

    measured_s: float
    predicted_s: float
    terms: Mapping[str, float]
    """Exposed seconds by term, with the bubble; they add up to the step."""


Predictions = Mapping[str, Prediction]


def predictions(
    wanted: Sequence[runs.Run], progress: Callable[[int, int, str], None], workers: int | None
) -> dict[str, Prediction]:
    """Project runs.

    Args:
        wanted: Runs with different ids.
        progress: Told how many programs are traced.
        workers: Processes at a time; None: the cores of this machine.

    Raises:
        ValueError: One of them can't be projected.
    """
    measured = {run["id"]: runs.measured_seconds(run) for run in wanted}
    gathered = validate.gather(wanted, lambda run: False)
    for name, reason in gathered.skipped.items():
        raise ValueError(f"{name} can't be projected: {reason}")
    found: dict[str, Prediction] = {}

    def told(prices: pricing.Prices) -> None:
        for name, timed in prices.items():
            if not isinstance(timed, pricing.Timed):
                raise ValueError(f"{name} can't be projected: {timed}")
            found[name] = Prediction(
                measured[name], timed.throughput.step_s,
                {term.term: term.exposed_seconds for term in timed.breakdown},
            )  # fmt: skip
            progress(len(found), len(wanted), name)

    served = {
        program: [formulas_alone(one) for one in jobs]
        for program, jobs in gathered.served.items()
    }
    pricing.run(gathered.programs, served, told, workers)
    return {run["id"]: found[run["id"]] for run in wanted}


def formulas_alone(one: pricing.Wanted) -> pricing.Wanted:
    """A job on a target without measured tables."""
    accelerator = dataclasses.replace(one.cluster.accelerator, measured_tables="")
    return dataclasses.replace(
        one, cluster=dataclasses.replace(one.cluster, accelerator=accelerator)
    )


def moved(now: Predictions, before: Predictions) -> list[str]:
    """One sentence for every run whose projection is not what it was."""
    found = [f"{name} is not in the table" for name in now if name not in before]
    found += [f"{name} is in the table and not projected" for name in before if name not in now]
    for name in (n for n in now if n in before):
        new, old = now[name], before[name]
        change = new.predicted_s / old.predicted_s - 1
        if abs(change) > TOLERANCE:
            found.append(
                f"{name}: {old.predicted_s:.6g} s became {new.predicted_s:.6g} s ({change:+.2%}); "
                + ", ".join(_terms(new, old))
            )
    return found


def _terms(new: Prediction, old: Prediction) -> list[str]:
    """Terms that moved by more than the tolerance of the step, those that moved most first."""
    names = dict.fromkeys((*old.terms, *new.terms))
    change = {n: new.terms.get(n, 0.0) - old.terms.get(n, 0.0) for n in names}
    large = [n for n in names if abs(change[n]) > TOLERANCE / len(names) * old.predicted_s]
    return [f"{n} {change[n]:+.3g} s" for n in sorted(large, key=lambda n: -abs(change[n]))]


def mean_error(found: Predictions) -> float:
    """Mean absolute error against what was measured, percent; at least one run."""
    return 100 * sum(abs(o.predicted_s / o.measured_s - 1) for o in found.values()) / len(found)


def written(found: Predictions) -> str:
    """The table, CSV: a line a run, a column a term; six digits."""
    terms = sorted({term for one in found.values() for term in one.terms})
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow((*_HEAD, *terms))
    for name, one in found.items():
        error = (one.predicted_s / one.measured_s - 1) * 100
        values = [f"{one.terms[t]:.6g}" if t in one.terms else "" for t in terms]
        table.writerow(
            (name, f"{one.measured_s:.6g}", f"{one.predicted_s:.6g}", f"{error:.1f}", *values)
        )
    return text.getvalue()


def committed(path: Path) -> dict[str, Prediction]:
    """What :func:`written` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return {
            row["id"]: Prediction(
                float(row["measured_s"]), float(row["predicted_s"]),
                {k: float(v) for k, v in row.items() if k not in _HEAD and v},
            )
            for row in csv.DictReader(file)
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, or write; see the module.

    Returns:
        0; 3 where a projection moved.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the table instead")
    parser.add_argument("--workers", type=int, help="processes at a time (default: one a core)")
    asked = parser.parse_args(arguments)
    now = predictions(runs.load(RUNS), lambda *_: None, asked.workers)
    if asked.write:
        TABLE.write_text(written(now), encoding="utf-8")
        return Exit.DONE
    before = committed(TABLE)
    found = moved(now, before)
    for line in found:
        sys.stderr.write(f"{line}\n")
    if found:
        sys.stderr.write("If this is meant: python scripts/regression_gate.py --write\n")
    errors = f"{mean_error(before):.2f} % before, {mean_error(now):.2f} % now"
    sys.stderr.write(f"Mean error: {errors}\n")
    return Exit.REGRESSION if found else Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
