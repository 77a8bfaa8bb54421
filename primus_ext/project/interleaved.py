"""The interleaved 1F1B schedule (``forward_backward_pipelining_with_interleaving``)."""

from __future__ import annotations

import functools

from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    TRANSFER,
    Program,
    Shape,
    Transfers,
    exchange,
)


@functools.lru_cache(maxsize=8)
def _order(shape: Shape) -> list[tuple[int, int]]:
    return order(shape)


def order(shape: Shape) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each forward, the same on every rank; backwards mirror the chunk."""
    found = []
    for start in range(0, shape.microbatches, shape.group_size):
        stop = min(start + shape.group_size, shape.microbatches)
        found += [(i, chunk) for chunk in range(shape.vpp) for i in range(start, stop)]
    return found


def warmup_forwards(shape: Shape, rank: int) -> int:
    """Forwards before the first backward."""
    ahead = 2 * (shape.pp - rank - 1) + (shape.vpp - 1) * shape.group_size + shape.early
    return min(ahead, shape.microbatches * shape.vpp)


def received_after(shape: Shape, rank: int, k: int) -> tuple[int, int] | None:
    """(chunk, microbatch) whose input a rank receives after its forward ``k``, if any.

    The first rank takes what the last rank has just finished, pp - 1 forwards behind; the others
    take the input of their next forward.
    """
    table = _order(shape)
    if k + 1 >= len(table):
        return None
    if rank:
        microbatch, chunk = table[k + 1]
        return chunk, microbatch
    behind = k - (shape.pp - 1)
    if behind < 0:
        return None
    microbatch, chunk = table[behind]
    return (chunk + 1, microbatch) if chunk + 1 < shape.vpp else None


class InterleavedRank:
    """Transfers of one rank, by the position of a forward or a backward in its order."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        self.table = _order(shape)
        self.total = len(self.table)
        self._of = Transfers(shape)

    def forward(self, k: int) -> tuple[int, int, int]:
        """Forward ``k``."""
        microbatch, chunk = self.table[k]
        return (FORWARD, chunk, microbatch)

    def backward(self, k: int) -> tuple[int, int, int]:
        """Backward ``k``."""
        microbatch, chunk = self.table[k]
        return (BACKWARD, self.shape.vpp - 1 - chunk, microbatch)

    def forward_in(self, k: int) -> int:
        """The input of forward ``k``."""
        _, chunk, microbatch = self.forward(k)
        return self._of.forward_in(self.rank, chunk, microbatch)

    def forward_out(self, k: int) -> int:
        """Where its output goes."""
        _, chunk, microbatch = self.forward(k)
        return self._of.forward_out(self.rank, chunk, microbatch)

    def backward_in(self, k: int) -> int:
        """The gradient that backward ``k`` starts from."""
        _, chunk, microbatch = self.backward(k)
        return self._of.backward_in(self.rank, chunk, microbatch)

    def backward_out(self, k: int) -> int:
        """Where its gradient goes."""
        _, chunk, microbatch = self.backward(k)
        return self._of.backward_out(self.rank, chunk, microbatch)

    def next_input(self, k: int) -> int:
        """What is received after forward ``k``."""
        work = received_after(self.shape, self.rank, k)
        return -1 if work is None else self._of.forward_in(self.rank, *work)

    def next_gradient(self, k: int) -> int:
        """What is received after backward ``k``; on the last rank from the first, mirrored."""
        if k + 1 >= self.total:
            return -1
        if self.rank < self.shape.pp - 1:
            return self.backward_in(k + 1)
        behind = k - (self.shape.pp - 1)
        if behind < 0:
            return -1
        _, chunk, microbatch = self.backward(behind)
        return self._of.backward_out(0, chunk, microbatch)


def interleaved(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank."""
    mine, program = InterleavedRank(shape, rank), []
    warmup = warmup_forwards(shape, rank)
    steady = mine.total - warmup
    first_gradient = mine.backward_in(0)
    exchange(program, mine.forward_in(0))
    for k in range(warmup):
        program.append(mine.forward(k))
        last = k == warmup - 1 and steady > 0
        early = first_gradient if last and not shape.overlap_p2p else -1
        exchange(program, mine.forward_out(k), mine.next_input(k), early)
        if last and shape.overlap_p2p and first_gradient >= 0:
            program.append((TRANSFER, (first_gradient,), ()))
    if not steady:
        exchange(program, first_gradient)
    if shape.overlap_p2p:
        _steady_overlapped(program, mine, warmup, steady)
    else:
        _steady(program, mine, warmup, steady)
    for k in range(steady, mine.total):
        if shape.overlap_p2p:  # with groups above pp the last rank has received ahead
            _post_wait(program, (), (mine.backward_in(k),))
        program.append(mine.backward(k))
        exchange(program, mine.backward_out(k), mine.next_gradient(k))
    return program


def _steady(program: Program, mine: InterleavedRank, warmup: int, steady: int) -> None:
    """One forward, one backward, then one exchange in all four directions."""
    for k in range(steady):
        ahead = k + warmup
        program.append(mine.forward(ahead))
        program.append(mine.backward(k))
        exchange(
            program, mine.forward_out(ahead), mine.backward_out(k),
            mine.next_input(ahead), mine.next_gradient(k),
        )  # fmt: skip


def _steady_overlapped(program: Program, mine: InterleavedRank, warmup: int, steady: int) -> None:
    """The same with exchanges that run beside the following work."""
    sent = -1
    for k in range(steady):
        ahead = k + warmup
        _post_wait(program, (), (mine.forward_in(ahead),))
        program.append(mine.forward(ahead))
        out = mine.forward_out(ahead)
        at_once = (out,) if mine.shape.waits_for_sends else ()
        _post_wait(program, (out, mine.next_input(ahead)), at_once)
        _post_wait(program, (), (mine.backward_in(k),))
        program.append(mine.backward(k))
        gradient = mine.backward_out(k)
        _post_wait(program, (gradient, mine.next_gradient(k)), (sent,))
        sent = gradient
    _post_wait(program, (), (sent,))


def _post_wait(program: Program, posts: tuple[int, ...], waits: tuple[int, ...]) -> None:
    posts = tuple(t for t in posts if t >= 0)
    waits = tuple(t for t in waits if t >= 0)
    if posts or waits:
        program.append((TRANSFER, posts, waits))
