"""``timeline.json``: one step of every pipeline rank, for Perfetto (ui.perfetto.dev) or Chrome.

The format is Chrome's trace events: a process for each pipeline rank, with a track of its kernels,
one of the transfers that it receives and one of what is shared by the data-parallel ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primus_ext import whole_file
from primus_ext.project.compiled import spans
from primus_ext.project.programs import BACKWARD, FORWARD, INPUT, PAIR, WEIGHT, Shape, Transfers
from primus_ext.project.rescheduled import StepTimeline

TIMELINE_FILE = "timeline.json"
MOST_SLICES = 12_000
"""Slices of work and transfers; above that the middle of the step is left out (1.5 MB)."""
_KINDS = {FORWARD: "F", BACKWARD: "B", INPUT: "B", WEIGHT: "W"}
_CATEGORIES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradient",
               WEIGHT: "weight gradient", PAIR: "forward beside backward"}  # fmt: skip
_WORK, _TRANSFERS, _SHARED = range(3)
_TRACKS = {_WORK: "compute", _TRANSFERS: "p2p", _SHARED: "data parallel, optimizer"}
Event = dict[str, Any]


def write(timeline: StepTimeline, directory: Path) -> Path:
    """Write the file into an existing directory.

    Raises:
        OSError: The directory is missing, not writable or full.
    """
    text = json.dumps(content(timeline), separators=(",", ":"))
    return whole_file.write(directory / TIMELINE_FILE, text)


def content(timeline: StepTimeline) -> dict[str, Any]:
    """The file's content: times in microseconds, as the format wants them."""
    slices = sorted(_slices(timeline), key=lambda event: event["ts"])
    left_out = max(0, len(slices) - MOST_SLICES)
    if left_out:
        half = MOST_SLICES // 2
        slices = slices[:half] + slices[-half:]
    shown = timeline.shape.microbatches
    cut = []
    if shown < timeline.microbatches:
        cut.append(
            f"{shown} of {timeline.microbatches} microbatches: the others repeat those in the "
            "middle"
        )
    if left_out:
        cut.append(f"{left_out} slices in the middle of the step")
    return {
        "displayTimeUnit": "ms",
        "otherData": {"schedule": timeline.schedule, "left_out": "; ".join(cut) or "nothing"},
        "traceEvents": [*_names(timeline.shape), *slices, *_end(timeline)],
    }


def _names(shape: Shape) -> Iterator[Event]:
    for rank in range(shape.pp):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pp rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for track, name in _TRACKS.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track,
                   "args": {"name": name}}  # fmt: skip


def _slice(
    rank: int, track: int, name: str, category: str, start: float, end: float, **args: Any
) -> Event:
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": category,
        "ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3), "args": args,
    }  # fmt: skip


def _slices(timeline: StepTimeline) -> Iterator[Event]:
    """Work and transfers."""
    of, shape = Transfers(timeline.shape), timeline.shape
    rank_of = {of.stage(r, c): r for r in range(shape.pp) for c in range(shape.vpp)}
    for rank, place, start, end in spans(timeline.code, timeline.durations):
        if rank >= 0:
            yield _work(of, rank, timeline.programs[rank][place], start, end)
        elif end > start:
            after, back = of.boundary(place), place & 1
            ends = rank_of[after + 1], rank_of[after]
            source, target = ends if back else ends[::-1]
            yield _slice(
                target, _TRANSFERS, f"from {source}", "p2p", start, end,
                what="gradient" if back else "activation", boundary=after,
                microbatch=(place >> 1) % shape.microbatches,
            )  # fmt: skip


def _work(of: Transfers, rank: int, item: tuple[int, Any, Any], start: float, end: float) -> Event:
    kind, first, second = item
    if kind == PAIR:
        (chunk, microbatch), (other, behind) = first, second
        return _slice(
            rank, _WORK, f"F{microbatch} + B{behind}", _CATEGORIES[kind], start, end,
            microbatch=microbatch, chunk=chunk, stage=of.stage(rank, chunk),
            backward_microbatch=behind, backward_chunk=other,
        )  # fmt: skip
    return _slice(
        rank, _WORK, f"{_KINDS[kind]}{second}", _CATEGORIES[kind], start, end,
        microbatch=second, chunk=first, stage=of.stage(rank, first),
    )  # fmt: skip


def _end(timeline: StepTimeline) -> Iterator[Event]:
    """What follows the pipeline; where microbatches are left out it is moved ahead with the end."""
    drawn = max((end for *_, end in spans(timeline.code, timeline.durations)), default=0.0)
    early = max(timeline.finish) - drawn
    together = max(timeline.reduced) - early
    for rank, finish in enumerate(timeline.finish):
        reduced = timeline.reduced[rank] - early
        if reduced > finish - early:
            yield _slice(rank, _SHARED, "gradients, not hidden", "dp", finish - early, reduced)
        after = together + timeline.step[rank]
        if timeline.step[rank]:
            yield _slice(rank, _SHARED, "optimizer", "optimizer", together, after)
        if timeline.gather[rank]:
            yield _slice(rank, _SHARED, "parameters, not hidden", "dp", after,
                         after + timeline.gather[rank])  # fmt: skip
