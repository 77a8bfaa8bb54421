"""From measured group sizes to others: steps of the algorithm, and bytes that each member moves.

A collective of n members takes so many steps one after another, each with its start, and moves so
many bytes for each byte of its buffer: rings 2(n-1) steps and 2(n-1)/n for an all-reduce, (n-1)
and (n-1)/n for a gather or a reduce-scatter; direct exchanges (n-1) and (n-1)/n for an all-to-all;
trees log2(n) steps for a broadcast and a barrier (Thakur, Rabenseifner & Gropp 2005).

What a library really does differs; so the law only bends the line between measured group sizes and
beyond them, and the interval reaches from "no dependence" to "all of it in proportion".

Processes of a host without devices take turns on its cores, those of other groups too: with more of
them than cores everything takes as many times as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from primus_ext.trace import CollectiveKind

_RINGS = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.ALL_GATHER: 1,
          CollectiveKind.REDUCE_SCATTER: 1, CollectiveKind.ALL_TO_ALL: 1}  # fmt: skip


def steps(kind: CollectiveKind, members: int) -> float:
    """Messages that follow each other."""
    if kind in _RINGS:
        return _RINGS[kind] * (members - 1)
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.BARRIER):
        return math.ceil(math.log2(members))
    return 1.0


def volume(kind: CollectiveKind, members: int) -> float:
    """Bytes that a member sends for each byte of the buffer, on average."""
    if kind in _RINGS:
        return _RINGS[kind] * (members - 1) / members
    if kind is CollectiveKind.BROADCAST:
        return (members - 1) / members
    return 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one size in one group: what does not depend on the bytes, and what does."""

    start: float
    wire: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.start + self.wire


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """Processes that share a host."""

    processes: int
    """All are at it at once, in as many groups as they make."""
    cores: int | None
    """That they take turns on; None: each has a device."""

    def crowding(self, members: int) -> float:
        """How many times as long everything takes, in groups of ``members``."""
        if self.cores is None:
            return 1.0
        return self.crowding_of(max(members, self.processes // members * members))

    def crowding_of(self, busy: int) -> float:
        """The same with so many processes at work."""
        return 1.0 if self.cores is None else max(1.0, busy / self.cores)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds in a group of some size."""

    parts: Parts
    low: float
    high: float


def estimate(
    kind: CollectiveKind, measured: Mapping[int, Parts], members: int, host: Host
) -> Estimate:
    """Seconds in a group of ``members``.

    Args:
        kind: The collective.
        measured: By members, one size; at least one group.
        members: Of the group that is asked for.
        host: Where all of them are measured, and asked for.
    """
    if members in measured:
        parts = measured[members]
        return Estimate(parts, parts.seconds, parts.seconds)
    alone = {
        n: Parts(parts.start / host.crowding(n), parts.wire / host.crowding(n))
        for n, parts in measured.items()
    }
    below = max((n for n in measured if n < members), default=None)
    above = min((n for n in measured if n > members), default=None)
    if below is not None and above is not None:
        found = _between(kind, alone, (below, members, above))
    else:
        found = _beyond(kind, alone, members)
    crowding = host.crowding(members)
    nearest = min(host.crowding(n) for n in (below, above) if n is not None)
    parts = Parts(found.parts.start * crowding, found.parts.wire * crowding)
    low, high = found.low * min(nearest, crowding), found.high * max(nearest, crowding)
    return Estimate(parts, min(low, parts.seconds), max(high, parts.seconds))


def crowded(estimate: Estimate, ratio: float) -> Estimate:
    """The same where everything takes ``ratio`` times as long, or, at the other end, does not."""
    parts = Parts(estimate.parts.start * ratio, estimate.parts.wire * ratio)
    return Estimate(
        parts, min(estimate.low, estimate.low * ratio), max(estimate.high, estimate.high * ratio)
    )


def _laws(kind: CollectiveKind, members: int) -> tuple[float, float]:
    """Coordinates in which start and wire are straight."""
    return steps(kind, members), volume(kind, members)


def _between(
    kind: CollectiveKind, measured: Mapping[int, Parts], sizes: tuple[int, int, int]
) -> Estimate:
    """On the line between the neighbours, each part in its own coordinate."""
    low, mine, high = (_laws(kind, n) for n in sizes)
    left, right = measured[sizes[0]], measured[sizes[2]]
    start, wire = (
        a + (b - a) * _share(low[at], mine[at], high[at], sizes)
        for at, a, b in ((0, left.start, right.start), (1, left.wire, right.wire))
    )
    ends = sorted((left.seconds, start + wire, right.seconds))
    return Estimate(Parts(start, wire), ends[0], ends[2])


def _share(low: float, mine: float, high: float, sizes: tuple[int, int, int]) -> float:
    """Of the way from the lower neighbour; by the members where the law sees no difference."""
    if low < high:
        return min(1.0, max(0.0, (mine - low) / (high - low)))
    return (sizes[1] - sizes[0]) / (sizes[2] - sizes[0])


def _beyond(kind: CollectiveKind, measured: Mapping[int, Parts], members: int) -> Estimate:
    """From the nearest group on: by the law, as far as the measured groups follow it."""
    sizes = sorted(measured)
    larger = members > sizes[-1]
    nearest = sizes[-1] if larger else sizes[0]
    other = sizes[-2 if larger else 1] if len(sizes) > 1 else None
    here, there = _laws(kind, nearest), _laws(kind, members)
    last = measured[nearest]
    values, whole = [], 0.0
    for at, seconds in enumerate((last.start, last.wire)):
        ratio, weight = there[at] / here[at], 1.0
        if other is not None:
            before = (measured[other].start, measured[other].wire)[at]
            weight = _weight(before, seconds, _laws(kind, other)[at], here[at])
        values.append(seconds * (1 + weight * (ratio - 1)))
        whole += seconds * ratio
    parts = Parts(*values)
    ends = sorted((last.seconds, whole, parts.seconds))
    return Estimate(parts, ends[0], ends[2])


def _weight(before: float, last: float, law_before: float, law_last: float) -> float:
    """How much of a part follows its law: the slope of two groups over that of proportion."""
    if law_last == law_before or last <= 0:
        return 1.0
    slope = (last - before) / last / ((law_last - law_before) / law_last)
    return min(1.0, max(0.0, slope))
