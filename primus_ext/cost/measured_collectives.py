"""Prices of collectives from times that were measured with the real library."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.cluster import Cluster
from primus_ext.collective_samples import (
    ADDS,
    EXCHANGE,
    HOST,
    NETWORK,
    Sample,
    SamplesError,
    Sweep,
    load,
)
from primus_ext.cost import piecewise
from primus_ext.cost.group_sizes import Host, Parts, crowded, estimate
from primus_ext.cost.placement import Placement, placement, require_ranks
from primus_ext.cost.priced import FREE, MEASURED, CostError, Priced
from primus_ext.trace import Collective, CollectiveKind

_WIDTH = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "int16": 2}
NORMAL_90 = 1.645
"""Standard deviations that hold the central 90 % of a normal distribution, the level of a step's
interval (:data:`primus_ext.project.throughput.LEVEL`)."""
_INSIDE = {
    CollectiveKind.ALL_REDUCE: (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER),
    CollectiveKind.ALL_GATHER: (CollectiveKind.ALL_GATHER,),
    CollectiveKind.REDUCE_SCATTER: (CollectiveKind.REDUCE_SCATTER,),
    CollectiveKind.BROADCAST: (CollectiveKind.BROADCAST,),
    CollectiveKind.BARRIER: (CollectiveKind.BARRIER,),
}
"""What runs inside the hosts when a collective of several is done tier by tier."""

Key = tuple[CollectiveKind, str, str, str]
"""Kind, variant, dtype ('' where it does not matter) and tier."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Seconds of a collective, and how far measured times carry."""

    parts: Parts
    low: float
    """The interval: residuals of the fit, and of groups that were not measured both extremes."""
    high: float
    basis: str
    """What it stands on, in words."""
    processor: float = 0.0
    """Part of the seconds that takes a core of the host, where devices don't do the work."""


def key_of(sample: Sample) -> Key:
    """What a sample is a point of, beside its group."""
    return sample.kind, sample.variant, sample.dtype if sample.kind in ADDS else "", sample.tier


class MeasuredCollectives:
    """Lines fitted to one or several sweeps of the same kind of device."""

    def __init__(self, sweeps: Sequence[Sweep], name: str, *, quiet: bool = False) -> None:
        """Fit.

        Args:
            sweeps: Of one backend and device: with other numbers of processes a host, or over
                other tiers.  Where two hold the same point the later one's is taken.
            name: What evidence calls them, e.g. the file.
            quiet: Fit what is quickest of the repetitions instead of their median: the times of a
                machine that nobody else uses, from one that others do.

        Raises:
            SamplesError: There is no sweep, it is empty, or they are of different devices.
        """
        if not sweeps or not any(sweep.samples for sweep in sweeps):
            raise SamplesError(f"{name} holds no samples of collectives")
        if len({(s.backend, s.accelerator) for s in sweeps}) > 1:
            raise SamplesError(f"{name}: sweeps of different devices or backends are no one target")
        self.name, self.sweep = name, sweeps[-1]
        # The largest of all sizes: what disturbs adds to the time and not to the work, and the
        # longer a collective is the less it runs undisturbed.
        self._shares: dict[tuple[int, Key, int], float] = defaultdict(float)
        self.curves: dict[int, dict[Key, dict[int, piecewise.Curve]]] = {}
        """Lines by processes of a host, kind and members."""
        for crowd in dict.fromkeys(sweep.processes // sweep.hosts for sweep in sweeps):
            of_crowd = [sweep for sweep in sweeps if sweep.processes // sweep.hosts == crowd]
            samples = [sample for sweep in of_crowd for sample in sweep.samples]
            self.curves[crowd] = _fitted(samples, quiet)
            for one in samples:
                where = crowd, key_of(one), one.members
                self._shares[where] = max(self._shares[where], one.processor_share)

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> MeasuredCollectives:
        """Read and fit.

        Raises:
            SamplesError: A file holds none, or they don't belong together.
        """
        return cls([load(path) for path in paths], ", ".join(path.name for path in paths))

    @property
    def title(self) -> str:
        """File, backend and versions, in words."""
        versions = ", ".join(f"{name} {value}" for name, value in self.sweep.versions.items())
        return f"{self.name} ({self.sweep.backend} on {self.sweep.product}; {versions})"

    def require(self, cluster: Cluster) -> None:
        """Refuse a target that the times are not of.

        Raises:
            CostError: It has another accelerator.
        """
        if self.sweep.accelerator != cluster.accelerator.name:
            raise CostError(
                f"collectives of {self.name} were measured on {self.sweep.accelerator}, the target "
                f"{cluster.name} has {cluster.accelerator.name}"
            )

    def price(
        self, cluster: Cluster, collective: Collective, ranks: Sequence[int]
    ) -> Priced | None:
        """As :func:`primus_ext.cost.collectives.price`, None where no measured time carries.

        Raises:
            CostError: A rank does not exist on the target, or that has another accelerator.
        """
        self.require(cluster)
        require_ranks(cluster, collective.group, ranks)
        if len(ranks) == 1:
            return FREE
        cores = cluster.accelerator.host_cores
        host = Host(cluster.gpus_per_node, int(cores.value) if cores is not None else None)
        found = self.answer(collective, placement(cluster, ranks), host)
        if found is None:
            return None
        terms = {"latency": found.parts.start, "wire": found.parts.wire}
        if cores is not None:
            terms["processor"] = found.processor
        return Priced(found.parts.seconds, MEASURED, terms, (found.low, found.high), found.basis)

    def answer(self, collective: Collective, where: Placement, host: Host) -> Answer | None:
        """Seconds over a group that lies so on a target; None where no measured time carries.

        Args:
            collective: Kind, size, number format and group.
            where: Its members, two or more.
            host: Of the target.
        """
        crowd = min(self.curves, key=lambda n: abs(math.log(n / host.processes)))
        if where.domains == 1:
            return self._in_tier(collective, HOST, where.size, host, crowd)
        if where.local == 1 or collective.kind is CollectiveKind.SEND_RECV:
            members = where.domains if where.local == 1 else 2
            return self._in_tier(collective, NETWORK, members, host, crowd)
        return self._over_tiers(collective, where, host, crowd)

    def _over_tiers(
        self, collective: Collective, where: Placement, host: Host, crowd: int
    ) -> Answer | None:
        """Inside the hosts first, then between them with what each member has left.

        Added they are what an implementation takes that does one after the other; one that does
        both at once takes the longer of the two, which is the lower end.
        """
        if collective.kind not in _INSIDE or where.size != where.domains * where.local:
            return None
        part = collective.bytes
        if collective.kind not in (CollectiveKind.BROADCAST, CollectiveKind.BARRIER):
            part = -(-part // where.local)
        beyond = dataclasses.replace(collective, bytes=part)
        found = [self._in_tier(beyond, NETWORK, where.domains, host, crowd)]
        for kind in _INSIDE[collective.kind]:
            inside = dataclasses.replace(collective, kind=kind)
            found.append(self._in_tier(inside, HOST, where.local, host, crowd))
        answers = [one for one in found if one is not None]
        if len(answers) < len(found):
            return None
        return Answer(
            Parts(sum(a.parts.start for a in answers), sum(a.parts.wire for a in answers)),
            max(a.low for a in answers), sum(a.high for a in answers),
            f"tier by tier: {'; '.join(dict.fromkeys(a.basis for a in answers))}",
            sum(a.processor for a in answers),
        )  # fmt: skip

    def _in_tier(
        self, collective: Collective, tier: str, members: int, host: Host, crowd: int
    ) -> Answer | None:
        kind, size, variant = collective.kind, collective.bytes, ""
        if kind is CollectiveKind.BARRIER:
            size = 0
        elif kind is CollectiveKind.SEND_RECV:
            # along a pipeline one message follows another; elsewhere everyone sends at once
            variant, members = ("", 2) if collective.group == "pp" else (EXCHANGE, members)
        key = (kind, variant, self._dtype(collective, tier, crowd), tier)
        curves = self.curves[crowd].get(key)
        if not curves:
            return None
        measured = Host(crowd, None if host.cores is None else self.sweep.host_cores)
        found = _answered(kind, curves, size, members, measured, host)
        near = min(curves, key=lambda n: abs(math.log(n / members)))
        working = self._shares[crowd, key, near]
        return dataclasses.replace(found, processor=working * found.parts.seconds)

    def _dtype(self, collective: Collective, tier: str, crowd: int) -> str:
        """The measured number format: the same one, else one of its width, else the slowest."""
        kind, all_curves = collective.kind, self.curves[crowd]
        if kind not in ADDS:
            return ""
        known = [key[2] for key in all_curves if key[0] == kind and key[3] == tier]
        if collective.dtype in known or not known:
            return collective.dtype
        width = _WIDTH.get(collective.dtype)
        alike = [dtype for dtype in known if width and _WIDTH.get(dtype) == width]

        def seconds(dtype: str) -> float:
            curves = all_curves[kind, "", dtype, tier]
            return curves[min(curves)].seconds(collective.bytes)

        return max(alike or known, key=seconds)

    def fits(self) -> tuple[dict[str, Any], ...]:
        """All lines, for the reader of a file."""
        return tuple(
            {
                "processes_per_host": crowd, "kind": str(key[0]), "variant": key[1],
                "dtype": key[2], "tier": key[3], "members": members, "residual": curve.residual,
                "lines": [
                    {"upto_bytes": None if math.isinf(line.upto) else line.upto,
                     "start_s": line.start, "s_per_byte": line.rate}
                    for line in curve.lines
                ],
            }
            for crowd, kinds in self.curves.items()
            for key, curves in kinds.items()
            for members, curve in sorted(curves.items())
        )  # fmt: skip


def _fitted(samples: Sequence[Sample], quiet: bool) -> dict[Key, dict[int, piecewise.Curve]]:
    """A curve for every kind and group."""
    points: dict[tuple[Key, int], dict[int, Sample]] = defaultdict(dict)
    for sample in samples:
        points[key_of(sample), sample.members][sample.bytes] = sample
    curves: dict[Key, dict[int, piecewise.Curve]] = defaultdict(dict)
    for (key, members), found in points.items():
        curves[key][members] = piecewise.fit(
            [(size, s.quietest if quiet else s.typical) for size, s in found.items()],
            statistics.median(sample.noise(quiet) for sample in found.values()),
        )
    return dict(curves)


def _answered(
    kind: CollectiveKind, curves: Mapping[int, piecewise.Curve], size: int, members: int,
    measured: Host, host: Host,
) -> Answer:  # fmt: skip
    """From the curves of one kind; residuals and distance make the interval."""
    lines = {count: curve.at(size) for count, curve in curves.items()}
    parts = {count: Parts(line.start, line.rate * size) for count, line in lines.items()}
    found = estimate(kind, parts, members, measured)
    ratio = host.crowding(members) / measured.crowding(members)
    found = crowded(found, ratio)
    near = curves[min(curves, key=lambda n: abs(math.log(n / members)))]
    outside = _outside(near, size)
    width = NORMAL_90 * near.residual * (1 + outside)
    return Answer(
        found.parts, found.low * math.exp(-width), found.high * math.exp(width),
        _basis(kind, curves, members, near, bool(outside), measured, ratio),
    )  # fmt: skip


def _basis(
    kind: CollectiveKind, curves: Mapping[int, piecewise.Curve], members: int,
    near: piecewise.Curve, outside: bool, measured: Host, ratio: float,
) -> str:  # fmt: skip
    """What an answer stands on, in words."""
    told = f"{kind} in groups of {', '.join(str(n) for n in sorted(curves))}"
    if near.largest:
        told += f", {near.smallest:,.0f} to {near.largest:,.0f} bytes"
    if members not in curves:
        inside = min(curves) < members < max(curves)
        told += f", {'between them' if inside else 'extrapolated'} for groups of {members}"
    if outside:
        told += ", extrapolated beyond these sizes"
    if ratio != 1:
        told += f", times {ratio:.2g} for other than the {measured.processes} processes a host"
    return told


def _outside(curve: piecewise.Curve, size: float) -> float:
    """Powers of two that a size lies beyond the measured ones."""
    if size <= 0 or curve.largest <= 0:
        return 0.0
    if size > curve.largest:
        return math.log2(size / curve.largest)
    return math.log2(curve.smallest / size) if size < curve.smallest else 0.0
