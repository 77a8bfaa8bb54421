"""Prices of traced jobs, in processes beside this one where there are many."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import json
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from primus_ext import trace_io
from primus_ext.cluster import Cluster, Figure
from primus_ext.cost import exchange
from primus_ext.plan import Plan
from primus_ext.project import compose
from primus_ext.project.result import Memory, Term, Throughput
from primus_ext.runner.sharing import Sizes, restored
from primus_ext.trace import Family, RankTrace

_FEW = 8
"""Programs that are priced in this process: another one would take longer to start."""
_AHEAD = 4
"""Programs that wait, per process: their texts are in memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A job to be priced from a trace."""

    name: str
    cluster: Cluster
    conditions: Mapping[str, str]
    """Flags of its plan that the trace does not depend on."""
    sizes: Sizes | None
    """What is put back where the trace stands for several jobs."""
    memory: bool
    """Whether its memory is wanted too: replaying an allocator costs most of a projection."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """The time of a job's step, and its memory if that was wanted."""

    throughput: Throughput
    breakdown: tuple[Term, ...]
    memory: Memory | None


@dataclasses.dataclass(frozen=True, slots=True)
class Slopes:
    """A step time, and how it follows its accelerator's factors: d ln(seconds) / d ln(factor)."""

    seconds: float
    slopes: Mapping[str, float]


Prices = Mapping[str, Timed | Slopes | str]
"""By name; or why there is none."""
STEP = 1.1
"""Ratio by which a factor is changed to find a slope."""


def price(text: str, wanted: Sequence[Wanted]) -> dict[str, Timed | str]:
    """Price jobs that share a trace.

    Args:
        text: What the child answered, JSON.
        wanted: The jobs.
    """
    plan, traces = decoded(text)
    return {one.name: _priced(plan, traces, one) for one in wanted}


def decoded(text: str) -> tuple[Plan, list[RankTrace]]:
    """Plan and traces of an answer."""
    collects = gc.isenabled()
    gc.disable()  # many small objects, none of them garbage
    try:
        answer = json.loads(text)
        return (
            trace_io.plan_from_plain(answer["plan"]),
            trace_io.traces_from_plain(answer["traces"]),
        )
    finally:
        if collects:
            gc.enable()


def _priced(plan: Plan, traces: Sequence[RankTrace], wanted: Wanted) -> Timed | str:
    if wanted.sizes is not None:
        plan, traces = restored(plan, traces, wanted.sizes)
    plan = dataclasses.replace(plan, flags={**plan.flags, **wanted.conditions})
    try:
        if wanted.memory:
            found = compose.project(plan, traces, wanted.cluster, mode="simulate")
            return Timed(found.throughput, found.breakdown, found.memory)
        return Timed(*compose.timed(plan, traces, wanted.cluster), None)
    except ValueError as error:  # the target can't run it
        return str(error)


def slopes(text: str, wanted: Sequence[Wanted]) -> dict[str, Slopes | str]:
    """Step times of jobs that share a trace, and their slopes by every factor of the target.

    Args:
        text: What the child answered, JSON.
        wanted: The jobs.
    """
    plan, traces = decoded(text)
    found: dict[str, Slopes | str] = {}
    same: dict[str, Slopes | str] = {}
    for one in wanted:
        key = repr((one.sizes, sorted(one.conditions.items()), one.cluster))
        if key not in same:
            same[key] = _slopes(plan, traces, one)
        found[one.name] = same[key]
    return found


def _slopes(plan: Plan, traces: Sequence[RankTrace], wanted: Wanted) -> Slopes | str:
    if wanted.sizes is not None:
        plan, traces = restored(plan, traces, wanted.sizes)
    plan = dataclasses.replace(plan, flags={**plan.flags, **wanted.conditions})
    accelerator = wanted.cluster.accelerator
    used = _used(plan, traces, wanted.cluster)

    def seconds(table: Mapping[str, Figure]) -> float:
        changed = dataclasses.replace(accelerator, sustained=dict(table))
        target = dataclasses.replace(wanted.cluster, accelerator=changed)
        return compose.timed(plan, traces, target)[0].step_s

    try:
        base = seconds(accelerator.sustained)
        found = {}
        for kind, figure in accelerator.sustained.items():
            if kind not in used:
                continue
            more = dataclasses.replace(figure, value=figure.value * STEP)
            slower = seconds({**accelerator.sustained, kind: more})
            found[kind] = math.log(slower / base) / math.log(STEP)
        return Slopes(base, found)
    except ValueError as error:  # the target can't run it
        return str(error)


def _used(plan: Plan, traces: Sequence[RankTrace], target: Cluster) -> set[str]:
    """Factors that can matter to a job."""
    ops = {op for trace in traces for op in trace.ops}
    used = {"attention", "memory", "quantize", "host_call_s", "gemm/bf16", "scale_up",
            f"gemm/{plan.precision.number_format}"}  # fmt: skip
    if any(op.family is Family.GROUPED_GEMM for op in ops):
        used.add("grouped_gemm")
    if target.world_size > target.scale_up_domain:
        used.add("scale_out")
    if any(exchange.is_exchange(op) for op in ops):
        used.add("exchange")
    return used


class Pool:
    """Prices what it is given, one program after another."""

    def __init__(
        self, programs: int, workers: int, told: Callable[[Prices], None],
        task: Callable[[str, Sequence[Wanted]], Prices] = price,
    ) -> None:  # fmt: skip
        """Nothing is priced yet.

        Args:
            programs: How many there may be.
            workers: Processes at a time.
            told: Called with the prices of a program's jobs, in this process, in any order.
            task: What is found out of a trace: :func:`price` or :func:`slopes`.
        """
        self._told, self._task, self._ahead = told, task, _AHEAD * workers
        self._running: set[concurrent.futures.Future[Any]] = set()
        self._pool = None
        if programs > _FEW and workers > 1:
            # spawned: a fork would copy the threads' locks of whoever calls this
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(workers, context)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=kind is not None)

    def put(self, text: str, wanted: Sequence[Wanted]) -> None:
        """Price jobs that share a trace; see :func:`price`."""
        if self._pool is None:
            self._told(self._task(text, wanted))
            return
        self._running.add(self._pool.submit(self._task, text, wanted))
        self._take(self._ahead)

    def finish(self) -> None:
        """Wait until all are priced."""
        self._take(0)

    def _take(self, left: int) -> None:
        while len(self._running) > left:
            done, self._running = concurrent.futures.wait(
                self._running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                self._told(future.result())
