#!/usr/bin/env python
"""The oracle of memory: three peaks of every pipeline role of every job of the covering design.

``python scripts/oracle.py [--only m01 m02] [--work DIR]`` runs what is not in DIR yet and writes
``validation/memory_oracle.csv``, where sides of configurations that are neither in DIR nor run
stay as they are.  Peaks are bytes of live tensors in the second step:

* composed: what a projection says (``memory.per_role[].peak_bytes``);
* virtual: Megatron's own loop on that rank, tensors without storage, metered by our recorder;
* real: the same with real tensors on this machine, metered by PyTorch's allocator events.

``scripts/oracle_gloo.py`` does that with every rank a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ROOT / "validation" / "memory_oracle.yaml"
TABLE = ROOT / "validation" / "memory_oracle.csv"
PROGRAM = "primus_ext.frameworks.megatron.gpt_program"
SIDES = ("composed", "virtual", "real")
NOT_RUN = "-"
DIFFERENCES = ("virtual - composed", "real - virtual")
COLUMNS: tuple[str, ...] = ("id", "role", *SIDES, *DIFFERENCES, "reason", "asked")
SLICE = 4
"""Configurations that one process answers; their results are kept when it ends."""
TARGETS = {(9, 0): "h100", (10, 0): "b200"}


def request(entry: dict[str, Any], side: str, work: Path) -> dict[str, Any]:
    """What the emulation of one side of a configuration is asked."""
    world, stages = entry["world"], stage_count(entry)
    asked: dict[str, Any] = {
        "module": PROGRAM,
        "args": entry["args"].split(),
        "cwd": str(work),
        "device": {
            "name": TARGETS[tuple(entry["capability"])],
            "compute_capability": entry["capability"],
            "total_memory": 80 * 2**30,
            "multi_processor_count": 132,
            "warp_size": 32,
        },
        "world_size": world,
        "gpus_per_node": 1,
        "frameworks": ["primus_ext.frameworks.megatron"],
        "result": str(answer_path(entry, side, work)),
        "origins": False,
        "timeout_s": 900,
    }
    if side != "composed":
        asked |= {"whole": True, "ranks": [s * world // stages for s in range(stages)]}
    if side == "real":
        asked["storage"] = "real"
    return asked


def work_of(entry: dict[str, Any]) -> int:
    """Layers that run in one step, over all stages and microbatches."""
    words = entry["args"].split()
    number = {w: int(words[i + 1]) for i, w in enumerate(words) if w in _SIZES}
    layers, mbs, gbs = (number[name] for name in _SIZES)
    return layers * gbs // (mbs * int(entry["knobs"]["dp"]))


_SIZES = ("--num-layers", "--micro-batch-size", "--global-batch-size")


def stage_count(entry: dict[str, Any]) -> int:
    """Pipeline stages of a configuration."""
    return int(entry["knobs"]["pipeline"].partition("x")[0])


def answer_path(entry: dict[str, Any], side: str, work: Path) -> Path:
    """Where the answer lies, by what was asked: another design keeps what is the same."""
    return work / f"{asked_of(entry)}.{side}.json"


def asked_of(entry: dict[str, Any]) -> str:
    """Digest of what a configuration asks for; its id may come to mean another one."""
    asked = json.dumps([entry["world"], entry["capability"], entry["args"]])
    return hashlib.sha256(asked.encode()).hexdigest()[:12]


def run(entries: Iterable[dict[str, Any]], sides: Iterable[str], work: Path) -> None:
    """Answer what is missing, cheap ones first, in processes that share their start."""
    pending: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for entry in sorted(entries, key=work_of):
        asked = [
            request(entry, side, work)
            for side in sides
            if not answer_path(entry, side, work).exists()
        ]
        pending.setdefault(tuple(entry["capability"]), []).extend(asked)
    for requests in pending.values():
        size = SLICE * len(SIDES)
        for start in range(0, len(requests), size):
            answer(requests[start : start + size], work)


def start(requests: Path) -> subprocess.Popen[bytes]:
    """Start a process over requests that are alike."""
    return subprocess.Popen(
        [sys.executable, "-m", "primus_ext.emulate.batch", str(requests)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def answer(requests: list[dict[str, Any]], work: Path) -> None:
    """Run one process over requests that are alike."""
    path = work / "requests.json"
    path.write_text(json.dumps(requests))
    if start(path).wait():
        sys.exit(f"the emulation of {path} ended with an error")


def peaks(entry: dict[str, Any], side: str, work: Path) -> list[int] | str:
    """Peak of every role, or why there is none (:data:`NOT_RUN`, or what refuses it)."""
    path = answer_path(entry, side, work)
    if not path.exists():
        return NOT_RUN
    found = json.loads(path.read_text())
    if found["status"] != "ok":
        return str(found["message"])
    if side != "composed":
        return [trace["peak_bytes"] for trace in found["traces"]]
    cluster = load_cluster(TARGETS[tuple(entry["capability"])], entry["world"], 1)
    plan, traces = found["plan"], found["traces"]
    try:
        projected = compose.project(
            trace_io.plan_from_plain(plan), trace_io.traces_from_plain(traces), cluster,
            mode="simulate",
        )  # fmt: skip
    except ValueError as error:  # of the plan, the schedule or the target
        return str(error)
    return [role.peak_bytes for role in projected.memory.per_role]


def rows(
    entries: Iterable[dict[str, Any]], work: Path, before: Sequence[dict[str, str]] = ()
) -> list[dict[str, Any]]:
    """One row a role of every configuration: the peaks and their differences.

    Args:
        entries: Configurations.
        work: Where answers lie.
        before: Rows of a table; sides that were not run stay as they are there.
    """
    table: list[dict[str, Any]] = []
    for entry in entries:
        found = {side: peaks(entry, side, work) for side in SIDES}
        found = carried(entry, found, before)
        for role in range(stage_count(entry)):
            row: dict[str, Any] = {"id": entry["id"], "role": f"pp stage {role}"}
            row["asked"] = asked_of(entry)
            for side, values in found.items():
                row[side] = values[role] if isinstance(values, list) else values
            row["virtual - composed"] = difference(row["virtual"], row["composed"])
            row["real - virtual"] = difference(row["real"], row["virtual"])
            row["reason"] = reason(entry, row)
            table.append(row)
    return table


def carried(
    entry: dict[str, Any], found: dict[str, Any], before: Sequence[dict[str, str]]
) -> dict[str, Any]:
    """Peaks with those of the table where a side was not run again."""
    mine = [row for row in before if row["id"] == entry["id"] and row["asked"] == asked_of(entry)]
    known = {side: [row[side] for row in mine] for side in found if mine}
    return {
        side: [int(v) if v.isdigit() else v for v in known[side]]
        if values == NOT_RUN and known
        else values
        for side, values in found.items()
    }


def reason(entry: dict[str, Any], row: dict[str, Any]) -> str:
    """Why the peaks of a row differ or are none; "" where they are equal."""
    words = [str(row[side]) for side in SIDES if not isinstance(row[side], int)]
    if words:
        return "; ".join(dict.fromkeys(_short(word) for word in words))
    differs = any(row[column] for column in DIFFERENCES)
    return OPEN.get(entry["id"], "") if differs else ""


def _short(answer: str) -> str:
    """What the answer of a side that gave no peaks comes to."""
    if answer == NOT_RUN:
        return "not run yet"
    known = next((words for sign, words in NO_PEAKS.items() if sign in answer), None)
    return known or f"not explained: {answer.strip().splitlines()[0] if answer.strip() else '-'}"


NO_PEAKS = {
    "the framework refuses": "Megatron refuses the job",
    "pop from empty list": "open: Transformer Engine's checkpoint ends with an IndexError; FP8, "
    "recomputed MLP, predictions",
    "the Hadamard transform": "not run since NVFP4 has arithmetic",
}
"""Sides that gave no peaks: a part of their answer, and what it comes to."""

OPEN: dict[str, str] = {"m70": NO_PEAKS["pop from empty list"]}
"""Configurations whose answers are not explained yet, as of the committed table."""


def difference(one: Any, other: Any) -> int | str:
    """``one - other`` if both are numbers."""
    return one - other if isinstance(one, int) and isinstance(other, int) else ""


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="ids of configurations")
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "memory_oracle")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    entries = yaml.safe_load(DESIGN.read_text())
    chosen = [e for e in entries if options.only is None or e["id"] in options.only]
    run(chosen, options.sides, work)
    with TABLE.open(newline="") as file:
        before = list(csv.DictReader(file))
    found = rows(entries, work, before)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
