"""What was measured of one rank on a real device, as pure data: raw samples, seconds and bytes.

A :class:`RankMeasurement` is to time what a :class:`primus_ext.trace.RankTrace` is to work: the
trace says what a rank does, the measurement how long its parts took where the program really ran,
with the other ranks virtual.  What the virtual ranks' answers took is in none of the parts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from primus_ext.trace import ScopeKind

NOISY = 0.2
"""Spread from which on a measurement is called noisy: a device that throttles, or is shared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Durations of the same work, seconds, one for every measured step, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds; 0 without samples."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median; 0 for fewer than four samples."""
        if len(self.seconds) < 4 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median


def added(several: Iterable[Samples]) -> Samples:
    """Durations of works that follow each other, step by step."""
    columns = [one.seconds for one in several if one.seconds]
    return Samples(tuple(sum(row) for row in zip(*columns, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartSamples:
    """One part of a model chunk; each sample is the mean over the microbatches of a step."""

    kind: ScopeKind
    name: str
    """Module path, as :attr:`primus_ext.trace.Segment.name`."""
    forward: Samples
    backward: Samples
    """With what is recomputed in it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSamples:
    """One microbatch through one model chunk."""

    vpp_stage: int
    parts: tuple[PartSamples, ...]
    """In the order of the forward; what lies between the others is one of kind OTHER."""

    @property
    def forward(self) -> Samples:
        """Of the whole forward."""
        return added(part.forward for part in self.parts)

    @property
    def backward(self) -> Samples:
        """Of the whole backward."""
        return added(part.backward for part in self.parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One kind of kernel in one step, as a profiler saw it."""

    name: str
    """Of the kernel on a GPU, of the operator on a CPU."""
    calls: int
    seconds: float
    """Of all calls, what they call themselves left out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """One rank that ran on a real device."""

    rank: int
    """Global rank of the target world."""
    pp_ranks: tuple[int, ...]
    """All pipeline ranks that hold the same modules."""
    device: str
    """Product name of the device."""
    beside: int
    """Processes that were measured at the same time on this machine, this one counted in."""
    microbatches: int
    """Of a step."""
    steps: int
    """That count, of each process; copies of a rank that were measured with it have as many."""
    chunks: tuple[ChunkSamples, ...]
    step: dict[str, Samples]
    """What happens once a step: zero, finalize, optimizer, and ``between`` for the rest of the
    framework's own work around the microbatches."""
    answers: Samples
    """What answering for the virtual ranks took; in no other number."""
    whole: Samples
    """The step with all of these."""
    warm_up: int
    """Steps before the first sample."""
    kernels: tuple[KernelTime, ...] = ()
    """Of one further step under a profiler, the most seconds first; empty without one."""
    allocated_bytes: int | None = None
    """Highest ``memory_allocated`` of the device in the measured steps; None on a CPU."""
    reserved_bytes: int | None = None
    """Highest ``memory_reserved``."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def own(self) -> Samples:
        """The step without the answers for others."""
        pairs = zip(self.whole.seconds, self.answers.seconds, strict=True)
        return Samples(tuple(whole - answers for whole, answers in pairs))

    @property
    def once(self) -> Samples:
        """Everything that happens once a step."""
        return added(self.step.values())

    @property
    def unattributed(self) -> float:
        """Share of a step, answers counted in, that no kernel of the profile accounts for.

        On a GPU that is the time in which it waits for the host; on a CPU it is negative by what
        the profiler costs.  0 without a profile.
        """
        if not self.kernels or not self.whole.median:
            return 0.0
        return 1.0 - sum(kernel.seconds for kernel in self.kernels) / self.whole.median

    @property
    def spread(self) -> float:
        """Of the step without the answers for others."""
        return self.own.spread


def merged(several: Sequence[RankMeasurement]) -> tuple[RankMeasurement, ...]:
    """One measurement for each kind of rank, with the samples of all its copies."""
    kinds: dict[tuple[int, ...], list[RankMeasurement]] = {}
    for one in several:
        kinds.setdefault(one.pp_ranks, []).append(one)
    return tuple(_merged(copies) for copies in kinds.values())


def _merged(copies: Sequence[RankMeasurement]) -> RankMeasurement:
    first = copies[0]
    chunks = [
        dataclasses.replace(chunk, parts=tuple(
            dataclasses.replace(
                part,
                forward=_joined([c.chunks[i].parts[j].forward for c in copies]),
                backward=_joined([c.chunks[i].parts[j].backward for c in copies]),
            )
            for j, part in enumerate(chunk.parts)
        ))
        for i, chunk in enumerate(first.chunks)
    ]  # fmt: skip
    return dataclasses.replace(
        first, chunks=tuple(chunks),
        step={key: _joined([c.step[key] for c in copies]) for key in first.step},
        answers=_joined([c.answers for c in copies]), whole=_joined([c.whole for c in copies]),
    )  # fmt: skip


def _joined(several: Sequence[Samples]) -> Samples:
    return Samples(tuple(second for one in several for second in one.seconds))
