"""Times of ops that nobody measured, from those of the same kind on the same device.

As with measured tables (:mod:`primus_ext.cost.measured`), what is interpolated is measured over
modelled: the model has the trend, the measurements what it misses.  The model is the caller's, or,
for a device that we have no figures of, a roofline whose three numbers the measurements give.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from primus_ext.cost.latency_db import kinds
from primus_ext.cost.latency_db.kriging import Field, quantile
from primus_ext.trace import Family, Op

Model = Callable[[Op], float]
"""Modelled seconds of an op."""
_UPPER = 0.9
"""Quantile of the reached rates that the roofline takes for the device's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What one execution of an op takes."""

    seconds: float
    low: float
    high: float
    """Interval that holds 90 % of left-out measurements (:data:`..kriging.LEVEL`)."""
    octaves: float
    """Distance to the nearest measured op of its kind; infinite where there is none."""
    points: int
    """Measured ops of its kind."""


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """A device in three numbers."""

    flops: Mapping[str, float]
    """FLOP/s by number format."""
    bandwidth: float
    """Bytes/s."""
    start_s: float
    """Of the shortest op."""

    def seconds(self, op: Op) -> float:
        """Start, computation and traffic one after another."""
        rate = self.flops.get(str(op.attr("dtype", ""))) or max(self.flops.values(), default=0.0)
        compute = op.flops / rate if op.flops and rate else 0.0
        return self.start_s + compute + op.bytes / self.bandwidth

    @classmethod
    def of(cls, measured: Sequence[tuple[Op, float]]) -> Roofline:
        """What measured ops reached.

        Args:
            measured: Ops and their seconds, at least one.
        """
        rates: dict[str, list[float]] = defaultdict(list)
        for op, seconds in measured:
            if op.flops and op.family is not Family.MEMORY:
                rates[str(op.attr("dtype", ""))].append(op.flops / seconds)
        streams = [op.bytes / seconds for op, seconds in measured if op.bytes]
        return cls(
            flops={dtype: _upper(found) for dtype, found in rates.items()},
            bandwidth=_upper(streams) if streams else math.inf,
            start_s=min(seconds for _, seconds in measured),
        )


def _upper(values: list[float]) -> float:
    return sorted(values)[math.ceil(_UPPER * len(values)) - 1]


class Regression:
    """Estimates on one device."""

    def __init__(self, measured: Iterable[tuple[Op, float]], model: Model | None = None) -> None:
        """Learn from measured ops.

        Args:
            measured: Ops in canonical form and their seconds, one entry an op.
            model: Modelled seconds; None: a roofline of the measurements themselves.
        """
        points = list(measured)
        self._model = model or (Roofline.of(points).seconds if points else None)
        places: dict[str, list[kinds.Place]] = defaultdict(list)
        values: dict[str, list[float]] = defaultdict(list)
        for op, seconds in points:
            modelled = self._modelled(op)
            if modelled is not None:
                kind = kinds.kind_of(op)
                places[kind].append(kinds.place_of(op))
                values[kind].append(math.log(seconds / modelled))
        self._fields = {kind: Field(places[kind], values[kind]) for kind in places}
        self._groups: dict[str, list[str]] = defaultdict(list)
        for kind in self._fields:
            self._groups[kinds.group_of(kind)].append(kind)
        self._means = {kind: statistics.fmean(values[kind]) for kind in values}

    def _modelled(self, op: Op) -> float | None:
        """Modelled seconds; None for what the model has no price of."""
        try:
            return self._model(op) if self._model else None
        except ValueError:
            return None

    def estimate(self, op: Op) -> Estimate | None:
        """Seconds of an op; None where nothing of its family was measured.

        Args:
            op: In canonical form.
        """
        kind = kinds.kind_of(op)
        field, group = self._fields.get(kind), kinds.group_of(kind)
        modelled = self._modelled(op) if group in self._groups else None
        if modelled is None:
            return None
        if field is None:
            return self._by_family(modelled, group)
        found = field.at(kinds.place_of(op))
        half = self._half_width(kind, group, found.deviation)
        seconds = modelled * math.exp(found.value)
        return Estimate(
            seconds, seconds * math.exp(-half), seconds * math.exp(half), found.octaves, len(field)
        )

    def _half_width(self, kind: str, group: str, deviation: float) -> float:
        """Of the interval, in logarithms: the kind's own residuals, else those of its family."""
        own = self._fields[kind].residuals
        if len(own) < _ENOUGH:
            family = [self._fields[other].residuals for other in self._groups[group]]
            own = tuple(itertools.chain.from_iterable(family))
        if not own:
            return math.inf
        return quantile(own) * deviation

    def _by_family(self, modelled: float, group: str) -> Estimate:
        """A kind of which nothing was measured: as the other kinds of the family, and as far."""
        means = [self._means[kind] for kind in self._groups[group]]
        middle = statistics.median(means)
        half = max((abs(mean - middle) for mean in means), default=0.0) if len(means) > 1 else (
            math.inf)  # fmt: skip
        seconds = modelled * math.exp(middle)
        return Estimate(seconds, seconds * math.exp(-half), seconds * math.exp(half), math.inf, 0)

    @property
    def kinds(self) -> dict[str, int]:
        """Measured ops by kind."""
        return {kind: len(field) for kind, field in self._fields.items()}


_ENOUGH = 9
"""Left-out residuals from which a kind's own 90 % quantile is one of them and not beyond."""
