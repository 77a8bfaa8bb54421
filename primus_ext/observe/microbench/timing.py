"""Samples of one execution: warm-up, repetitions, and the clock of the device."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from primus_ext.observe.microbench.tensors import Run

SHORT_S = 2e-4
"""On a CPU an execution that is shorter is repeated within one sample until it takes this long:
reading the clock and calling through Python cost about a microsecond."""
_FLUSH_BYTES = 256 << 20
"""Written between two samples on a GPU; more than any L2 cache (B200: 126 MB), so that operands
come from memory, and long enough that the host is ahead when the sample starts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """What was measured."""

    samples: tuple[float, ...]
    """Seconds of one execution, in order."""
    device_s: float
    """Seconds that the device was kept busy with it, warm-up included."""
    executions: int
    """In each sample."""
    warmup: int


Clock = Callable[[Run, int], float]
"""Seconds of so many executions in a row."""


def sample(run: Run, clock: Clock, repetitions: int, warmup: int, short_s: float) -> Sampled:
    """Time an op.

    Args:
        run: One execution.
        clock: Of the device.
        repetitions: Samples.
        warmup: Executions before the first of them, at least one.
        short_s: Executions in one sample take this long together; 0: a sample is one execution.
    """
    before = [clock(run, 1) for _ in range(max(1, warmup))]
    executions = max(1, round(short_s / max(min(before), 1e-9))) if short_s else 1
    taken = [clock(run, executions) for _ in range(repetitions)]
    return Sampled(
        samples=tuple(seconds / executions for seconds in taken),
        device_s=sum(before) + sum(taken),
        executions=executions,
        warmup=len(before),
    )


def spread(samples: tuple[float, ...]) -> float:
    """Distance between the quartiles over the median; 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def steadiest(measure: Callable[[], Sampled], limit: float, retries: int) -> Sampled:
    """Measure again while samples scatter more than ``limit``, and keep those that do least.

    What the further attempts cost counts as the device's time too.
    """
    tried = [measure()]
    while spread(tried[-1].samples) > limit and len(tried) <= retries:
        tried.append(measure())
    best = min(tried, key=lambda one: spread(one.samples))
    return dataclasses.replace(best, device_s=sum(one.device_s for one in tried))


def clock_of(device: torch.device) -> tuple[Clock, str]:
    """How time is taken on a device, and what that is called."""
    if device.type != "cpu":
        return _gpu(device), "device events, caches flushed"
    if torch.get_num_threads() == 1:
        return _cpu(time.process_time), "CPU time of one thread, caches warm"
    return _cpu(time.perf_counter), "time, caches warm"


def _cpu(now: Callable[[], float]) -> Clock:
    """On one thread the CPU's time for it: a core that others use meanwhile is no part of it."""

    def seconds(run: Run, executions: int) -> float:
        started = now()
        for _ in range(executions):
            run()
        return now() - started

    return seconds


def _gpu(device: torch.device) -> Clock:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(run: Run, executions: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        for _ in range(executions):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    return seconds
