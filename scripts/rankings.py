"""How projections rank alternatives: a page of tables, beside what trivial rules reach.

    python scripts/rankings.py                                writes validation/seed_tables.md
    python scripts/rankings.py RUNS.yaml --only WORD --groups [--every N] --out PAGE.md

The runs are projected in simulate mode, nothing is fitted to them.  Error: projected over measured
step time, less 1.  k: projected over measured throughput, its mean and coefficient of variation.
Rank correlations are those of tokens per second and GPU; regret is what the choice of the best
projection loses against the best measured one.  The trivial rule: whoever recomputes fewer layers
is faster; where it is undecided its regret is the mean of its choices.  ``--groups`` leaves the
runs out and keeps the figures, regret among runs of equal work then.  Runs that share a program
are traced once; ``--every N`` takes the runs of every N-th program.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from primus_ext.runner import runs, scores, validate  # noqa: E402
from primus_ext.runner.outcome import Exit  # noqa: E402

SEEDS = ROOT / "validation" / "seed_runs.yaml"
PAGE = ROOT / "validation" / "seed_tables.md"
_FIGURES = ("runs", "error", "bias", "Spearman", "Kendall", "regret", "worst regret", "k", "cv")


def rate(run: runs.Run, seconds: float) -> float:
    """Tokens per second and GPU of a step time."""
    batch = run["batch"]
    return batch["gbs"] * batch["seq_len"] / run["hardware"]["num_gpus"] / seconds


def recomputed(run: runs.Run) -> int:
    """Layers that a run recomputes, as its table counts them."""
    recompute = run["recompute"]
    if recompute.get("granularity") != "full":
        return 0
    return int(recompute.get("num_layers") or run["model"]["num_layers"])


def summary(rows: Sequence[validate.Row], wanted: Mapping[str, runs.Run], *, sweep: bool) -> dict:
    """Figures of :func:`primus_ext.runner.scores.summary`.

    Args:
        rows: Projected rows.
        wanted: Their runs, by id.
        sweep: Whether all of them are alternatives, compared by throughput; else those of a cell.
    """
    scored = []
    for row in rows:
        measured, predicted = float(row.measured_s or 0), float(row.predicted_s or 0)
        if sweep:  # seconds a token and GPU: batches differ
            measured = 1 / rate(wanted[row.id], measured)
            predicted = 1 / rate(wanted[row.id], predicted)
        scored.append(scores.Scored(measured, predicted, "" if sweep else row.cell))
    return scores.summary(scored)


def trivial(rows: Sequence[validate.Row], wanted: Mapping[str, runs.Run]) -> dict:
    """Rank correlations and regret of the rule that fewer recomputed layers are faster."""
    layers = {row.id: recomputed(wanted[row.id]) for row in rows}
    time = {row.id: 1 / rate(wanted[row.id], float(row.measured_s or 0)) for row in rows}
    found = scores.summary([scores.Scored(time[n], 1 + layers[n], "") for n in layers])
    chosen = [n for n in layers if layers[n] == min(layers.values())]
    best = min(time.values())
    found["regret"] = statistics.mean(100 * (time[n] / best - 1) for n in chosen)
    return found


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _line(name: str, found: Mapping[str, float | None]) -> str:
    cells = [_figure(found.get(key), digits) for key, digits in (
        ("rows", 0), ("mape", 1), ("bias", 1), ("spearman", 3), ("kendall", 3), ("regret", 1),
        ("regret_worst", 1), ("k", 3), ("k_cv", 1),
    )]  # fmt: skip
    return f"| {name} | {' | '.join(cells)} |"


def head(first: str) -> list[str]:
    """The head of a table of figures; errors, regret and cv in percent."""
    return [f"| {first} | {' | '.join(_FIGURES)} |", "|---" * (len(_FIGURES) + 1) + "|"]


def sweep(rows: Sequence[validate.Row], wanted: Mapping[str, runs.Run]) -> list[str]:
    """Tables of one sweep: its runs, their figures, the paper's tool's and the trivial rule's."""
    lines = ["| run | projected | measured | error of the step | k |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda one: -rate(wanted[one.id], float(one.measured_s or 0))):
        run, ratio = wanted[row.id], float(row.ratio or 0)
        measured = rate(run, float(row.measured_s or 0))
        lines.append(
            f"| {row.id} | {measured / ratio:,.0f} | {measured:,.0f} | "
            f"{100 * (ratio - 1):+.1f} % | {1 / ratio:.3f} |"
        )
    other = [
        validate.Row(
            id=row.id, measured_s=row.measured_s, cell=row.cell,
            predicted_s=float(row.measured_s or 0)
            * rate(wanted[row.id], float(row.measured_s or 0))
            / wanted[row.id]["predictions"][0]["tokens_per_s_per_gpu"],
        )
        for row in rows
        if wanted[row.id].get("predictions")
    ]  # fmt: skip
    kept = ("spearman", "kendall", "regret")
    rule = {key: value for key, value in trivial(rows, wanted).items() if key in kept}
    return [
        *lines, "", *head(""), _line("simulated here", summary(rows, wanted, sweep=True)),
        *([_line("the paper's tool, with its GPU", summary(other, wanted, sweep=True))]
          if len(other) == len(rows) else []),
        _line("fewer recomputed layers", rule), "",
    ]  # fmt: skip


def page(rows: Iterable[validate.Row], wanted: Mapping[str, runs.Run], groups: bool) -> str:
    """The page, Markdown."""
    by: dict[str, list[validate.Row]] = defaultdict(list)
    skipped = []
    for row in rows:
        if row.ratio is None:
            skipped.append(f"- {row.id}: {row.skipped}")
        else:
            by[row.group].append(row)
    assert __doc__ is not None
    text = ["# Rankings", "", __doc__.split("\n\n")[2].strip(), ""]
    if groups:
        text += [*head("group"),
                 *(_line(name, summary(one, wanted, sweep=False)) for name, one in by.items())]
        every = [row for one in by.values() for row in one]
        text += [_line("all", summary(every, wanted, sweep=False)), ""]
    else:
        for name, one in by.items():
            text += [f"## {name}", "", *sweep(one, wanted)]
    if skipped:
        text += ["Not projected:", "", *skipped, ""]
    return "\n".join(text)


def thinned(wanted: Sequence[runs.Run], every: int) -> list[runs.Run]:
    """Runs of every ``every``-th program, in the order of the programs' hashes."""
    gathered = validate.gather(wanted, lambda _: False)
    programs = sorted(gathered.programs)[::every]
    kept = {one.name for program in programs for one in gathered.served[program]}
    return [run for run in wanted if run["id"] in kept]


def main(arguments: Sequence[str] | None = None) -> int:
    """Project and write the page; see the module.

    Returns:
        0; 2 where nothing could be projected.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("runs", nargs="?", type=Path, default=SEEDS, help="runs file")
    parser.add_argument("--only", default="", help="runs whose id holds this word")
    parser.add_argument("--groups", action="store_true", help="figures alone")
    parser.add_argument("--every", type=int, default=1, help="take every N-th program")
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write")
    parser.add_argument("--workers", type=int, help="processes at a time (default: one a core)")
    asked = parser.parse_args(arguments)
    chosen = [run for run in runs.load(asked.runs) if asked.only in run["id"]]
    wanted = {run["id"]: run for run in thinned(chosen, asked.every)}
    found = validate.project_runs(
        list(wanted.values()), lambda *_: None, asked.workers, memory=lambda _: False
    )
    rows = [validate.row(run, found[name]) for name, run in wanted.items()]
    asked.out.write_text(page(rows, wanted, asked.groups), encoding="utf-8")
    return Exit.DONE if any(row.ratio is not None for row in rows) else Exit.USAGE


if __name__ == "__main__":
    sys.exit(main())
