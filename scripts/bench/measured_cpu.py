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

from primus_ext.cluster_data import load_cluster
from primus_ext.runner import child, emulation

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "validation" / "measured_cpu.yaml"
TABLE = ROOT / "validation" / "measured_cpu.md"
WORKER = Path(__file__).with_name("measured_cpu_worker.py")
TRAINER = ROOT / "scripts" / "train.py"
WARM_UP, STEPS = 4, 15


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One row."""

    id: str
    world: int
    overrides: tuple[str, ...]


def jobs(only: Sequence[str] | None) -> list[Job]:
    """Those of the file, or those that are named."""
    content = yaml.safe_load(JOBS.read_text())
    sizes: dict[str, str] = content["sizes"]
    found = [
        Job(row["id"], row["world"], (*sizes[row["size"]].split(), *row["args"].split()))
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


def virtual_ranks(
    asked: dict[str, Any], ranks: list[int], side: Side, folder: Path
) -> tuple[threading.Thread, dict[str, Any]]:
    """The measurement, led from here, in a thread; its answer comes into the dictionary."""
    answer: dict[str, Any] = {}
    scratch = folder / "measure"
    scratch.mkdir()
    pace = {"leader": side.address, "warm_up": WARM_UP, "steps": STEPS}

    def run() -> None:
        answer.update(
            child.run({**asked, "measure": pace, "ranks": ranks}, [], scratch,
                      folder / "measure.log", lambda *_: None)
        )  # fmt: skip

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, answer


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Trace, measure and run one job.

    Returns:
        ``answer`` and ``measured`` of the children, ``real`` seconds of the real steps.
    """
    asked = question(job, folder)
    scratch = folder / "trace"
    scratch.mkdir()
    answer = child.run(asked, [], scratch, folder / "trace.log", lambda *_: None)
    ranks = [trace["rank"] for trace in answer["traces"]]
    virtual = Side(folder, "virtual", max(job.world, len(ranks)))
    real = Side(folder, "real", job.world)
    thread, found = virtual_ranks(asked, ranks, virtual, folder)
    with real_ranks(job, real, folder):
        seconds: list[float] = []
        for step in range(WARM_UP + STEPS):
            virtual.step()
            took = real.step()
            if step >= WARM_UP:
                seconds.append(took)
    thread.join(120)
    virtual.close()
    real.close()
    return {"answer": answer, "measured": found["traces"], "real": seconds}


def hooks(folder: Path) -> float:
    """Seconds of steps with hooks over those without, by medians of steps that take turns."""
    job = jobs(["medium-dense-dp2"])[0]
    asked = {**question(job, folder), "ranks": [0], "gpus_per_node": 1}
    sides = [Side(folder, name, 1) for name in ("with", "without")]
    found: list[list[float]] = [[], []]
    threads = []
    for side, parts in zip(sides, (True, False), strict=True):
        scratch = folder / f"hooks{parts}"
        scratch.mkdir()
        pace = {"leader": side.address, "warm_up": WARM_UP, "steps": 41, "profile": False,
                "parts": parts}  # fmt: skip
        threads.append(threading.Thread(
            target=child.run, daemon=True,
            args=({**asked, "measure": pace}, [], scratch, scratch / "log", lambda *_: None),
        ))  # fmt: skip
        threads[-1].start()
    for step in range(WARM_UP + 41):
        for place, side in enumerate(sides):
            seconds = side.step()
            if step >= WARM_UP:
                found[place].append(seconds)
    for thread in threads:
        thread.join(120)
    ratios = [one / other for one, other in zip(*found, strict=True)]
    return statistics.median(ratios)


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--hooks", action="store_true", help="only what the hooks cost")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "measured_cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.hooks:
        with tempfile.TemporaryDirectory(prefix="primus_ext_bench_") as name:
            sys.stdout.write(f"with hooks / without: {hooks(Path(name)):.4f}\n")
        return
    for job in jobs(options.only):
        with tempfile.TemporaryDirectory(prefix="primus_ext_bench_") as name:
            found = run(job, Path(name))
        (options.out / f"{job.id}.json").write_text(json.dumps(found))
        sys.stdout.write(f"{job.id}: real {statistics.median(found['real']) * 1e3:.1f} ms\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
