"""How much of an asynchronous all-reduce of gloo runs beside computation, processes on all cores.

    python scripts/bench/gloo_overlap.py

Every process multiplies matrices, all-reduces a buffer, and does both at once, in turns; the lower
decile of each over all rounds.  What is hidden is what both take one after the other less what they
take together, over the shorter of the two; beside it the part of the all-reduce in which no thread
of the process has a core, which is what a projection hides (``Cluster.hides_communication``).  It
says something only on a machine that nobody else uses.  Writes validation/gloo_overlap.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from primus_ext import this_machine

PAGE = Path(__file__).resolve().parents[2] / "validation" / "gloo_overlap.md"
SIZES = (1 << 20, 4 << 20, 16 << 20)
"""Bytes of the buffer."""
ROUNDS = 40


def measure(size: int) -> tuple[float, float, float, float]:
    """Seconds of computing, of reducing, of both at once, and of work in reducing."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    buffer = torch.randn(size // 4)
    times: list[list[float]] = [[], [], []]
    worked: list[float] = []

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    def timed(which: int, products: int, reduced: bool) -> None:
        dist.barrier()
        begun, cores = time.perf_counter(), time.process_time()
        work = dist.all_reduce(buffer, async_op=True) if reduced else None
        compute(products)
        if work is not None:
            work.wait()
        taken = torch.tensor([time.perf_counter() - begun])
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        times[which].append(float(taken))
        if not products:
            worked.append(time.process_time() - cores)
        buffer.normal_()

    for _ in range(5):
        timed(0, 20, False)
        timed(1, 0, True)
    products = torch.tensor([20 * min(times[1]) / min(times[0])])
    dist.broadcast(products, 0)
    count = max(1, int(products))
    times = [[], [], []]
    for _ in range(ROUNDS):
        timed(0, count, False)
        timed(1, 0, True)
        timed(2, count, True)
    deciles = [sorted(one)[len(one) // 10] for one in times]
    return deciles[0], deciles[1], deciles[2], sorted(worked)[len(worked) // 10]


def worker(rank: int, world: int, rendezvous: str) -> None:
    """One process; the first writes the page."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    rows = [(size, *measure(size)) for size in SIZES]
    if rank:
        return
    lines = [
        "# Gloo's all-reduce beside computation", "",
        f"Written by `python scripts/bench/gloo_overlap.py`: {world} processes on "
        f"{this_machine.cores()} cores, torch {torch.__version__}, lower decile of {ROUNDS}; load "
        f"of the (shared) machine {os.getloadavg()[0]:.1f}.", "",
        "| bytes | compute, ms | all-reduce, ms | both, ms | hidden | without a core |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for size, alone, sent, both, working in rows:
        hidden = (alone + sent - both) / min(alone, sent)
        lines.append(f"| {size:,} | {alone * 1e3:.2f} | {sent * 1e3:.2f} | {both * 1e3:.2f} | "
                     f"{hidden:.0%} | {1 - min(1, working / sent):.0%} |")  # fmt: skip
    PAGE.write_text("\n".join(lines) + "\n")
    sys.stdout.write(PAGE.read_text())


def main() -> None:
    """Start a process a core."""
    world = max(2, this_machine.cores())
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(rank), str(world), f"{scratch}/meet"])
            for rank in range(world)
        ]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a process failed")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    else:
        main()
