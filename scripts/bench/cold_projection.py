"""CPU time and memory of one cold projection, as users run it.

    python scripts/bench/cold_projection.py h100_128x8 parallel.tp=8 parallel.pp=8 train.gbs=1024

CPU seconds of the whole process tree, also in units of a fixed pure-Python loop timed before and
after (so that machines compare), and the highest proportional set size of the tree.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[2]


def unit_s() -> float:
    """CPU seconds of the fixed loop: the median of nine."""
    times = []
    for _ in range(9):
        start, total = time.process_time(), 0
        for i in range(20_000):
            total += i * i % 7
        times.append(time.process_time() - start)
    return statistics.median(times)


def watch(pid: int, peak: list[int], stop: threading.Event) -> None:
    """Keep the highest sum of proportional set sizes of a process and its children, bytes."""
    while not stop.wait(0.1):
        total = 0
        try:
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
        except psutil.NoSuchProcess:
            return
        peak[0] = max(peak[0], total)


def main(target: str, overrides: list[str]) -> int:
    """Run one projection and print what it took."""
    before = unit_s()
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, str(REPO / "scripts" / "train.py"), "model=llama3.1_70b", *overrides,
            "+projection=simulate", f"+target_cluster={target}", f"+projection.out={out}",
            f"hydra.run.dir={out}/run",
        ]  # fmt: skip
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        peak, stop = [0], threading.Event()
        watcher = threading.Thread(target=watch, args=(process.pid, peak, stop))
        watcher.start()
        code = process.wait()
        stop.set()
        watcher.join()
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    unit = (before + unit_s()) / 2
    print(
        f"{target} {' '.join(overrides)}: exit {code}, {cpu:.1f} s CPU = {cpu / unit:.0f} units, "
        f"peak {peak[0] / 2**30:.2f} GiB"
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
