"""From measured group sizes to others: steps of the algorithm, and bytes that each member moves.

A collective of n members takes so many steps one after another, each with its start, and moves so
many bytes for each byte of its buffer: rings 2(n-1) steps and 2(n-1)/n for an all-reduce, (n-1) and
(n-1)/n for a gather or a reduce-scatter; direct exchanges (n-1) and (n-1)/n for an all-to-all; trees
log2(n) steps for a broadcast and a barrier (Thakur, Rabenseifner & Gropp 2005).  Members that share
the cores of a host move all their bytes through these: then the bytes of all count.

What a library really does differs; so the law only bends the line between measured group sizes and
beyond them, and the interval reaches from "no dependence" to "all of it in proportion".
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
class Estimate:
    """Seconds in a group of some size."""

    parts: Parts
    low: float
    high: float


def estimate(
    kind: CollectiveKind, measured: Mapping[int, Parts], members: int, cores: int | None
) -> Estimate:
    """Seconds in a group of ``members``.

    Args:
        kind: The collective.
        measured: By members, one size; at least one group.
        members: Of the group that is asked for.
        cores: That all members share; None: every member has a device.
    """
    if members in measured:
        parts = measured[members]
        return Estimate(parts, parts.seconds, parts.seconds)
    below = max((n for n in measured if n < members), default=None)
    above = min((n for n in measured if n > members), default=None)
    if below is not None and above is not None:
        return _between(kind, measured, (below, members, above), cores)
    return _beyond(kind, measured, members, cores)


def _laws(kind: CollectiveKind, members: int, cores: int | None) -> tuple[float, float]:
    """Coordinates in which start and wire are straight."""
    moved = volume(kind, members)
    if cores is not None:
        moved *= members / min(members, cores)
    return steps(kind, members), moved


def _between(
    kind: CollectiveKind, measured: Mapping[int, Parts], sizes: tuple[int, int, int],
    cores: int | None,
) -> Estimate:  # fmt: skip
    """On the line between the neighbours, each part in its own coordinate."""
    low, mine, high = (_laws(kind, n, cores) for n in sizes)
    left, right = measured[sizes[0]], measured[sizes[2]]
    values = [
        a + (b - a) * _share(*at)
        for a, b, at in (
            (left.start, right.start, (low[0], mine[0], high[0])),
            (left.wire, right.wire, (low[1], mine[1], high[1])),
        )
    ]
    ends = sorted((left.seconds, right.seconds))
    return Estimate(Parts(*values), ends[0], ends[1])


def _share(low: float, mine: float, high: float) -> float:
    return 0.5 if high == low else min(1.0, max(0.0, (mine - low) / (high - low)))


def _beyond(
    kind: CollectiveKind, measured: Mapping[int, Parts], members: int, cores: int | None
) -> Estimate:
    """From the nearest group on: by the law, as far as the measured groups follow it."""
    sizes = sorted(measured)
    nearest = sizes[-1] if members > sizes[-1] else sizes[0]
    here, there = _laws(kind, nearest, cores), _laws(kind, members, cores)
    last = measured[nearest]
    other = sizes[-2 if members > sizes[-1] else 1] if len(sizes) > 1 else None
    values, fixed, whole = [], [], []
    for index, part in enumerate(("start", "wire")):
        seconds, ratio = getattr(last, part), there[index] / here[index]
        weight = 1.0
        if other is not None:
            before = getattr(measured[other], part)
            weight = _weight(before, seconds, _laws(kind, other, cores)[index], here[index])
        values.append(seconds * (1 + weight * (ratio - 1)))
        fixed.append(seconds)
        whole.append(seconds * ratio)
    parts = Parts(*values)
    ends = sorted((sum(fixed), sum(whole), parts.seconds))
    return Estimate(parts, ends[0], ends[2])


def _weight(before: float, last: float, law_before: float, law_last: float) -> float:
    """How much of a part follows its law: the slope of two groups over that of proportion."""
    if law_last == law_before or last <= 0:
        return 1.0
    slope = (last - before) / last / ((law_last - law_before) / law_last)
    return min(1.0, max(0.0, slope))
