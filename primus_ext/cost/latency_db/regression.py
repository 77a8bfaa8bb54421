"""Times of ops that nobody measured, from those of the same kind on the same device.

As with measured tables (:mod:`primus_ext.cost.measured`), what is interpolated is measured over
modelled: the model has the trend, the measurements what it misses.  The model is the caller's, or,
for a device that we have no figures of, a roofline whose numbers the measurements give.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from primus_ext.cost.latency_db import kinds, kriging
from primus_ext.cost.latency_db.kriging import Field, quantile
from primus_ext.trace import Op

FARTHEST = 2.0
"""Octaves to the nearest measured op of the kind within which an estimate can be trusted: beyond,
caches, allocations or another kernel may change what the measured ones show."""
Model = Callable[[Op], float]
"""Modelled seconds of an op."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What one execution of an op takes."""

    seconds: float
    low: float
    high: float
    """Interval that holds 90 % of left-out measurements
    (:data:`primus_ext.cost.latency_db.kriging.LEVEL`); infinite from a single one."""
    octaves: float
    """Distance to the nearest measured op of its kind; infinite where there is none."""
    points: int
    """Measured ops of its kind."""

    @property
    def sound(self) -> bool:
        """Whether it stands between measurements: near enough, and more than one."""
        return self.octaves <= FARTHEST and math.isfinite(self.high)


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """A device in three numbers for each family and number format."""

    costs: Mapping[str, tuple[float, float, float]]
    """Seconds of a start, of a FLOP and of a byte, none negative."""

    def seconds(self, op: Op) -> float:
        """Start, computation and traffic one after another.

        Raises:
            ValueError: Nothing like it was measured.
        """
        found = self.costs.get(_likeness(op))
        if found is None:
            raise ValueError(f"nothing like {op.name} was measured")
        return found[0] + found[1] * op.flops + found[2] * op.bytes

    @classmethod
    def of(cls, measured: Iterable[tuple[Op, float]]) -> Roofline:
        """The one that is nearest to measured ops, in relative error.

        Args:
            measured: Ops and their seconds.
        """
        alike: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for op, seconds in measured:
            row = (1 / seconds, op.flops / seconds, op.bytes / seconds)
            alike[_likeness(op)].append(row)
        return cls({name: _not_negative(rows) for name, rows in alike.items()})


def _likeness(op: Op) -> str:
    return f"{op.family} {op.attr('dtype', '')}"


def _not_negative(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Costs, none negative, whose products with the rows come nearest to 1.

    They are the best of all choices of costs that are zero (three costs have seven).
    """
    system = np.asarray(rows)
    best, found = math.inf, (0.0, 0.0, 0.0)
    for chosen in itertools.product((False, True), repeat=3):
        columns = [i for i, taken in enumerate(chosen) if taken and system[:, i].any()]
        if not columns:
            continue
        part = system[:, columns] / (scale := np.abs(system[:, columns]).max(axis=0))
        solved = np.linalg.lstsq(part, np.ones(len(system)), rcond=None)[0]
        error = float(((part @ solved - 1.0) ** 2).sum())
        if (solved > 0).all() and error < best - 1e-12:
            best, costs = error, [0.0, 0.0, 0.0]
            for column, cost in zip(columns, solved / scale, strict=True):
                costs[column] = float(cost)
            found = costs[0], costs[1], costs[2]
    return found


class Regression:
    """Estimates on one device."""

    def __init__(self, measured: Iterable[tuple[Op, float]], model: Model | None = None) -> None:
        """Learn from measured ops.

        Args:
            measured: Ops in canonical form and their seconds, one entry an op.
            model: Modelled seconds; None: a roofline of the measurements themselves.
        """
        points = list(measured)
        self._model = model or Roofline.of(points).seconds
        places: dict[str, list[kinds.Place]] = defaultdict(list)
        values: dict[str, list[float]] = defaultdict(list)
        for op, seconds in points:
            modelled = self._modelled(op)
            if modelled is not None:
                kind = kinds.kind_of(op)
                places[kind].append(kinds.place_of(op))
                values[kind].append(math.log(seconds / modelled))
        self._fields = {kind: Field(places[kind], values[kind]) for kind in places}
        self._means: dict[str, list[float]] = defaultdict(list)
        for kind, found in values.items():
            self._means[kinds.group_of(kind)].append(statistics.fmean(found))

    def _modelled(self, op: Op) -> float | None:
        """Modelled seconds; None for what the model has no price of."""
        try:
            return self._model(op)
        except ValueError:
            return None

    def estimate(self, op: Op) -> Estimate | None:
        """Seconds of an op; None where nothing of its family was measured.

        Args:
            op: In canonical form.
        """
        kind = kinds.kind_of(op)
        field, means = self._fields.get(kind), self._means.get(kinds.group_of(kind))
        modelled = self._modelled(op) if means else None
        if modelled is None or not means:
            return None
        if field is None:  # as the other kinds of the family, which lie as far apart as they do
            middle = statistics.median(means)
            far = quantile([mean - middle for mean in means])
            return _estimate(modelled * math.exp(middle), far, math.inf, 0)
        found = field.at(kinds.place_of(op))
        half = quantile(field.residuals) * found.deviation
        return _estimate(modelled * math.exp(found.value), half, found.octaves, len(field))

    def removed(self, kind: str, candidates: Sequence[Op], ops: Sequence[Op]) -> np.ndarray:
        """Share of the expected error of each op that measuring a candidate would remove.

        Args:
            kind: Of all of them.
            candidates: ``c`` ops that may be measured.
            ops: ``n`` ops, at least one.

        Returns:
            ``[c, n]``.
        """
        field = self._fields.get(kind)
        places = [kinds.place_of(op) for op in candidates], [kinds.place_of(op) for op in ops]
        return field.removed(*places) if field else kriging.removed(*places)

    @property
    def kinds(self) -> dict[str, int]:
        """Measured ops by kind."""
        return {kind: len(field) for kind, field in self._fields.items()}


def _estimate(seconds: float, half: float, octaves: float, points: int) -> Estimate:
    high = seconds * math.exp(half) if math.isfinite(half) else math.inf
    return Estimate(seconds, seconds * math.exp(-half), high, octaves, points)
