"""What each pipeline rank does in one step, in order: the schedules of megatron-core 0.19.

A program is a list of items.  ``(FORWARD, chunk, microbatch)`` and ``(BACKWARD, chunk,
microbatch)`` are work; ``(TRANSFER, posts, waits)`` starts the transfers ``posts`` (sends and
receives alike) and goes on when all of ``waits`` are complete.  A blocking exchange waits for what
it posts.  Work on a stage is known by ``chunk * pp + rank``; a transfer crosses the boundary after
one stage, forward or backward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

FORWARD, BACKWARD, TRANSFER = 0, 1, 2
Item = tuple[int, Any, Any]
Program = list[Item]


class ScheduleError(ValueError):
    """A schedule that the framework refuses to run; the message is one sentence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a schedule depends on."""

    pp: int
    vpp: int = 1
    microbatches: int
    group: int = 0
    """Microbatches in a row on one chunk (``microbatch_group_size_per_vp_stage``); 0: pp."""
    overlap_p2p: bool = False
    """Asynchronous exchanges in the steady state (interleaved schedule only)."""
    waits_for_sends: bool = True
    """Outputs are freed after sending (``deallocate_pipeline_outputs``, what Megatron-LM sets), so
    a forward send is waited for at once."""

    @property
    def stages(self) -> int:
        """Model chunks in the whole pipeline."""
        return self.pp * self.vpp

    @property
    def group_size(self) -> int:
        """:attr:`group` with its default."""
        return self.group or self.pp

    def with_microbatches(self, microbatches: int) -> Shape:
        """The same schedule with another number of microbatches."""
        return dataclasses.replace(self, microbatches=microbatches)

    def check(self) -> None:
        """Refuse what Megatron refuses.

        Raises:
            ScheduleError: The microbatches don't fit the interleaved schedule.
        """
        if min(self.pp, self.vpp, self.microbatches) < 1:
            raise ScheduleError(
                f"pp={self.pp}, vpp={self.vpp} and microbatches={self.microbatches} must be "
                "positive"
            )
        if self.vpp == 1:
            return
        if not self.pp <= self.group_size <= self.microbatches:
            raise ScheduleError(
                f"microbatch_group_size_per_vp_stage={self.group_size} is not legal: it must be "
                f"between pp={self.pp} and the {self.microbatches} microbatches of a step"
            )
        rest = self.microbatches % self.group_size
        if 0 < rest < self.pp:
            raise ScheduleError(
                f"{self.microbatches} microbatches are not legal with "
                f"microbatch_group_size_per_vp_stage={self.group_size}: the {rest} left over must "
                f"be 0 or at least pp={self.pp}"
            )


class Transfers:
    """Numbers of the transfers of one schedule: even forward, odd backward; -1 for none."""

    def __init__(self, shape: Shape) -> None:
        self._pp, self._last = shape.pp, shape.stages - 1
        self._microbatches = shape.microbatches

    def boundary(self, transfer: int) -> int:
        """The stage after which a transfer crosses."""
        return (transfer >> 1) // self._microbatches

    def _number(self, boundary: int, microbatch: int, backward: int) -> int:
        return ((boundary * self._microbatches + microbatch) << 1) | backward

    def forward_in(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a forward receives."""
        stage = chunk * self._pp + rank
        return self._number(stage - 1, microbatch, 0) if stage else -1

    def forward_out(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a forward sends."""
        stage = chunk * self._pp + rank
        return self._number(stage, microbatch, 0) if stage != self._last else -1

    def backward_in(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a backward receives."""
        stage = chunk * self._pp + rank
        return self._number(stage, microbatch, 1) if stage != self._last else -1

    def backward_out(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a backward sends."""
        stage = chunk * self._pp + rank
        return self._number(stage - 1, microbatch, 1) if stage else -1


def exchange(program: Program, *transfers: int) -> None:
    """Append a blocking exchange of those transfers that exist."""
    real = tuple(t for t in transfers if t >= 0)
    if real:
        program.append((TRANSFER, real, real))


def one_f_one_b(shape: Shape, rank: int) -> Program:
    """The non-interleaved schedule (``forward_backward_pipelining_without_interleaving``)."""
    of, program = Transfers(shape), []
    warmup = min(shape.pp - rank - 1, shape.microbatches)
    steady = shape.microbatches - warmup
    for i in range(warmup):
        exchange(program, of.forward_in(rank, 0, i))
        program.append((FORWARD, 0, i))
        exchange(program, of.forward_out(rank, 0, i))
    if steady:
        exchange(program, of.forward_in(rank, 0, warmup))
    for i in range(steady):
        program.append((FORWARD, 0, warmup + i))
        exchange(program, of.forward_out(rank, 0, warmup + i), of.backward_in(rank, 0, i))
        program.append((BACKWARD, 0, i))
        following = of.forward_in(rank, 0, warmup + i + 1) if i + 1 < steady else -1
        exchange(program, of.backward_out(rank, 0, i), following)
    for i in range(steady, shape.microbatches):
        exchange(program, of.backward_in(rank, 0, i))
        program.append((BACKWARD, 0, i))
        exchange(program, of.backward_out(rank, 0, i))
    return program

