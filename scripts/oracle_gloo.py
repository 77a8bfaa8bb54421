#!/usr/bin/env python
"""The oracle of memory over real ranks: every rank of small jobs, each a process, over gloo.

``python scripts/oracle_gloo.py [--only NAME ...] [--work DIR]`` runs what is not in DIR yet and
writes ``validation/memory_gloo.csv``.  Beside the peaks of ``scripts/oracle.py``, of every rank:

* gloo: all ranks are real; PyTorch's allocator events, the buffers of the backend included;
* gloo_buffers: what of that its backend made, at the moment of the peak;
* program: the peak of the same run without what the backend made;
* gloo_difference: gloo - real.  ``explained_by`` names the buffers, if without them the peak is
  the real one to the byte.  Both come from the allocator's events of that very run.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import oracle
import oracle_design
import yaml

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose

TABLE = oracle.ROOT / "validation" / "memory_gloo.csv"
GLOO, MOST_PROCESSES = "gloo", 4
SLICE = 12
"""Requests that one process answers; their results are kept when it ends."""
COLUMNS: tuple[str, ...] = (
    "id", "rank", "composed", "virtual", "real", "gloo", "gloo_difference", "gloo_buffers",
    "program", "explained_by",
)  # fmt: skip
PLAIN = {knob: next(iter(values)) for knob, values in oracle_design.KNOBS.items()} | {
    "optimizer": "distributed", "attention": "gqa", "microbatches": "equal",
}  # fmt: skip
"""Knobs of ``scripts/oracle_design.py`` that a job of :data:`JOBS` does not name."""
_EXPERTS = {"mlp": "grouped", "ep": "2", "dispatcher": "alltoall"}
JOBS: dict[str, dict[str, str]] = {
    "tp2 sp": {"tp": "2 sp"},
    "pp2": {"pipeline": "2", "microbatches": "more"},
    "pp2 vpp2": {"pipeline": "2x2"},
    "cp2 a2a": {"cp": "2 a2a"},
    "cp2 all-gather": {"cp": "2 all_gather"},
    "cp2 ring": {"cp": "2 p2p"},
    "ep2": {"dp": "2", **_EXPERTS},
    "dp2 overlapped": {"dp": "2", "optimizer": "overlap both"},
    "dp2 plain": {"dp": "2", "optimizer": "plain overlap"},
    "tp2 sp pp2": {"tp": "2 sp", "pipeline": "2"},
    "tp2 sp ep2": {"tp": "2 sp", **_EXPERTS, "ep": "2 etp1"},
    "pp2 recomputed": {"pipeline": "2", "recompute": "uniform"},
    "tp2 sp fp8 delayed": {"tp": "2 sp", "precision": "fp8 delayed", "recompute": "core_attn"},
    "dp2 fp8 blockwise": {"dp": "2", "precision": "fp8 blockwise", "optimizer": "overlap grad"},
}
"""Few knobs at a time, so that a difference has one cause; pairs are the covering design's."""


def jobs() -> list[dict[str, Any]]:
    """:data:`JOBS`, then what of the covering design has few enough ranks."""
    found = []
    for name, knobs in JOBS.items():
        config = PLAIN | knobs
        assert all(oracle_design.legal(config, knob) for knob in config), name
        size = oracle_design.degrees(config)
        found.append(
            {"id": name, "world": size["tp"] * size["pp"] * size["cp"] * size["dp"],
             "capability": [9, 0], "knobs": config, "args": oracle_design.arguments(config)}
        )  # fmt: skip
    design = yaml.safe_load(oracle_design.DESIGN.read_text())
    return found + [e for e in design if 1 < e["world"] <= MOST_PROCESSES]


def every_rank(entry: dict[str, Any], side: str, work: Path) -> dict[str, Any]:
    """The request of ``scripts/oracle.py`` for all ranks instead of one of a stage."""
    request = oracle.request(entry, "real" if side == GLOO else side, work)
    result = str(oracle.answer_path(entry, f"{side}.all", work))
    return request | {"ranks": list(range(entry["world"])), "result": result}


def run(entries: Sequence[dict[str, Any]], work: Path) -> None:
    """Answer what is missing: what needs one process in few of them, then one job at a time."""
    asked = [every_rank(entry, side, work) for entry in entries for side in oracle.SIDES]
    missing = [one for one in asked if not Path(one["result"]).exists()]
    for device in oracle.TARGETS.values():
        alike = [one for one in missing if one["device"]["name"] == device]
        for start in range(0, len(alike), SLICE):
            oracle.answer(alike[start : start + SLICE], work)
    for entry in entries:
        whole = every_rank(entry, GLOO, work)
        if not Path(whole["result"]).exists():
            Path(whole["result"]).write_text(json.dumps(over_gloo(entry, whole, work)))


def over_gloo(entry: dict[str, Any], whole: dict[str, Any], work: Path) -> dict[str, Any]:
    """Run all ranks of a job at once, and put their answers together.

    Args:
        entry: The job.
        whole: The request for all its ranks.
        work: Where requests and answers lie.
    """
    base, running, found = Path(whole["result"]), [], []
    base.with_suffix(".meet").unlink(missing_ok=True)
    for rank in range(entry["world"]):
        one = {"ranks": [rank], "rendezvous": str(base.with_suffix(".meet"))}
        result = base.with_suffix(f".{rank}.json")
        result.unlink(missing_ok=True)
        file = work / f"requests.{rank}.json"
        file.write_text(json.dumps([whole | one | {"result": str(result)}]))
        running.append((oracle.start(file), result))
    for process, result in running:
        process.wait()
        if not result.exists():
            sys.exit(f"{entry['id']}: a rank left no answer; see {result}.log")
        found.append(json.loads(result.read_text()))
    refused = [answer for answer in found if answer["status"] != "ok"]
    return refused[0] if refused else {
        **found[0], "traces": [answer["traces"][0] for answer in found]
    }  # fmt: skip


def composed(entry: dict[str, Any], answer: dict[str, Any]) -> list[int]:
    """Peak of every rank as composition gives it, from the traces of all of them."""
    plan, traces = answer["plan"], trace_io.traces_from_plain(answer["traces"])
    cluster = load_cluster(oracle.TARGETS[tuple(entry["capability"])], entry["world"], 1)
    stages = oracle.stage_count(entry)
    width = entry["world"] // stages
    found = [0] * entry["world"]
    for first in range(width):
        members = range(first, entry["world"], width)
        projected = compose.project(
            trace_io.plan_from_plain(plan), [traces[rank] for rank in members], cluster,
            mode="simulate",
        )  # fmt: skip
        for rank, role in zip(members, projected.memory.per_role, strict=True):
            found[rank] = role.peak_bytes
    return found


def rows(entries: Iterable[dict[str, Any]], work: Path) -> list[dict[str, Any]]:
    """One row a rank of every job that was run."""
    table: list[dict[str, Any]] = []
    for entry in entries:
        paths = {side: oracle.answer_path(entry, f"{side}.all", work)
                 for side in (*oracle.SIDES, GLOO)}  # fmt: skip
        if not all(path.exists() for path in paths.values()):
            continue
        found = {side: json.loads(path.read_text()) for side, path in paths.items()}
        refused = [one["message"] for one in found.values() if one["status"] != "ok"]
        if refused:
            table.append({"id": entry["id"], "explained_by": refused[0]})
            continue
        peaks = composed(entry, found["composed"])
        for rank, ours in enumerate(peaks):
            sides = {side: found[side]["traces"][rank] for side in ("virtual", "real", GLOO)}
            buckets = found["composed"]["traces"][rank]["buckets"]
            named = {"id": entry["id"], "rank": rank, "composed": ours}
            table.append(named | row(sides, buckets))
    return table


def row(sides: dict[str, dict[str, Any]], buckets: list[dict[str, Any]]) -> dict[str, Any]:
    """Peaks of one rank.

    Args:
        sides: Answers of virtual, real and gloo for that rank.
        buckets: Of its gradients and parameters, as they were recorded.
    """
    virtual, real, gloo = (sides[side] for side in ("virtual", "real", GLOO))
    difference = gloo["peak_bytes"] - real["peak_bytes"]
    exact = gloo["program_peak_bytes"] == real["peak_bytes"]
    return {
        "virtual": virtual["peak_bytes"],
        "real": real["peak_bytes"],
        "gloo": gloo["peak_bytes"],
        "gloo_difference": difference,
        "gloo_buffers": sum(size * count for size, count, _ in gloo["backend"]),
        "program": gloo["program_peak_bytes"],
        "explained_by": explained(gloo["backend"], buckets) if difference and exact else "",
    }


def explained(backend: list[list[Any]], buckets: list[dict[str, Any]]) -> str:
    """What gloo's buffers at the peak are.

    Args:
        backend: Size, number and operator of those buffers.
        buckets: Of the rank's gradients (``grad_bytes``) and parameters (``param_bytes``).
    """
    words = []
    for size, count, operator in backend:
        copied = ""
        for sign, key, what in COPIED:
            if sign in operator and size in [bucket[key] for bucket in buckets]:
                copied = f", a copy of a bucket's {what}"
        words.append(f"{count} x {size:,} B of {operator}{copied}")
    return "; ".join(words)


COPIED = (("reduce_scatter", "grad_bytes", "gradients"), ("gather", "param_bytes", "parameters"))
"""What an operator moves of a bucket: part of its name, key of the bytes, word."""


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of jobs")
    parser.add_argument("--work", type=Path, default=oracle.ROOT / "outputs" / "memory_gloo")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    entries = jobs()
    run([e for e in entries if options.only is None or e["id"] in options.only], work)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(entries, work))


if __name__ == "__main__":
    main()
