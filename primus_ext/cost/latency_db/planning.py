"""Which ops to measure, so that all that are wanted have a price, at the least device time.

What is not measured is interpolated, so an op is measured because it makes others certain: in every
kind of work the next one is that which removes most uncertainty for its cost.  Uncertainty of an
op is the width of its interval times its share of the configuration's time.  Candidates are the
wanted ops and those of the same layers with fewer tokens, which cost less.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from primus_ext.cost.latency_db import kinds
from primus_ext.cost.latency_db.regression import Model, Regression
from primus_ext.trace import Op

TOLERANCE = 0.10
"""Half width of an interval, in logarithms, with which an op counts as known: the spread of
repeated kernels (:data:`~primus_ext.cost.latency_db.rows.STEADY_SPREAD`)."""
NEGLIGIBLE = 0.002
"""Share of a configuration's time below which an op needs no interval, but one op of its kind."""
_UNKNOWN = 1.0
"""Half width that stands for none: nothing of the kind was measured."""
_REACH = 2.0
"""Octaves over which measuring one op makes another certain."""
_SHORTEST_S = 1e-4
"""Ops shorter than that cost about as much to measure: they are repeated."""


@dataclasses.dataclass(frozen=True, slots=True)
class Doubt:
    """A wanted op that is not known well enough."""

    op: Op
    seconds: float
    """Estimated."""
    half: float
    """Half width of its interval, in logarithms."""
    share: float
    """Of the time of the configuration where it takes most."""


class Planner:
    """What a list of configurations still needs."""

    def __init__(
        self, configurations: Mapping[str, Mapping[Op, int]], sweep: Iterable[Op] = (),
        model: Model | None = None, tolerance: float = TOLERANCE,
    ) -> None:  # fmt: skip
        """Plan for configurations.

        Args:
            configurations: How often each op runs, by configuration (ops in canonical form).
            sweep: Further ops that may be measured for them.
            model: As for :class:`~primus_ext.cost.latency_db.regression.Regression`.
            tolerance: Half width of an interval with which an op counts as known.
        """
        self._configurations = configurations
        self._model, self._tolerance = model, tolerance
        self.wanted = frozenset(op for ops in configurations.values() for op in ops)
        self._candidates: dict[str, list[Op]] = defaultdict(list)
        for op in sorted(self.wanted.union(sweep), key=repr):
            self._candidates[kinds.kind_of(op)].append(op)

    def doubts(self, known: Mapping[Op, float], refused: Iterable[Op] = ()) -> list[Doubt]:
        """Wanted ops that are not known well enough.

        Args:
            known: Measured seconds.
            refused: Ops that can't be measured.
        """
        regression, left_out = Regression(known.items(), self._model), set(refused)
        estimates: dict[Op, tuple[float, float]] = {}
        for op in self.wanted:
            found = None if op in known else regression.estimate(op)
            if op in known:
                estimates[op] = known[op], 0.0
            elif found is None:
                estimates[op] = _guess(op), _UNKNOWN
            else:
                half = math.log(found.high / found.seconds) if math.isfinite(found.high) else (
                    _UNKNOWN)  # fmt: skip
                estimates[op] = found.seconds, _UNKNOWN if not found.points else half
        shares = self._shares({op: seconds for op, (seconds, _) in estimates.items()})
        return [
            Doubt(op, seconds, half, shares[op])
            for op, (seconds, half) in sorted(estimates.items(), key=lambda item: repr(item[0]))
            if half > self._tolerance
            and op not in left_out
            and (shares[op] > NEGLIGIBLE or half >= _UNKNOWN)
        ]

    def _shares(self, seconds: Mapping[Op, float]) -> dict[Op, float]:
        found: dict[Op, float] = defaultdict(float)
        for ops in self._configurations.values():
            total = sum(seconds[op] * count for op, count in ops.items())
            for op, count in ops.items():
                found[op] = max(found[op], seconds[op] * count / total)
        return found

    def next(self, known: Mapping[Op, float], refused: Sequence[Op] = ()) -> list[Op]:
        """What to measure now, one op of each kind that has doubts; empty when all is known.

        Args:
            known: Measured seconds.
            refused: Ops that can't be measured.
        """
        regression, left_out = Regression(known.items(), self._model), set(refused)
        by_kind: dict[str, list[Doubt]] = defaultdict(list)
        for doubt in self.doubts(known, refused):
            by_kind[kinds.kind_of(doubt.op)].append(doubt)
        found = []
        for kind, doubts in by_kind.items():
            free = [op for op in self._candidates[kind] if op not in known and op not in left_out]
            if not free:
                continue
            places = [(kinds.place_of(d.op), d.half * d.share) for d in doubts]
            found.append(max(free, key=lambda op: _worth(op, places, regression)))  # noqa: B023
        return found


def _worth(op: Op, doubts: Sequence[tuple[kinds.Place, float]], regression: Regression) -> float:
    """Doubt that measuring an op removes, over what it costs."""
    place, estimate = kinds.place_of(op), regression.estimate(op)
    seconds = estimate.seconds if estimate else _guess(op)
    removed = sum(risk * math.exp(-math.dist(place, at) / _REACH) for at, risk in doubts)
    return removed / max(seconds, _SHORTEST_S)


def _guess(op: Op) -> float:
    """Seconds of an op on a device of which nothing is known, for the order of ops alone.

    A device computes some ten times as many FLOPs as it moves bytes.
    """
    return (op.flops / 10 + op.bytes) * 1e-10
