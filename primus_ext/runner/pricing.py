"""Prices of traced jobs, in processes beside this one where there are many."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gc
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from primus_ext import trace_io
from primus_ext.cluster import Cluster, Figure
from primus_ext.cost import exchange, sustained
from primus_ext.plan import Plan
from primus_ext.project import compose
from primus_ext.project.kept import Kept
from primus_ext.project.result import Memory, Term, Throughput
from primus_ext.runner import bulk
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
    alike = _Alike(*decoded(text))
    return {one.name: _priced(alike, one) for one in wanted}


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


class _Alike:
    """Jobs that share a trace, with what some of them share beside it."""

    def __init__(self, plan: Plan, traces: Sequence[RankTrace]) -> None:
        self._plan, self._traces = plan, traces
        self._moved: dict[int, Sequence[RankTrace]] = {}
        self._kept: list[Kept] = []

    def own(self, wanted: Wanted) -> tuple[Plan, Sequence[RankTrace]]:
        """Plan and traces of one of them; those of the same world are the same objects."""
        plan, traces, sizes = self._plan, self._traces, wanted.sizes
        if sizes is not None:
            plan, traces = restored(plan, traces, sizes)
            traces = self._moved.setdefault(sizes.world_size, traces)
        return dataclasses.replace(plan, flags={**plan.flags, **wanted.conditions}), traces

    def kept(self, cluster: Cluster) -> Kept:
        """What projections on equal targets find out."""
        for known in self._kept:
            if known.cluster == cluster:
                return known
        self._kept.append(Kept(cluster))
        return self._kept[-1]


def _priced(alike: _Alike, wanted: Wanted) -> Timed | str:
    plan, traces = alike.own(wanted)
    kept = alike.kept(wanted.cluster)
    try:
        if wanted.memory:
            found = compose.project(plan, traces, kept.cluster, mode="simulate", kept=kept)
            return Timed(found.throughput, found.breakdown, found.memory)
        return Timed(*compose.timed(plan, traces, kept.cluster, kept=kept), None)
    except ValueError as error:  # the target can't run it
        return str(error)


def slopes(text: str, wanted: Sequence[Wanted]) -> dict[str, Slopes | str]:
    """Step times of jobs that share a trace, and their slopes by every factor of the target.

    Args:
        text: What the child answered, JSON.
        wanted: The jobs.
    """
    alike = _Alike(*decoded(text))
    found: dict[str, Slopes | str] = {}
    same: dict[str, Slopes | str] = {}
    for one in wanted:
        key = repr((one.sizes, sorted(one.conditions.items()), one.cluster))
        if key not in same:
            same[key] = _slopes(alike, one)
        found[one.name] = same[key]
    return found


def _slopes(alike: _Alike, wanted: Wanted) -> Slopes | str:
    plan, traces = alike.own(wanted)
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
    used = {"attention", "memory", "quantize", sustained.HOST, "gemm/bf16", "scale_up",
            f"gemm/{plan.precision.number_format}"}  # fmt: skip
    if any(op.family is Family.GROUPED_GEMM for op in ops):
        used.add("grouped_gemm")
    if target.world_size > target.scale_up_domain:
        used.add("scale_out")
    if any(exchange.is_exchange(op) for op in ops):
        used.add("exchange")
    return used


def run(
    programs: Mapping[str, dict[str, Any]], served: Mapping[str, Sequence[Wanted]],
    told: Callable[[Prices], None], workers: int | None = None,
    task: Callable[[str, Sequence[Wanted]], Prices] = price,
) -> None:  # fmt: skip
    """Trace programs, and find out of each trace what is wanted of it.

    Args:
        programs: Requests by name, as :func:`bulk.answers` takes them.
        served: What is wanted of each.
        told: Called in this process with what was found of a program's jobs, in any order.
        workers: Processes at a time; by default the cores of this machine.
        task: What is found: :func:`price` or :func:`slopes`.
    """
    processes = workers or os.cpu_count() or 1
    running: set[concurrent.futures.Future[Prices]] = set()

    def take(left: int) -> None:
        nonlocal running
        while len(running) > left:
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                told(future.result())

    with _executor(len(programs), processes) as pool:

        def answered(name: str, answer: bulk.Answer) -> None:
            if answer.refused:
                told({one.name: answer.refused for one in served[name]})
            elif pool is None:
                told(task(answer.text, served[name]))
            else:
                running.add(pool.submit(task, answer.text, served[name]))
                take(_AHEAD * processes)

        bulk.answers(programs, answered, workers)
        take(0)


@contextlib.contextmanager
def _executor(programs: int, workers: int) -> Iterator[concurrent.futures.Executor | None]:
    """Processes to price in; None where this one is enough."""
    if programs <= _FEW or workers == 1:
        yield None
        return
    # spawned: a fork would copy the threads' locks of whoever calls this
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
