"""Prices of collectives from times that were measured with the real library."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus_ext.cluster import Cluster
from primus_ext.collective_samples import EXCHANGE, HOST, NETWORK, SamplesError, Sweep, load
from primus_ext.cost import piecewise
from primus_ext.cost.group_sizes import Estimate, Parts, estimate
from primus_ext.cost.placement import Placement, placement, require_ranks
from primus_ext.cost.priced import FREE, MEASURED, CostError, Priced
from primus_ext.trace import Collective, CollectiveKind

_ADDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
"""Kinds whose time depends on the numbers that are added, and not on their bytes alone."""
_WIDTH = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "int16": 2}
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


class MeasuredCollectives:
    """Lines fitted to one or several sweeps; the later ones go first where they overlap."""

    def __init__(self, sweeps: Sequence[Sweep], name: str) -> None:
        """Fit.

        Args:
            sweeps: Of the same device and backend, e.g. one of a host and one over the network.
            name: What evidence calls them, e.g. the file.

        Raises:
            SamplesError: There is no sweep, it is empty, or they are of different devices.
        """
        if not sweeps or not any(sweep.samples for sweep in sweeps):
            raise SamplesError(f"{name} holds no samples of collectives")
        if len({(s.backend, s.accelerator) for s in sweeps}) > 1:
            raise SamplesError(f"{name}: sweeps of different devices or backends are no one target")
        self.name, self.sweep = name, sweeps[-1]
        self._points: dict[tuple[Key, int], list[piecewise.Point]] = defaultdict(list)
        noise: dict[tuple[Key, int], list[float]] = defaultdict(list)
        for sample in (sample for sweep in sweeps for sample in sweep.samples):
            dtype = sample.dtype if sample.kind in _ADDS else ""
            key = ((sample.kind, sample.variant, dtype, sample.tier), sample.members)
            self._points[key] = [p for p in self._points[key] if p[0] != sample.bytes]
            self._points[key].append((sample.bytes, sample.typical))
            noise[key].append(sample.spread)
        self.curves: dict[Key, dict[int, piecewise.Curve]] = defaultdict(dict)
        for (key, members), points in self._points.items():
            spread = sorted(noise[key, members])[len(noise[key, members]) // 2]
            self.curves[key][members] = piecewise.fit(points, spread)
        self._shared = self.sweep.host_cores if self.sweep.accelerator == "cpu" else None

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

    def answer(self, collective: Collective, where: Placement) -> Answer | None:
        """Seconds over a group that lies so on the target; None where no measured time carries.

        Args:
            collective: Kind, size, number format and group.
            where: Its members, two or more.
        """
        if where.domains == 1:
            return self._in_tier(collective, HOST, where.size)
        if where.local == 1 or collective.kind is CollectiveKind.SEND_RECV:
            members = where.domains if where.local == 1 else 2
            return self._in_tier(collective, NETWORK, members)
        return self._over_tiers(collective, where)

    def _over_tiers(self, collective: Collective, where: Placement) -> Answer | None:
        """Inside the hosts first, then between them with what each member has left.

        Added they are what an implementation takes that does one after the other; one that does
        both at once takes the longer of the two, which is the lower end.
        """
        if collective.kind not in _INSIDE or where.size != where.domains * where.local:
            return None
        part = collective.bytes
        if collective.kind not in (CollectiveKind.BROADCAST, CollectiveKind.BARRIER):
            part = -(-part // where.local)
        found = [self._in_tier(dataclasses.replace(collective, bytes=part), NETWORK, where.domains)]
        for kind in _INSIDE[collective.kind]:
            inside = dataclasses.replace(collective, kind=kind)
            found.append(self._in_tier(inside, HOST, where.local))
        answers = [one for one in found if one is not None]
        if len(answers) < len(found):
            return None
        return Answer(
            Parts(sum(a.parts.start for a in answers), sum(a.parts.wire for a in answers)),
            max(a.low for a in answers), sum(a.high for a in answers),
            f"tier by tier: {'; '.join(dict.fromkeys(a.basis for a in answers))}",
        )  # fmt: skip

    def _in_tier(self, collective: Collective, tier: str, members: int) -> Answer | None:
        kind, size = collective.kind, collective.bytes
        variant = ""
        if kind is CollectiveKind.BARRIER:
            size = 0
        elif kind is CollectiveKind.SEND_RECV:
            # along a pipeline one message follows another; elsewhere everyone sends at once
            variant, members = ("", 2) if collective.group == "pp" else (EXCHANGE, members)
        dtype = self._dtype(collective, variant, tier)
        curves = self.curves.get((kind, variant, dtype, tier))
        if not curves:
            return None
        return _answered(kind, curves, size, members, self._shared if tier == HOST else None)

    def _dtype(self, collective: Collective, variant: str, tier: str) -> str:
        """The measured number format: the same one, else one of its width, else the slowest."""
        kind = collective.kind
        if kind not in _ADDS:
            return ""
        known = [key[2] for key in self.curves if (key[0], key[1], key[3]) == (kind, variant, tier)]
        if collective.dtype in known or not known:
            return collective.dtype
        width = _WIDTH.get(collective.dtype)
        alike = [dtype for dtype in known if width and _WIDTH.get(dtype) == width]

        def seconds(dtype: str) -> float:
            curves = self.curves[kind, variant, dtype, tier]
            return curves[min(curves)].seconds(collective.bytes)

        return max(alike or known, key=seconds)

    def price(self, cluster: Cluster, collective: Collective, ranks: Sequence[int]) -> Priced | None:
        """As :func:`primus_ext.cost.collectives.price`, None where no measured time carries.

        Raises:
            CostError: A rank does not exist on the target, or that has another accelerator.
        """
        self.require(cluster)
        require_ranks(cluster, collective.group, ranks)
        if len(ranks) == 1:
            return FREE
        found = self.answer(collective, placement(cluster, ranks))
        if found is None:
            return None
        terms = {"latency": found.parts.start, "wire": found.parts.wire}
        return Priced(found.parts.seconds, MEASURED, terms, (found.low, found.high), found.basis)

    def fits(self) -> tuple[dict[str, Any], ...]:
        """All lines, for the reader of a file."""
        return tuple(
            {
                "kind": str(key[0]), "variant": key[1], "dtype": key[2], "tier": key[3],
                "members": members, "residual": curve.residual,
                "lines": [
                    {"upto_bytes": None if math.isinf(line.upto) else line.upto,
                     "start_s": line.start, "s_per_byte": line.rate}
                    for line in curve.lines
                ],
            }
            for key, curves in self.curves.items()
            for members, curve in sorted(curves.items())
        )  # fmt: skip


@functools.lru_cache(maxsize=8)
def of_files(paths: tuple[Path, ...]) -> MeasuredCollectives:
    """As :meth:`MeasuredCollectives.of_files`, read once."""
    return MeasuredCollectives.of_files(paths)


def _answered(
    kind: CollectiveKind, curves: dict[int, piecewise.Curve], size: int, members: int,
    cores: int | None,
) -> Answer:  # fmt: skip
    """From the curves of one kind; residuals and distance make the interval."""
    measured = {}
    for count, curve in curves.items():
        line = curve.at(size)
        measured[count] = Parts(line.start, line.rate * size)
    found: Estimate = estimate(kind, measured, members, cores)
    near = min(curves, key=lambda n: abs(math.log(n / members)))
    residual = max(curve.residual for n, curve in curves.items() if n == near or len(curves) == 1)
    outside = _outside(curves[near], size)
    width = residual * (1 + outside)
    sizes = ", ".join(str(n) for n in sorted(curves))
    near_curve = curves[near]
    basis = f"{kind} in groups of {sizes}"
    if near_curve.largest:
        basis += f", {near_curve.smallest:,.0f} to {near_curve.largest:,.0f} bytes"
    if members not in curves:
        basis += f", {'between' if min(curves) < members < max(curves) else 'extrapolated'} for "
        basis += f"{members}"
    if outside:
        basis += ", extrapolated beyond these sizes"
    return Answer(found.parts, found.low * math.exp(-width), found.high * math.exp(width), basis)


def _outside(curve: piecewise.Curve, size: float) -> float:
    """Powers of two that a size lies beyond the measured ones."""
    if size <= 0 or curve.largest <= 0:
        return 0.0
    if size > curve.largest:
        return math.log2(size / curve.largest)
    return math.log2(curve.smallest / size) if size < curve.smallest else 0.0
