"""Peak memory of published runs, projected and measured: a resumable sweep and its table.

    python scripts/bench/published_memory.py RUNS.yaml OUT.jsonl [--only WORD ...] [--table T.md]

Every complete pretraining run becomes one line of OUT.jsonl as soon as those traced with it are
done; runs that have a line are not projected again, so a killed sweep goes on.  Runs that differ
in nothing that shapes memory share one projection.  With --table nothing is projected: the tables
are written from the lines that are there, and from the mapping of all pretraining runs of
RUNS.yaml to programs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primus_ext.cluster_data import load_accelerator
from primus_ext.runner import peaks, validate
from primus_ext.runner import runs as runs_file

GIB = 2**30
BATCH = 32
"""Runs that are traced together: those of one device share a process, and its imports."""


def microbatches(run: dict[str, Any]) -> tuple[int, int]:
    """Microbatches of a rank in a step, and how many it needs at most to come to its peak.

    Twice the stages fill every schedule of Megatron-LM's; its first and last microbatches are
    special, so as many again are kept.
    """
    degrees, batch = run["parallelism"], run["batch"]
    split = math.prod(degrees.get(name) or 1 for name in ("tp", "pp", "cp"))
    own = batch["gbs"] * split // (batch["mbs"] * run["hardware"]["num_gpus"])
    return own, 4 * (degrees.get("pp") or 1)


def shortened(run: dict[str, Any]) -> dict[str, Any]:
    """A run of the same peak with as few microbatches as are known to do."""
    own, enough = microbatches(run)
    if own <= enough:
        return run
    return {**run, "batch": {**run["batch"], "gbs": run["batch"]["gbs"] // own * enough}}


def memory_key(run: dict[str, Any]) -> str:
    """Hash of all that shapes the peak of a run; more microbatches than fill the pipeline don't.

    Raises:
        validate.Skipped: the run has no program.
    """
    nearest = validate.nearest_program(run)
    argv = list(nearest.argv)
    at = argv.index("--global-batch-size")
    del argv[at + 1]
    what = [argv, nearest.emulations, nearest.accelerator, nearest.nodes, min(microbatches(run))]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def lines(
    batch: list[dict[str, Any]], known: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The lines of runs: projected, or taken from a run with the same key.

    Args:
        batch: The runs.
        known: Lines by key; those of these runs are added.
    """
    keys: dict[str, str | None] = {}
    first: dict[str, dict[str, Any]] = {}
    found: dict[str, validate.Projected | str] = {}
    for run in batch:
        try:
            key = keys[run["id"]] = memory_key(run)
            if key not in known:
                first.setdefault(key, run)
        except validate.Skipped as reason:
            keys[run["id"]], found[run["id"]] = None, str(reason)
    short = [shortened(run) for run in first.values()]
    found |= validate.project_runs(short, lambda *_: None, 1)
    for run in batch:
        key = keys[run["id"]]
        entry = {"id": run["id"], "source": runs_file.source(run)} | ({"key": key} if key else {})
        if run["id"] in found:
            entry |= outcome(run, found[run["id"]])
        elif key is not None:
            entry |= taken(run, known[key])
        if key is not None:
            known.setdefault(key, entry)
        yield entry


def outcome(run: dict[str, Any], found: validate.Projected | str) -> dict[str, Any]:
    """What a projection says of a run."""
    if isinstance(found, str):
        return {"skipped": found}
    if found.memory is None:
        return {"skipped": "its memory was not asked for"}
    return {
        "verdict": found.memory.verdict,
        "capacity": int(load_accelerator(found.nearest.accelerator).hbm_bytes.value),
        "predicted": dict(found.peaks),
        "memory": peaks.beside(run, found.peaks),
        "approximations": list(found.nearest.approximations),
    }


def taken(run: dict[str, Any], same: dict[str, Any]) -> dict[str, Any]:
    """What the line of another run says of this one, which differs in nothing that counts."""
    if "skipped" in same:
        return {"same_as": same["id"], "skipped": same["skipped"]}
    return {
        "same_as": same["id"],
        "verdict": same["verdict"],
        "capacity": same["capacity"],
        "predicted": same["predicted"],
        "memory": peaks.beside(run, same["predicted"]),
        "approximations": list(validate.nearest_program(run).approximations),
    }


def order(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs that say most first: of every kind the heaviest, then the next.

    Heaviest: most tokens of a microbatch on a rank, then fewest GPUs (what is sharded over the
    data-parallel ranks is largest there), then most microbatches.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: [-weight for weight in heaviness(run)]):
        groups.setdefault(kind(run), []).append(run)
    ranked = [(place, run) for group in groups.values() for place, run in enumerate(group)]
    return [run for _, run in sorted(ranked, key=lambda pair: pair[0])]


def heaviness(run: dict[str, Any]) -> tuple[float, ...]:
    """What makes a run heavier than others of its model and GPU, most telling first."""
    degrees, batch = run["parallelism"], run["batch"]
    split = (degrees.get("tp") or 1) * (degrees.get("cp") or 1)
    tokens = (batch.get("mbs") or 0) * (batch.get("seq_len") or 0) / split
    return tokens, -(run["hardware"].get("num_gpus") or 0), batch.get("gbs") or 0


def kind(run: dict[str, Any]) -> tuple[str, ...]:
    """Source, model, GPU, degrees, format and recomputation of a run."""
    parts = (
        (run["model"], ("num_layers", "hidden_size", "num_experts")),
        (run["hardware"], ("gpu",)),
        (run["parallelism"], ("tp", "pp", "vpp", "cp", "ep")),
        (run["precision"], ("compute",)),
        (run["recompute"], ("granularity",)),
    )
    return runs_file.source(run), *(str(part.get(name)) for part, names in parts for name in names)


def sweep(runs: list[dict[str, Any]], out: Path, minutes: float = float("inf")) -> None:
    """Append a line for every run that has none, until the time is over."""
    end = time.monotonic() + 60 * minutes
    before = read(out)
    if out.exists():  # without what a killed sweep left of a line
        out.write_text("".join(json.dumps(entry) + "\n" for entry in before), encoding="utf-8")
    known = {entry["key"]: entry for entry in before if "key" in entry}
    done = {entry["id"] for entry in before}
    left = [run for run in runs if run["id"] not in done]
    for start in range(0, len(left), BATCH):
        if time.monotonic() > end:
            sys.stdout.write(f"{len(left) - start} are left: the time is over\n")
            return
        for number, entry in enumerate(lines(left[start : start + BATCH], known), start + 1):
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            sys.stdout.write(f"{number}/{len(left)} {words(entry)}\n")
        sys.stdout.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """Lines so far; a last line that was cut off is dropped."""
    entries = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(text))
        except ValueError:
            continue
    return entries


def words(entry: dict[str, Any]) -> str:
    """One line for a person."""
    if "skipped" in entry:
        return f"{entry['id']}: skipped: {entry['skipped']}"
    found = [
        f"{unit} {peak['predicted'] / GIB:.2f} of {peak['measured'] / GIB:.2f} GiB "
        f"({(peak['predicted'] / peak['measured'] - 1) * 100:+.2f} %)"
        for unit, peak in entry["memory"].items()
    ] or [f"{entry['predicted'][peaks.ALLOCATED] / GIB:.2f} GiB allocated"]
    return f"{entry['id']}: {entry['verdict']}, {', '.join(found)}"


def table(entries: list[dict[str, Any]]) -> str:
    """Markdown: errors by source and unit, verdicts, and what was skipped for which reason."""
    head = "source|rows|projected|fits / at risk / oom|unit|rows|mean|bias|worst"
    text = [f"|{head}|", "|---" * 9 + "|"]
    for name in sorted({entry["source"] for entry in entries}):
        rows = [entry for entry in entries if entry["source"] == name]
        good = [entry for entry in rows if "skipped" not in entry]
        verdicts = Counter(entry["verdict"] for entry in good)
        said = " / ".join(str(verdicts[word]) for word in ("fits", "at_risk", "oom"))
        found = peaks.errors(entry["memory"] for entry in good)
        start = f"| {name} | {len(rows)} | {len(good)} | {said} |"
        text += [
            f"{start} {unit} | {e['rows']} | {e['mean']:.2f} % | {e['bias']:+.2f} % | "
            f"{e['worst']:+.2f} % |"
            for unit, e in found.items()
        ] or [f"{start} - | 0 | - | - | - |"]
    text += ["", "Measured peaks (each configuration once):", ""]
    text += ["| run | unit | measured GiB | projected GiB | error |", "|---" * 5 + "|"]
    for entry in entries:
        if "skipped" in entry or "same_as" in entry:
            continue
        text += [
            f"| {entry['id']} | {unit} | {p['measured'] / GIB:.2f} | {p['predicted'] / GIB:.2f} | "
            f"{(p['predicted'] / p['measured'] - 1) * 100:+.2f} % |"
            for unit, p in entry["memory"].items()
        ]
    alarms = [entry["id"] for entry in entries if entry.get("verdict") == "oom"]
    text += ["", f"Called oom: {', '.join(alarms) or 'none'}.", "", "Skipped:", ""]
    reasons = Counter((e["source"], e["skipped"]) for e in entries if "skipped" in e)
    text += [f"- {name}: {count} x {why}" for (name, why), count in reasons.items()] or ["- none"]
    return "\n".join(text) + "\n"


def mapping(runs: list[dict[str, Any]]) -> str:
    """Markdown: how many runs of each source have a program, and why others have none."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for run in runs:
        if run.get("workload") == "pretrain":
            try:
                validate.nearest_program(run)
                why = ""
            except validate.Skipped as reason:
                why = str(reason)
            found.setdefault((runs_file.source(run), run["completeness"]), Counter())[why] += 1
    text = ["| source | | runs | with a program | without, why |", "|---" * 5 + "|"]
    for (name, completeness), why in sorted(found.items()):
        rest = "; ".join(f"{count} x {reason}" for reason, count in why.items() if reason)
        text.append(f"| {name} | {completeness} | {why.total()} | {why['']} | {rest or '-'} |")
    return "\n".join(text) + "\n"


def coverage(runs: list[dict[str, Any]], entries: list[dict[str, Any]]) -> str:
    """Markdown: how many complete pretraining runs of each source were projected.

    A run that was not is lighter if one of its kind was that fits, has as many tokens of a
    microbatch on a rank or more, as few GPUs or fewer, and as many microbatches or more.
    """
    by_id = {run["id"]: run for run in runs}
    done = {entry["id"] for entry in entries}
    fits: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    for entry in entries:
        if entry.get("verdict") in ("fits", "at_risk") and entry["id"] in by_id:
            run = by_id[entry["id"]]
            fits.setdefault(kind(run), []).append(weights(run))
    found: dict[str, Counter[str]] = {}
    for run in runs:
        if run.get("workload") == "pretrain" and run.get("completeness") == "complete":
            mine, others = weights(run), fits.get(kind(run), [])
            lighter = any(all(a <= b for a, b in zip(mine, o, strict=True)) for o in others)
            word = "projected" if run["id"] in done else "lighter" if lighter else "left"
            found.setdefault(runs_file.source(run), Counter())[word] += 1
    text = ["| source | complete runs | projected | lighter than one that fits | not projected |"]
    text += ["|---" * 5 + "|"]
    for name, count in sorted(found.items()):
        row = [name, count.total(), count["projected"], count["lighter"], count["left"]]
        text.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(text) + "\n"


def weights(run: dict[str, Any]) -> tuple[float, ...]:
    """As :func:`heaviness`, with microbatches of a rank in place of the global batch."""
    tokens, gpus, _ = heaviness(run)
    return tokens, gpus, microbatches(run)[0]


def main() -> None:
    """Sweep, or write the tables."""
    parser = argparse.ArgumentParser(description="Peak memory of published runs")
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="ids that have one of these words")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--table", type=Path, help="write the tables instead")
    asked = parser.parse_args()
    everything = runs_file.load(asked.runs)
    if asked.table is not None:
        entries = read(asked.out)
        parts = mapping(everything), coverage(everything, entries), table(entries)
        found = "\n".join(parts)
        asked.table.write_text(found, encoding="utf-8")
        return
    runs = [
        run
        for run in everything
        if run.get("workload") == "pretrain" and run.get("completeness") == "complete"
        and (not asked.only or any(word in run["id"] for word in asked.only))
    ]  # fmt: skip
    sweep(order(runs), asked.out, asked.minutes)


if __name__ == "__main__":
    main()
