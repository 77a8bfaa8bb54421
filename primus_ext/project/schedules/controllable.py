"""V-half and V-min: a V of two chunks that holds a half, or a third, of what 1F1B holds.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): a building
block says when one microbatch is where, in slots of one chunk's forward, input gradient or weight
gradient; repeated every six slots the blocks of all microbatches fit into each other.  Weight
gradients go into the slots that are left, then everything moves ahead as far as its inputs and the
memory of the repeated blocks let it, and the end is packed once more with the weight gradients
last.  What comes out is an order; how long it takes is simulated with real durations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable

from primus_ext.project.programs import FORWARD, INPUT, WEIGHT, Item, Program, Shape, asynchronous

_REPEAT = 6
"""Slots of a microbatch on a rank: three kinds of work on each of two chunks."""
_HELD = {FORWARD: 1, INPUT: 0, WEIGHT: -1}
"""Chunks that begin, or cease, to be held."""
_Block = tuple[tuple[int, int, int], ...]


def v_half(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank, with half the memory of 1F1B."""
    return asynchronous(shape, rank, _orders(shape.pp, shape.microbatches, _half)[rank])


def v_min(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank, with a third of the memory of 1F1B."""
    return asynchronous(shape, rank, _orders(shape.pp, shape.microbatches, _third)[rank])


def _half(pp: int, rank: int) -> _Block:
    """(kind, chunk, slot) of the first microbatch (figure 2 of the paper)."""
    late = 3 if pp % 2 == 0 else 0
    return (
        (FORWARD, 0, 2 * rank),
        (FORWARD, 1, 3 * pp - rank - 2),
        (INPUT, 1, 3 * pp + late + 2 * rank - 1),
        (INPUT, 0, 6 * pp + late - rank - 2),
    )


def _third(pp: int, rank: int) -> _Block:
    late = 2 if pp % 3 == 0 else 0
    return (
        (FORWARD, 0, rank),
        (FORWARD, 1, 2 * pp - rank - 1),
        (INPUT, 1, 2 * pp + late + rank),
        (INPUT, 0, 4 * pp + late - rank - 1),
    )


@dataclasses.dataclass(slots=True)
class _Rank:
    """Slots of one rank."""

    at: dict[int, Item]
    """What is done in a slot."""
    held: list[int]
    """Chunks held from each slot on."""


@functools.lru_cache(maxsize=8)
def _orders(
    pp: int, microbatches: int, block: Callable[[int, int], _Block]
) -> list[list[Item]]:
    """Work of every rank in order."""
    packing = _Packing(pp, [_repeated(block(pp, rank), microbatches) for rank in range(pp)])
    packing.move_ahead()
    packing.pack_end()
    return [[item for _, item in sorted(rank.at.items())] for rank in packing.ranks]


def _repeated(block: _Block, microbatches: int) -> _Rank:
    """The blocks of all microbatches, and weight gradients in the first slots that are free."""
    at: dict[int, Item] = {
        slot + _REPEAT * i: (kind, chunk, i) for kind, chunk, slot in block
        for i in range(microbatches)
    }  # fmt: skip
    waiting: deque[Item] = deque()
    held, count, slot, last = [], 0, 0, max(at)
    while slot <= last or waiting:
        item = at.get(slot)
        if item is None and waiting:
            _, chunk, microbatch = waiting.popleft()
            item = at[slot] = (WEIGHT, chunk, microbatch)
        elif item is not None and item[0] == INPUT:
            waiting.append(item)
        count += _HELD[item[0]] if item else 0
        held.append(count)
        slot += 1
    return _Rank(at, held)


class _Packing:
    """Moves work to earlier slots."""

    def __init__(self, pp: int, ranks: list[_Rank]) -> None:
        self.ranks, self._pp = ranks, pp
        self._limit = max(max(rank.held) for rank in ranks)
        self._slots = [{item: slot for slot, item in rank.at.items()} for rank in ranks]

    def _by_slot(self) -> list[tuple[int, int, Item]]:
        return sorted(
            (slot, number, item) for number, rank in enumerate(self.ranks)
            for slot, item in rank.at.items()
        )  # fmt: skip

    def move_ahead(self) -> None:
        """Everything to the first slot that its inputs and the memory allow."""
        for slot, number, item in self._by_slot():
            rank = self.ranks[number]
            first = max(self._inputs(number, item), self._room(rank, slot, item[0]))
            free = next((s for s in range(first, slot) if s not in rank.at), slot)
            self._move(number, item, slot, free)
            for between in range(free, slot):
                rank.held[between] += _HELD[item[0]]

    def pack_end(self) -> None:
        """After the last forward of a rank: input gradients first, then weight gradients."""
        weights: list[tuple[int, int, Item]] = []
        last = [
            max(slot for slot, item in rank.at.items() if item[0] == FORWARD)
            for rank in self.ranks
        ]
        for slot, number, item in self._by_slot():
            if slot <= last[number]:
                continue
            if item[0] == WEIGHT:
                weights.append((slot, number, item))
                del self.ranks[number].at[slot]
                continue
            first = self._inputs(number, item)
            at = self.ranks[number].at
            free = next((s for s in range(first, slot) if s not in at), slot)
            self._move(number, item, slot, free)
        for _, number, item in weights:
            at, slot = self.ranks[number].at, self._inputs(number, item)
            while slot in at:
                slot += 1
            at[slot] = item
            self._slots[number][item] = slot

    def _move(self, number: int, item: Item, slot: int, to: int) -> None:
        del self.ranks[number].at[slot]
        self.ranks[number].at[to] = item
        self._slots[number][item] = to

    def _inputs(self, number: int, item: Item) -> int:
        """First slot after everything that an item needs, and after the microbatch before."""
        kind, chunk, microbatch = item
        mine = self._slots[number]
        needs = [mine[kind, chunk, microbatch - 1]] if microbatch else []
        if kind == WEIGHT:
            needs.append(mine[INPUT, chunk, microbatch])
        else:
            ahead = (chunk == 0) == (kind == FORWARD)
            peer = number - 1 if ahead else number + 1
            if 0 <= peer < self._pp:
                needs.append(self._slots[peer][kind, chunk, microbatch])
            elif (kind, chunk) != (FORWARD, 0):
                turns = (kind, chunk) == (INPUT, 1)
                before, there = (FORWARD, 1) if turns else (kind, 1 - chunk)
                needs.append(mine[before, there, microbatch])
        return max(needs, default=-1) + 1

    def _room(self, rank: _Rank, slot: int, kind: int) -> int:
        """First slot from which there is memory for one more chunk until ``slot``."""
        if kind != FORWARD:
            return 0
        while slot > 0 and rank.held[slot - 1] < self._limit:
            slot -= 1
        return slot
