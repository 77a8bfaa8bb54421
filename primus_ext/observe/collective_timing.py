"""Seconds of one prepared collective, on this rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from primus_ext.observe.collective_calls import Prepared

Span = tuple[float, float, float]
"""When one repetition began and ended, seconds of a clock, and for how long this process's threads
had a core meanwhile."""


def on_host(prepared: Prepared, repetitions: int, together: Callable[[], None]) -> list[Span]:
    """Wall clock, which all processes of a host share.

    Args:
        prepared: The collective.
        repetitions: How often.
        together: Brings the members of all groups together before each.
    """
    spans = []
    for _ in range(repetitions):
        prepared.refill()
        together()
        worked, begun = time.process_time(), time.perf_counter()
        prepared.run()
        ended = time.perf_counter()
        spans.append((begun, ended, time.process_time() - worked))
    return spans


def on_device(prepared: Prepared, repetitions: int, together: Callable[[], None]) -> list[Span]:
    """Device events around calls that are issued one after another, as a stream runs them.

    The first begins when its stream gets there, the next ones when the one before is over; no two
    devices share a clock, so that only durations mean something.
    """
    prepared.refill()
    together()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repetitions)
    ]
    prepared.run()  # late ranks are waited for here
    for begun, ended in events:
        prepared.refill()
        begun.record()
        prepared.run()
        ended.record()
    torch.cuda.synchronize()
    return [(0.0, begun.elapsed_time(ended) * 1e-3, 0.0) for begun, ended in events]


def of_group(members: list[list[Span]], share: float, common_clock: bool) -> list[float]:
    """Seconds of each repetition from what its members saw.

    On a common clock from when the last one came to when the last one was through: who comes early
    waits, and that is not the collective.  Else the longest duration.

    Args:
        members: Spans of the repetitions, by member.
        share: Of a repetition that is the collective's.
        common_clock: Whether the members' clocks are one.
    """
    found = []
    for spans in zip(*members, strict=True):
        if common_clock:
            seconds = max(end for _, end, _ in spans) - max(begin for begin, _, _ in spans)
        else:
            seconds = max(end - begin for begin, end, _ in spans)
        found.append(max(seconds, 1e-9) * share)
    return found


def processor(members: list[list[Span]], share: float) -> float:
    """Seconds of a core that a repetition takes a member: the median of all."""
    return statistics.median(worked for spans in members for _, _, worked in spans) * share
