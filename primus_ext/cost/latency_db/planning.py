"""Which ops to measure, so that all that are wanted have a price, at the least device time.

What is not measured is interpolated, so an op is measured because it makes others certain: in every
kind of work the next one is that which removes most uncertainty for its cost.  Uncertainty of an
op is the half width of its interval times its share of the configuration's time.  Candidates are
the wanted ops and those of the same layers with fewer tokens, which cost less.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from primus_ext.cost.latency_db import kinds
from primus_ext.cost.latency_db.regression import Model, Regression
from primus_ext.trace import Op

TOLERANCE = 0.10
"""Share of a configuration's time that may be unknown when nothing more is measured, errors in one
kind taken to have one sign.  They have not: twelve models on a CPU came out within 4 %
(``validation/latency_db.md``)."""
_UNKNOWN = 1.0
"""Half width that stands for none: nothing of the kind was measured."""
_LEAST = 1e-6
"""Risk of an op that matters to no configuration: of such a kind the cheapest op is measured."""
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
    risk: float
    """Share of a configuration's time that is unknown because of it: the largest of all."""


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
            tolerance: Share of a configuration's time that may stay unknown.
        """
        self._configurations = configurations
        self._model, self._tolerance = model, tolerance
        self.wanted = frozenset(op for ops in configurations.values() for op in ops)
        self._kinds = {op: kinds.kind_of(op) for op in self.wanted.union(sweep)}
        self._candidates: dict[str, list[Op]] = defaultdict(list)
        for op in sorted(self._kinds, key=repr):
            self._candidates[self._kinds[op]].append(op)

    def doubts(self, known: Mapping[Op, float], refused: Iterable[Op] = ()) -> list[Doubt]:
        """Wanted ops to measure something for.

        Those of kinds of which nothing is known, and those of the kinds that make a configuration's
        time uncertain.  Errors in one kind are taken to have one sign, errors of different kinds to
        be independent.

        Args:
            known: Measured seconds.
            refused: Ops that can't be measured.
        """
        return self._doubts(Regression(known.items(), self._model), known, set(refused))

    def _doubts(
        self, regression: Regression, known: Mapping[Op, float], left_out: set[Op]
    ) -> list[Doubt]:
        guessed = self._guessed(regression, known)
        risks: dict[Op, float] = {
            op: 0.0 for op, (_, half) in guessed.items() if half >= _UNKNOWN and op not in left_out
        }
        for ops in self._configurations.values():
            total = sum(guessed[op][0] * count for op, count in ops.items())
            own: dict[str, dict[Op, float]] = defaultdict(dict)
            for op, count in ops.items():
                seconds, half = guessed[op]
                if half and op not in left_out:
                    own[self._kinds[op]][op] = half * seconds * count / total
            for kind in _heaviest({k: sum(r.values()) for k, r in own.items()}, self._tolerance):
                for op, risk in own[kind].items():
                    risks[op] = max(risk, risks.get(op, 0.0))
        return [
            Doubt(op, *guessed[op], risk)
            for op, risk in sorted(risks.items(), key=lambda item: repr(item[0]))
        ]

    def _guessed(
        self, regression: Regression, known: Mapping[Op, float]
    ) -> dict[Op, tuple[float, float]]:
        """Seconds and half width of every wanted op."""
        found: dict[Op, tuple[float, float]] = {}
        for op in self.wanted:
            estimate = None if op in known else regression.estimate(op)
            if op in known:
                found[op] = known[op], 0.0
            elif estimate is None:
                found[op] = _guess(op), _UNKNOWN
            elif not estimate.sound:
                found[op] = estimate.seconds, _UNKNOWN
            else:
                half = math.log(estimate.high / estimate.seconds)
                found[op] = estimate.seconds, min(half, 0.99 * _UNKNOWN)
        return found

    def between(self, known: Mapping[Op, float]) -> set[Op]:
        """Wanted ops that were not measured, but lie near enough to others that were.

        Args:
            known: Measured seconds.
        """
        regression = Regression(known.items(), self._model)
        found = {op: regression.estimate(op) for op in self.wanted - known.keys()}
        return {op for op, estimate in found.items() if estimate is not None and estimate.sound}

    def next(self, known: Mapping[Op, float], refused: Sequence[Op] = ()) -> list[Op]:
        """What to measure now, one op of each kind in doubt; empty when enough is known.

        Args:
            known: Measured seconds.
            refused: Ops that can't be measured.
        """
        regression, left_out = Regression(known.items(), self._model), set(refused)
        by_kind: dict[str, list[Doubt]] = defaultdict(list)
        for doubt in self._doubts(regression, known, left_out):
            by_kind[self._kinds[doubt.op]].append(doubt)
        found = []
        for kind, doubts in by_kind.items():
            free = [op for op in self._candidates[kind] if op not in known and op not in left_out]
            if not free:
                continue
            risks = np.array([max(doubt.risk, _LEAST) for doubt in doubts])
            gained = regression.removed(kind, free, [doubt.op for doubt in doubts]) @ risks
            costs = np.array([_seconds(op, regression) for op in free])
            found.append(free[int(np.argmax(gained / costs))])
        return found


def _heaviest(risks: Mapping[str, float], tolerance: float) -> list[str]:
    """The kinds without whose risks the others together stay within the tolerance."""
    left = math.fsum(risk * risk for risk in risks.values())
    found = []
    for kind, risk in sorted(risks.items(), key=lambda item: -item[1]):
        if left <= tolerance * tolerance:
            break
        found.append(kind)
        left -= risk * risk
    return found


def _seconds(op: Op, regression: Regression) -> float:
    """What measuring an op costs, as far as is known."""
    estimate = regression.estimate(op)
    return max(estimate.seconds if estimate else _guess(op), _SHORTEST_S)


def _guess(op: Op) -> float:
    """Seconds of an op on a device of which nothing is known, for the order of ops alone.

    A device computes some ten times as many FLOPs as it moves bytes.
    """
    return (op.flops / 10 + op.bytes) * 1e-10
