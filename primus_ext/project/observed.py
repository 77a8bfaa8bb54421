"""Measured durations in the place of modelled ones.

A part of the model that ran on a device took so many times what the cost model says of that device.
That ratio goes to every op of the part, so that what runs beside it is hidden by as much as really
hides it; it carries over to another target, whose ops the model prices too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from primus_ext.cluster import Cluster
from primus_ext.measurement import ChunkSamples, PartSamples, RankMeasurement
from primus_ext.trace import Call, ChunkTrace, Family, RankTrace, ScopeKind, Segment

_OTHER = ScopeKind.OTHER
REMOTE = (Family.COLLECTIVE, Family.P2P)
"""Families whose durations are not this rank's own."""


class MeasurementError(ValueError):
    """A measurement is not one of this trace; the message is one sentence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a projection from measurements stands on."""

    ranks: tuple[RankMeasurement, ...]
    """One for every distinct kind of rank."""
    accelerator: str
    """What was measured, by the name of its file."""
    device: Cluster | None = None
    """The machine that was measured; None: one of the target's own."""
    small: tuple[RankTrace, ...] = ()
    """Traces of the smaller world that was measured in the place of the job's; empty: the ranks
    are the job's own."""

    def rank(self, trace: RankTrace) -> RankMeasurement:
        """Of the rank that a trace is of.

        Raises:
            MeasurementError: It was not measured.
        """
        if self.small:
            return self.ranks[0]
        for one in self.ranks:
            if set(trace.pp_ranks) & set(one.pp_ranks):
                return one
        raise MeasurementError(f"pipeline rank {trace.pp_ranks[0]} was not measured")

    @property
    def spread(self) -> float:
        """The largest of all ranks."""
        return max(one.spread for one in self.ranks)

    @property
    def words(self) -> str:
        """Evidence of what comes from it."""
        one = self.ranks[0]
        beside = f", {one.beside} processes at once" if one.beside > 1 else ""
        carried = ", by the model to the target" if self.device else ""
        if self.small:
            ranks = sum(len(group) for name, group in self.small[0].groups.items()
                        if name == "default_pg") or 1  # fmt: skip
            carried += f", of a world of {ranks} in the place of the job's"
        return (
            f"measured: median of {one.steps} steps on {one.device}{beside}, spread "
            f"{self.spread:.0%}{carried}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Lasts:
    """One direction of a part, or the work around a step."""

    stretch: float
    """Measured over modelled seconds of its own ops on the device that was measured."""
    remote: float = 1.0
    """The same for its collectives, where they were inside what was measured."""
    beside: float = 0.0
    """Seconds that belong to no op of it: measured where the trace has none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """One rank."""

    chunks: tuple[tuple[tuple[Lasts, Lasts], ...], ...]
    """For each chunk and segment of it, one occurrence: forward and backward."""
    between: tuple[tuple[Lasts, Lasts], ...]
    """For each chunk, seconds between its parts where the trace has no segment for them."""
    step: Lasts


AS_MODELLED = Lasts(1.0)

Seconds = Callable[[Sequence[Call]], float]
"""Modelled seconds of the calls that are a rank's own, on the measured device."""


def of(
    trace: RankTrace, measurement: RankMeasurement, own: Seconds, alone: bool = True
) -> Observed:
    """Measured over modelled, part by part.

    Args:
        trace: The rank.
        measurement: Of a rank that does the same.
        own: Prices on the measured device.
        alone: Whether collectives are in neither; else they are in both.

    Raises:
        MeasurementError: Parts don't match.
    """
    if len(trace.chunks) != len(measurement.chunks):
        raise MeasurementError(
            f"the measurement of rank {measurement.rank} has {len(measurement.chunks)} model "
            f"chunks, its trace {len(trace.chunks)}"
        )
    pairs = [_chunk(*both, own) for both in zip(trace.chunks, measurement.chunks, strict=True)]
    found = Observed(
        chunks=tuple(parts for parts, _ in pairs),
        between=tuple(between for _, between in pairs),
        step=_lasts(measurement.once.median, own(trace.step)),
    )
    return found if alone else _with_collectives(found)


def _with_collectives(found: Observed) -> Observed:
    """Collectives last as their part does, of which they were a part."""
    def both(lasts: Lasts) -> Lasts:
        return dataclasses.replace(lasts, remote=lasts.stretch)

    chunks = tuple(tuple((both(a), both(b)) for a, b in chunk) for chunk in found.chunks)
    return dataclasses.replace(found, chunks=chunks, step=both(found.step))


def _chunk(
    chunk: ChunkTrace, found: ChunkSamples, own: Seconds
) -> tuple[tuple[tuple[Lasts, Lasts], ...], tuple[Lasts, Lasts]]:
    if chunk.microbatches:
        raise MeasurementError("microbatches of sharded data parallelism can't be told apart")
    measured = matched(chunk, found)
    others = [part for part in found.parts if part.kind is _OTHER]
    ahead = sum(part.forward.median for part in others)
    back = sum(part.backward.median for part in others)
    hosts = [segment for segment in chunk.segments if segment.kind is _OTHER]
    parts = []
    for segment, mine in zip(chunk.segments, measured, strict=True):
        if segment.kind is _OTHER:
            share = 1.0 / sum(one.count for one in hosts)
            seconds = (ahead * share, back * share)
        else:
            seconds = _mean(mine)
        parts.append(
            (_lasts(seconds[0], own(segment.forward)), _lasts(seconds[1], own(segment.backward)))
        )
    left = (0.0, 0.0) if hosts else (ahead, back)
    return tuple(parts), (Lasts(1.0, beside=left[0]), Lasts(1.0, beside=left[1]))


def matched(chunk: ChunkTrace, found: ChunkSamples) -> list[list[PartSamples]]:
    """Measured parts of every segment; none of those of kind OTHER.

    Both stand in the order of the forward.  A measurement may have fewer layers than the trace:
    then parts are matched by kind.

    Raises:
        MeasurementError: A segment has no measured part.
    """
    own = [index for index, one in enumerate(chunk.segments) if one.kind is not _OTHER]
    placed = sorted((place, index) for index in own for place in chunk.segments[index].places)
    parts = [part for part in found.parts if part.kind is not _OTHER]
    result: list[list[PartSamples]] = [[] for _ in chunk.segments]
    if [chunk.segments[index].kind for _, index in placed] == [part.kind for part in parts]:
        for (_, index), part in zip(placed, parts, strict=True):
            result[index].append(part)
        return result
    for index in own:
        kind = chunk.segments[index].kind
        result[index] = [part for part in parts if part.kind is kind]
        if not result[index]:
            raise MeasurementError(
                f"the measurement has no part of kind {kind}, which "
                f"{chunk.segments[index].name} is"
            )
    return result


def _mean(parts: Sequence[PartSamples]) -> tuple[float, float]:
    """Seconds of one occurrence, forward and backward."""
    ahead = sum(part.forward.median for part in parts) / len(parts)
    return ahead, sum(part.backward.median for part in parts) / len(parts)


def _lasts(measured: float, modelled: float) -> Lasts:
    if modelled > 0.0:
        return Lasts(measured / modelled)
    return Lasts(1.0, beside=measured)


def carried(seen: Observed, small: RankTrace, large: RankTrace) -> Observed:
    """What a small world's rank says of a rank of a larger one.

    A part of the large job takes as many times what is modelled as the parts of its kind do in the
    small one; layers that are computed again are a kind of their own.

    Args:
        seen: Of the small world's rank.
        small: Its trace, of one model chunk.
        large: Of the job's rank.

    Raises:
        MeasurementError: The small world has no part of a kind.
    """
    kinds: dict[tuple[ScopeKind, bool], list[tuple[int, tuple[Lasts, Lasts]]]] = {}
    for segment, lasts in zip(small.chunks[0].segments, seen.chunks[0], strict=True):
        kinds.setdefault(_kind(segment), []).append((segment.count, lasts))
    none = (Lasts(1.0), Lasts(1.0))
    chunks = tuple(
        tuple(_of_kind(kinds, segment) for segment in chunk.segments) for chunk in large.chunks
    )
    return Observed(chunks=chunks, between=(none,) * len(chunks), step=seen.step)


def _kind(segment: Segment) -> tuple[ScopeKind, bool]:
    return segment.kind, any(call.phase == "recompute" for call in segment.backward)


def _of_kind(
    kinds: dict[tuple[ScopeKind, bool], list[tuple[int, tuple[Lasts, Lasts]]]], segment: Segment
) -> tuple[Lasts, Lasts]:
    """The mean of a kind; of work between parts, of which a stage may have none, as modelled."""
    found = kinds.get(_kind(segment))
    if found is None and segment.kind is _OTHER:
        return Lasts(1.0), Lasts(1.0)
    if found is None:
        raise MeasurementError(
            f"the smaller world has no part of kind {segment.kind}, which {segment.name} is"
        )
    return _mean_lasts(found, 0), _mean_lasts(found, 1)


def _mean_lasts(found: Sequence[tuple[int, tuple[Lasts, Lasts]]], direction: int) -> Lasts:
    total = sum(count for count, _ in found)

    def mean(name: str) -> float:
        return sum(count * getattr(pair[direction], name) for count, pair in found) / total

    return Lasts(mean("stretch"), mean("remote"), mean("beside"))
