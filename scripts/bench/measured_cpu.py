#!/usr/bin/env python
"""Steps projected from measured ranks against real steps over gloo, on this machine.

``python scripts/bench/measured_cpu.py [--only ID ...] [--write]`` takes the jobs of
``validation/measured_cpu.yaml``.  For each of them two kinds of processes stand side by side: the
ranks that ``+projection=measure`` would run (one of each kind and copies of them, the other ranks
virtual), and the real ranks of the job.  Their steps take turns, so that both meet the same
machine; while one side runs the other waits.  The table goes to ``validation/measured_cpu.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import yaml

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.measurement import RankMeasurement, merged
from primus_ext.project import compose
from primus_ext.project.observed import Measured
from primus_ext.project.result import Projection
from primus_ext.runner import child, emulation, shrink

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "validation" / "measured_cpu.yaml"
TABLE = ROOT / "validation" / "measured_cpu.md"
WORKER = Path(__file__).with_name("measured_cpu_worker.py")
TRAINER = ROOT / "scripts" / "train.py"
WARM_UP, STEPS = 4, 9


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One row."""

    id: str
    world: int
    overrides: tuple[str, ...]
    small: bool = False
    """Whether it is projected from a world of one too."""


def jobs(only: Sequence[str] | None) -> list[Job]:
    """Those of the file, or those that are named."""
    content = yaml.safe_load(JOBS.read_text())
    sizes: dict[str, str] = content["sizes"]
    found = [
        Job(row["id"], row["world"], (*sizes[row["size"]].split(), *row["args"].split()),
            row.get("small", False))
        for row in content["jobs"]
    ]
    return [job for job in found if not only or job.id in only]


class Side:
    """Processes that begin their steps together."""

    def __init__(self, folder: Path, name: str, size: int) -> None:
        """Listen for ``size`` processes."""
        self.address, self.size = str(folder / name), size
        self._listener = Listener(self.address, "AF_UNIX", backlog=size)
        self._connections: list[Connection] = []

    def step(self) -> float:
        """Let all of them run a step; seconds of the slowest."""
        while len(self._connections) < self.size:
            self._connections.append(self._listener.accept())
        for connection in self._connections:
            connection.recv()
        for connection in self._connections:
            connection.send("go")
        return max(connection.recv()[1] for connection in self._connections)

    def close(self) -> None:
        """Nobody is led any longer."""
        for connection in self._connections:
            connection.close()
        self._listener.close()


@contextmanager
def real_ranks(job: Job, side: Side, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The job itself, one process a rank, over gloo."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(job.world):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.world), "LOCAL_WORLD_SIZE": str(job.world),
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable, str(WORKER), side.address, str(TRAINER), *job.overrides,
            f"train.steps={WARM_UP + STEPS + 1}", f"train.log_interval={WARM_UP + STEPS + 1}",
            f"hydra.run.dir={folder}/real{rank}", "hydra.output_subdir=null",
        ]  # fmt: skip
        log = (folder / f"real{rank}.log").open("wb")
        processes.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def question(job: Job, folder: Path) -> dict[str, Any]:
    """What the bootstrap is asked about a job."""
    cluster = load_cluster("cpu", 1, job.world)
    return {
        "script": str(TRAINER),
        "args": [*job.overrides, f"hydra.run.dir={folder}/child", "hydra.output_subdir=null"],
        "cwd": str(ROOT),
        "name": job.id,
        **emulation.question(cluster),
    }


class Virtual:
    """Measured ranks, led from here; their answer comes when the last step is over."""

    def __init__(
        self, name: str, asked: dict[str, Any], ranks: list[int], folder: Path, steps: int = STEPS,
        beside: int | None = None, **pace: Any,
    ) -> None:  # fmt: skip
        """Start them.

        Args:
            name: Of the side.
            asked: What the bootstrap is asked about the job.
            ranks: Global ranks, one of each kind.
            folder: For what they leave.
            steps: That count.
            beside: Processes in all; by default the ranks of the machine.
            pace: Further settings of the measurement.
        """
        scratch = folder / name
        scratch.mkdir()
        size = beside or max(asked["gpus_per_node"], len(ranks))
        self.side = Side(folder, f"{name}.socket", size)
        wanted = {"leader": self.side.address, "warm_up": WARM_UP, "steps": steps, **pace}
        self.answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, args=(
            {**asked, "measure": wanted, "ranks": ranks}, scratch,
        ))  # fmt: skip
        self._thread.start()

    def _run(self, asked: dict[str, Any], scratch: Path) -> None:
        self.answer.update(child.run(asked, [], scratch, scratch / "log", lambda *_: None))

    def finish(self) -> list[dict[str, Any]]:
        """Measurements of all processes."""
        self._thread.join(300)
        self.side.close()
        return self.answer["traces"]


def ask(asked: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """What a child answers."""
    scratch = folder / name
    scratch.mkdir()
    return child.run(asked, [], scratch, scratch / "log", lambda *_: None)


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Trace, measure and run one job.

    Returns:
        ``answer`` and ``measured`` of the children, ``real`` seconds of the real steps, ``peaks``
        of the ranks that ran with real tensors, and ``small``, the same of a world of one.
    """
    asked = question(job, folder)
    answer = ask(asked, folder, "trace")
    ranks = [trace["rank"] for trace in answer["traces"]]
    real_tensors = {"whole": True, "storage": "real", "ranks": ranks}
    metered = ask({**asked, **real_tensors}, folder, "peak")["traces"]
    plan = trace_io.plan_from_plain(answer["plan"])
    small: dict[str, Any] = {}
    if job.small:
        shrunk = {**asked, "shrunk": shrink.changes(plan, 1)}
        small = {"traces": ask(shrunk, folder, "small trace")["traces"]}
    sides = [Virtual("virtual", asked, ranks, folder)]
    if small:
        sides.append(Virtual("small", shrunk, [0], folder))
    real = Side(folder, "real.socket", job.world)
    with real_ranks(job, real, folder):
        seconds: list[float] = []
        for step in range(WARM_UP + STEPS):
            for virtual in sides:
                virtual.side.step()
            took = real.step()
            if step >= WARM_UP:
                seconds.append(took)
    measured_ranks = sides[0].finish()
    if small:
        small["measured"] = sides[1].finish()
    real.close()
    return {"answer": answer, "measured": measured_ranks, "real": seconds, "small": small,
            "peaks": [one["program_peak_bytes"] for one in metered]}  # fmt: skip


def projected(
    job: Job, found: dict[str, Any], collectives: MeasuredCollectives, small: bool
) -> Projection:
    """The job's step from one of the two ways to measure."""
    answer = found["answer"]
    traces = trace_io.traces_from_plain(answer["traces"])
    alike = {trace.rank: trace.pp_ranks for trace in traces}
    source = found["small"] if small else found
    ranks = [trace_io.from_plain(RankMeasurement, value) for value in source["measured"]]
    if not small:
        ranks = [dataclasses.replace(one, pp_ranks=alike[one.rank]) for one in ranks]
    basis = Measured(
        ranks=merged(ranks), accelerator="cpu",
        small=tuple(trace_io.traces_from_plain(source["traces"])) if small else (),
    )  # fmt: skip
    return compose.project(
        trace_io.plan_from_plain(answer["plan"]), traces, load_cluster("cpu", 1, job.world),
        mode="measure", measured=basis, collectives=collectives,
    )  # fmt: skip


def row(job: Job, found: dict[str, Any], collectives: MeasuredCollectives) -> dict[str, Any]:
    """What the table says of a job."""
    real = statistics.median(found["real"])
    one = projected(job, found, collectives, small=False)
    other = projected(job, found, collectives, small=True) if found["small"] else None
    own = sum(t.exposed_seconds for t in one.breakdown if t.evidence.startswith("measured: median"))
    peaks = [role.peak_bytes for role in one.memory.per_role]
    step = one.throughput.step_s
    return {
        "id": job.id, "world": job.world, "real": real, "projected": step,
        "error": step / real - 1.0, "own": own / step,
        "small": None if other is None else other.throughput.step_s / step - 1.0,
        "bytes": peaks == found["peaks"],
    }  # fmt: skip


def table(rows: list[dict[str, Any]], machine: str) -> str:
    """The Markdown of :data:`TABLE`."""
    lines = [
        "# Steps projected from single ranks against real steps over gloo", "",
        "`python scripts/bench/measured_cpu.py`: one rank of each kind with virtual peers is "
        "measured, copies of them load the other cores; steps of both sides take turns, "
        f"{STEPS} after {WARM_UP}; medians.  {machine}", "",
        "| job | processes | real step | projected | error | own work | from a world of one | "
        "peak bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        small = "" if one["small"] is None else f"{one['small']:+.1%}"
        lines.append(
            f"| {one['id']} | {one['world']} | {one['real'] * 1e3:.0f} ms | "
            f"{one['projected'] * 1e3:.0f} ms | {one['error']:+.1%} | {one['own']:.0%} | {small} | "
            f"{'equal' if one['bytes'] else 'differ'} |"
        )
    for world in sorted({one["world"] for one in rows}):
        errors = [one["error"] for one in rows if one["world"] == world]
        sizes = sorted(map(abs, errors))
        lines += ["", f"{world} processes: median error {statistics.median(sizes):.1%}, worst "
                  f"{sizes[-1]:.1%}, bias {statistics.mean(errors):+.1%} ({len(errors)} jobs)."]
    lines += ["", "Error: projected over real, less 1.  Own work: share of the projected step that "
              "was measured on the rank itself; the rest is collectives, priced from a sweep on "
              "the same machine, and the bubble.  From a world of one: the step projected from "
              "one process that runs a smaller job, over that from the exact shard.  Peak bytes: "
              "of live tensors, projected against the rank run with real tensors."]  # fmt: skip
    if any(one["world"] > (os.cpu_count() or 1) for one in rows):
        lines += ["", f"Four processes share {os.cpu_count()} cores: each is measured while the "
                  "other three run."]  # fmt: skip
    return "\n".join(lines) + "\n"


def hooks(folder: Path, steps: int = 41) -> float:
    """Seconds of steps with hooks over those without: the median of pairs that take turns."""
    job = jobs(["medium-dense-dp2"])[0]
    asked = {**question(job, folder), "gpus_per_node": 1}
    sides = [
        Virtual(f"hooks {parts}", asked, [0], folder, steps, 1, profile=False, parts=parts)
        for parts in (True, False)
    ]
    ratios = []
    for step in range(WARM_UP + steps):
        one, other = (virtual.side.step() for virtual in sides)
        if step >= WARM_UP:
            ratios.append(one / other)
    for virtual in sides:
        virtual.finish()
    return statistics.median(ratios)


def sweep(processes: int, path: Path) -> None:
    """Measure the collectives of this machine."""
    subprocess.run(
        [sys.executable, "-m", "primus_ext.observe.collective_sweep", "--processes",
         str(processes), "--out", str(path)],
        check=True, cwd=ROOT,
    )  # fmt: skip


def main() -> None:
    """Run the jobs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="ids of jobs")
    parser.add_argument("--hooks", action="store_true", help="only what the hooks cost")
    parser.add_argument("--write", action="store_true", help="write validation/measured_cpu.md")
    parser.add_argument("--again", action="store_true", help="the table of what was run before")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "measured_cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.hooks:
        with tempfile.TemporaryDirectory(prefix="primus_ext_bench_") as name:
            sys.stdout.write(f"with hooks / without: {hooks(Path(name)):.4f}\n")
        return
    chosen = jobs(options.only)
    gloo = {world: options.out / f"gloo{world}.json" for world in {job.world for job in chosen}}
    for world, path in gloo.items():
        if not (options.again and path.exists()):
            sweep(world, path)
    rows = []
    for job in chosen:
        kept = options.out / f"{job.id}.json"
        if not (options.again and kept.exists()):
            with tempfile.TemporaryDirectory(prefix="primus_ext_bench_") as name:
                kept.write_text(json.dumps(run(job, Path(name))))
        collectives = MeasuredCollectives.of_files([gloo[job.world]])
        rows.append(row(job, json.loads(kept.read_text()), collectives))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    text = table(rows, f"{os.cpu_count()} cores.")
    sys.stdout.write(text)
    if options.write:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
