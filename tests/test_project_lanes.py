"""Calls on several streams: properties that hold for any program."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.project.lanes import DEVICE, Task, shares, spans


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    tasks = []
    for place in range(draw(st.integers(1, 12))):
        lane = draw(st.sampled_from([DEVICE, DEVICE, "tp", "cp"]))
        after = draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else set()
        tasks.append(
            Task(
                seconds=float(draw(st.integers(0, 6))),
                stream=draw(st.sampled_from(["", "side1"])),
                lane=lane,
                asynchronous=lane != DEVICE and draw(st.booleans()),
                after=tuple(sorted(after)),
            )
        )
    return tasks


def on(tasks: list[Task], key: str) -> list[int]:
    """Places of the tasks of one stream, or of one group."""
    if key in ("", "side1"):
        return [i for i, t in enumerate(tasks) if t.stream == key and not t.asynchronous]
    return [i for i, t in enumerate(tasks) if t.lane == key]


@settings(max_examples=300, deadline=None)
@given(programs())
def test_order_of_streams_groups_and_waits_is_kept_and_nobody_dawdles(tasks: list[Task]) -> None:
    found = {s.task: s for s in spans(tasks)}
    assert sorted(found) == list(range(len(tasks)))
    for i, task in enumerate(tasks):
        assert found[i].end - found[i].start == task.seconds
        before = [*task.after]
        for key in ("", "side1", "tp", "cp"):
            mine = on(tasks, key)
            concerned = key in (task.stream, task.lane) and (i in mine or key == task.stream)
            before += [j for j in mine if concerned and j < i]
        ready = max((found[j].end for j in before), default=0.0)
        assert found[i].start >= ready
        if task.lane != DEVICE:
            assert found[i].start == ready  # only the device can be taken by somebody else
        elif found[i].start > ready:  # then it was busy all the time
            busy = sum(
                max(0.0, min(s.end, found[i].start) - max(s.start, ready))
                for j, s in found.items()
                if j != i and tasks[j].lane == DEVICE
            )
            assert busy == found[i].start - ready
    kernels = sorted(
        (s.start, s.end) for i, s in found.items() if tasks[i].lane == DEVICE and s.end > s.start
    )
    assert all(a[1] <= b[0] for a, b in zip(kernels, kernels[1:], strict=False))


@settings(max_examples=300, deadline=None)
@given(programs())
def test_every_instant_is_one_tasks(tasks: list[Task]) -> None:
    end = max(s.end for s in spans(tasks))
    parts: dict[int, float] = defaultdict(float)
    for place, seconds in shares(tasks):
        parts[place] += seconds
    assert sum(parts.values()) == end
    for place, task in enumerate(tasks):
        assert 0.0 <= parts[place] <= task.seconds
        if task.lane == DEVICE:  # nothing hides a kernel
            assert parts[place] == task.seconds


def test_a_wait_for_the_future_is_refused() -> None:
    kernel = Task(1.0, "", DEVICE, False, ())
    with pytest.raises(ValueError, match="issued later"):
        list(spans([Task(1.0, "", DEVICE, False, (1,)), kernel]))
