"""Who waits for an asynchronous collective: told to the active recorder (group ``peers``)."""

from __future__ import annotations

import functools
from typing import Any

from primus_ext.emulate.registry import patch
from primus_ext.observe import recorder, streams


@patch("torch._C._distributed_c10d", "Work.wait", "FakeWork.wait", group="peers",
       versions="torch 2.4 to 2.14",
       reason="the call that waits for an asynchronous collective passes no dispatcher")
def _wait(module: Any) -> None:
    for owner in (module.Work, module.FakeWork):
        owner.wait = _telling(owner.wait)


def _telling(wait: Any) -> Any:
    @functools.wraps(wait)
    def tell_and_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        active = recorder.current()
        if active is not None and active.recording:
            active.streams.wait_work(streams.current(), self)
        return wait(self, *args, **kwargs)

    return tell_and_wait


@patch("torch._C._distributed_c10d", "ProcessGroup._start_coalescing",
       "ProcessGroup._end_coalescing", group="peers", versions="torch 2.4 to 2.14",
       reason="one handle stands for all collectives that were issued together")
def _coalescing(module: Any) -> None:
    group = module.ProcessGroup
    start, end = group._start_coalescing, group._end_coalescing
    begun: list[dict[str, int]] = []

    def start_here(self: Any, device: Any) -> None:
        active = recorder.current()
        begun.append({} if active is None else active.streams.issued())
        start(self, device)

    def end_here(self: Any, device: Any) -> Any:
        work, before = end(self, device), begun.pop()
        active = recorder.current()
        if active is not None and active.recording:
            active.streams.coalesced(work, before)
        return work

    group._start_coalescing, group._end_coalescing = start_here, end_here
