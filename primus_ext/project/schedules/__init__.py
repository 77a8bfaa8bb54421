"""Pipeline schedules by name: who offers them, what they need, and the program of every rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from primus_ext.project.interleaved import interleaved
from primus_ext.project.programs import Program, ScheduleError, Shape, one_f_one_b
from primus_ext.project.schedules.combined import combined
from primus_ext.project.schedules.controllable import v_half, v_min
from primus_ext.project.schedules.dualpipe_v import dualpipe_v
from primus_ext.project.schedules.zbv_formatted import zbv_formatted
from primus_ext.project.schedules.zero_bubble import zero_bubble

_MEGATRON = "Megatron-LM, Megatron-Bridge"
LONG = 32
"""Microbatches for each pipeline stage after which Megatron's plain schedules are taken to repeat
themselves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One way to order the work of a pipeline."""

    name: str
    title: str
    offered_by: str
    """Frameworks, and how it is asked for there."""
    chunks: int
    """Model chunks on each rank; 0: several, as many as the job has."""
    build: Callable[[Shape, int], Program]
    """The program of one rank; of an automatic schedule the fixed one that it starts from."""
    folded: bool = False
    """The second chunk runs back through the ranks."""
    pairs: bool = False
    """Forwards run beside backwards."""
    limit: Callable[[int], int] | None = None
    """Made for the job's durations: chunks that a rank may hold, from ``pp``."""
    overlaps_data_parallel: bool = False
    """Gradients are reduced while the pipeline runs, where the job asks for it."""
    needs_pipeline: bool = True
    """It is another one than Megatron's plain order only with several pipeline ranks."""
    early: int = 0
    """Forwards before the first backward beyond those of the plain interleaved schedule."""
    repeats_after: int = 12
    """Microbatches for each stage after which it is taken to repeat itself, if two spans of them
    take the same time; making a schedule beyond Megatron's plain ones costs more."""
    repeats_memory: bool = False
    """What is in flight repeats once the warm-up is over, as ``inflight.steady`` has it."""


def _all() -> list[Schedule]:
    primus = "Primus (pp_algorithm={})".format
    return [
        Schedule(name="1f1b", title="1F1B", chunks=1, build=one_f_one_b,
                 offered_by=f"{_MEGATRON}, {primus('1f1b')}", overlaps_data_parallel=True,
                 needs_pipeline=False, repeats_after=LONG, repeats_memory=True),
        Schedule(name="interleaved", title="interleaved 1F1B", chunks=0, build=interleaved,
                 offered_by=f"{_MEGATRON}, {primus('1f1b-interleaved')}",
                 overlaps_data_parallel=True, repeats_after=LONG, repeats_memory=True),
        Schedule(name="combined-1f1b", title="combined 1F1B", chunks=0, build=combined, pairs=True,
                 offered_by=f"{_MEGATRON} (overlap_moe_expert_parallel_comm)",
                 overlaps_data_parallel=True, needs_pipeline=False, early=1, repeats_memory=True),
        Schedule(name="zero-bubble", title="zero bubble (ZB-H1)", chunks=1, build=zero_bubble,
                 offered_by=primus("zero-bubble")),
        Schedule(name="zero-bubble-auto", title="zero bubble, automatic", chunks=1,
                 build=zero_bubble, limit=lambda pp: pp,
                 offered_by=primus("zero-bubble-heuristic")),
        Schedule(name="zero-bubble-2p", title="zero bubble, automatic, twice the memory", chunks=1,
                 build=zero_bubble, limit=lambda pp: 2 * pp - 1,
                 offered_by=primus("zero-bubble-heuristic")),
        Schedule(name="zbv", title="ZBV", chunks=2, build=zbv_formatted, folded=True,
                 offered_by=f"{primus('zbv-formatted')}, PyTorch (ScheduleZBVZeroBubble)"),
        Schedule(name="zbv-greedy", title="ZBV, greedy", chunks=2, build=zbv_formatted,
                 folded=True, limit=lambda pp: 2 * pp,
                 offered_by="Primus (zero_bubble_v_schedule_mem_setup=zb)"),
        Schedule(name="v-half", title="V-half", chunks=2, build=v_half, folded=True,
                 offered_by=primus("v-half")),
        Schedule(name="v-min", title="V-min", chunks=2, build=v_min, folded=True,
                 offered_by=primus("v-min")),
        Schedule(name="dualpipe-v", title="DualPipe-V", chunks=2, build=dualpipe_v, folded=True,
                 pairs=True,
                 offered_by="DeepSeek's DualPipe, PyTorch (ScheduleDualPipeV)"),
    ]  # fmt: skip


SCHEDULES = {schedule.name: schedule for schedule in _all()}
ALIASES = {
    "zb": "zero-bubble", "zb-h1": "zero-bubble", "zerobubble": "zero-bubble",
    "zero-bubble-heuristic": "zero-bubble-auto", "zerobubble-heuristic": "zero-bubble-auto",
    "1f1b-interleaved": "interleaved", "zbv-formatted": "zbv", "zbv-greedy-full": "zbv-greedy",
    "zbv-greedy-half": "v-half", "zbv-greedy-min": "v-min", "dualpipev": "dualpipe-v",
}  # fmt: skip
"""Other names, as frameworks have them."""


def named(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        ScheduleError: There is none.
    """
    found = SCHEDULES.get(ALIASES.get(name, name))
    if found is None:
        raise ScheduleError(
            f"schedule={name} is unknown; legal: all, {', '.join([*SCHEDULES, *ALIASES])}"
        )
    return found


def own(shape: Shape) -> Schedule:
    """The schedule of a shape."""
    if shape.schedule:
        return named(shape.schedule)
    return SCHEDULES["1f1b" if shape.vpp == 1 else "interleaved"]


def programs(shape: Shape) -> list[Program]:
    """The program of every pipeline rank; not to be changed, others are given the same.

    Raises:
        ScheduleError: The framework refuses the shape.
    """
    if shape.stages * shape.microbatches > _KEPT:
        return _built(shape)
    return list(_kept(shape))


_KEPT = 4_000
"""Microbatches times stages above which programs are not kept."""


def _built(shape: Shape) -> list[Program]:
    shape.check()
    build = own(shape).build
    return [build(shape, rank) for rank in range(shape.pp)]


@functools.lru_cache(maxsize=64)
def _kept(shape: Shape) -> tuple[Program, ...]:
    return tuple(_built(shape))
