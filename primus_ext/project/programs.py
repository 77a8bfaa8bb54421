"""What each pipeline rank does in one step, in order: the schedules of megatron-core 0.19.

A program is a list of items.  ``(FORWARD, chunk, microbatch)`` and ``(BACKWARD, chunk,
microbatch)`` are work; ``(TRANSFER, posts, waits)`` starts the transfers ``posts`` (sends and
receives alike) and goes on when all of ``waits`` are complete.  A blocking exchange waits for what
it posts.  Work on a stage is known by ``chunk * pp + rank``; a transfer crosses the boundary after
one stage, forward or backward.

Schedules of other frameworks (:mod:`primus_ext.project.schedules`) also have ``(INPUT, chunk,
microbatch)``, a backward that leaves the weight gradients to ``(WEIGHT, chunk, microbatch)``, and
``(PAIR, (chunk, microbatch), (chunk, microbatch))``, a forward that runs beside the backward of
another microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

FORWARD, BACKWARD, TRANSFER, INPUT, WEIGHT, PAIR = range(6)
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
    schedule: str = ""
    """Key into :data:`primus_ext.project.schedules.SCHEDULES`; '': Megatron's own for ``vpp``."""
    early: int = 0
    """Forwards before the first backward beyond those of the plain interleaved schedule."""
    folded: bool = False
    """Two chunks a rank, the second of which runs back through the ranks (a V): rank 0 holds the
    first stage and the last."""

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
        if self.vpp == 1 or self.folded:
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
        self._folded = shape.folded

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk."""
        if self._folded and chunk:
            return self._last - rank
        return chunk * self._pp + rank

    def boundary(self, transfer: int) -> int:
        """The stage after which a transfer crosses."""
        return (transfer >> 1) // self._microbatches

    def _number(self, boundary: int, microbatch: int, backward: int) -> int:
        if self._folded and boundary == self._pp - 1:
            return -1  # the turn of the V: both stages are on the last rank
        return ((boundary * self._microbatches + microbatch) << 1) | backward

    def forward_in(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a forward receives."""
        stage = self.stage(rank, chunk)
        return self._number(stage - 1, microbatch, 0) if stage else -1

    def forward_out(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a forward sends."""
        stage = self.stage(rank, chunk)
        return self._number(stage, microbatch, 0) if stage != self._last else -1

    def backward_in(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a backward receives."""
        stage = self.stage(rank, chunk)
        return self._number(stage, microbatch, 1) if stage != self._last else -1

    def backward_out(self, rank: int, chunk: int, microbatch: int) -> int:
        """What a backward sends."""
        stage = self.stage(rank, chunk)
        return self._number(stage - 1, microbatch, 1) if stage else -1


def exchange(program: Program, *transfers: int) -> None:
    """Append a blocking exchange of those transfers that exist."""
    real = tuple(t for t in transfers if t >= 0)
    if real:
        program.append((TRANSFER, real, real))


def asynchronous(shape: Shape, rank: int, work: Sequence[Item]) -> Program:
    """A program whose transfers run beside its work.

    All receives are posted ahead, work waits for what it needs, and what it made is sent without
    waiting.

    Args:
        shape: The schedule.
        rank: Pipeline rank.
        work: What it does, without transfers.
    """
    of, program, receives = Transfers(shape), [], []
    for item in work:
        taken, made = _ends(of, rank, item)
        receives += taken
        if taken:
            program.append((TRANSFER, (), taken))
        program.append(item)
        if made:
            program.append((TRANSFER, made, ()))
    return [(TRANSFER, tuple(receives), ()), *program] if receives else program


def _ends(of: Transfers, rank: int, item: Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Transfers that one piece of work needs, and those that it makes."""
    kind, first, second = item
    taken, made = [], []
    if kind in (FORWARD, PAIR):
        where = first if kind == PAIR else (first, second)
        taken.append(of.forward_in(rank, *where))
        made.append(of.forward_out(rank, *where))
    if kind in (BACKWARD, INPUT, PAIR):
        where = second if kind == PAIR else (first, second)
        taken.append(of.backward_in(rank, *where))
        made.append(of.backward_out(rank, *where))
    return tuple(t for t in taken if t >= 0), tuple(t for t in made if t >= 0)


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

