"""Interpolation of scattered measurements, with an interval from its own left-out residuals.

Ordinary kriging: values are a constant plus a deviation that is alike at places near each other.
How far "near" goes, and how much single values scatter, is chosen by how well each value is
predicted without itself (leave one out, in closed form).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

REACHES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Octaves over which likeness falls to 1/e, among which the data choose."""
SCATTERS = (0.003, 0.03, 0.3)
"""Variance of a single value over that of the deviation, among which the data choose."""
MOST = 256
"""Values that take part; of more, the nearest to the place that is asked."""
LEVEL = 0.9
"""Share of left-out values that the interval holds."""
_STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895)
"""95 % quantile of Student's t with 1, 2, ... degrees of freedom: two-sided :data:`LEVEL`."""
_FEW = 4
"""Values below which nothing is chosen: the middle reach and scatter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """A value between others."""

    value: float
    deviation: float
    """Expected error at this place over that of the kind: grows with the distance to values."""
    octaves: float
    """Distance to the nearest value."""


class Field:
    """Values at places of one kind."""

    def __init__(self, places: Sequence[Sequence[float]], values: Sequence[float]) -> None:
        """Hold values.

        Args:
            places: ``[n, d]`` octaves.
            values: ``[n]``, at least one.
        """
        self._places = np.asarray(places, dtype=float)
        self._values = np.asarray(values, dtype=float)
        chosen = _evenly(len(self._values), MOST)
        self._reach, self._scatter, self.residuals = _chosen(
            self._places[chosen], self._values[chosen]
        )
        self._whole: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._values)

    def at(self, place: Sequence[float]) -> Prediction:
        """The value at a place."""
        apart = _distances(self._places, np.asarray([place], dtype=float))[:, 0]
        if len(apart) <= MOST:
            if self._whole is None:
                self._whole = self._values, _inverse(self._places, self._reach, self._scatter)
            values, inverse = self._whole
            alike = np.exp(-apart / self._reach)
        else:
            near = np.argsort(apart, kind="stable")[:MOST]
            values, alike = self._values[near], np.exp(-apart[near] / self._reach)
            inverse = _inverse(self._places[near], self._reach, self._scatter)
        weights = inverse @ alike
        column, total = inverse.sum(axis=1), float(inverse.sum())
        short = 1.0 - float(weights.sum())
        weights = weights + column * (short / total)
        variance = 1.0 + self._scatter - float(alike @ (inverse @ alike)) + short**2 / total
        return Prediction(
            float(weights @ values), math.sqrt(max(variance, self._scatter)), float(apart.min())
        )

    def removed(
        self, candidates: Sequence[Sequence[float]], places: Sequence[Sequence[float]]
    ) -> np.ndarray:
        """Share of the expected error at each place that one more value would remove.

        Args:
            candidates: ``[c, d]``, where that value may be.
            places: ``[n, d]``.

        Returns:
            ``[c, n]``.
        """
        chosen = _evenly(len(self._values), MOST)
        known = self._places[chosen]
        inverse = _inverse(known, self._reach, self._scatter)
        return _removed(candidates, places, self._reach, self._scatter, known, inverse)


def removed(candidates: Sequence[Sequence[float]], places: Sequence[Sequence[float]]) -> np.ndarray:
    """The same where there are no values yet; see :meth:`Field.removed`."""
    none = np.zeros((0, len(places[0])))
    return _removed(candidates, places, *_middle(), none, np.zeros((0, 0)))


def _removed(
    candidates: Sequence[Sequence[float]], places: Sequence[Sequence[float]], reach: float,
    scatter: float, known: np.ndarray, inverse: np.ndarray,
) -> np.ndarray:  # fmt: skip
    ours, theirs = np.asarray(candidates, dtype=float), np.asarray(places, dtype=float)
    here, there = (np.exp(-_distances(known, some) / reach) for some in (ours, theirs))
    left = inverse @ there
    shared = np.exp(-_distances(ours, theirs) / reach) - here.T @ left
    own = 1.0 + scatter - np.einsum("kc,kl,lc->c", here, inverse, here)
    at = 1.0 + scatter - np.einsum("kn,kn->n", there, left)
    explained = np.clip(shared**2 / np.outer(own, at), 0.0, 1.0)
    return 1.0 - np.sqrt(1.0 - explained)


def _middle() -> tuple[float, float]:
    return REACHES[len(REACHES) // 2], SCATTERS[len(SCATTERS) // 2]


def quantile(residuals: Sequence[float]) -> float:
    """The size that :data:`LEVEL` of further residuals are expected to stay within.

    From nine residuals on it is one of them, as in split conformal prediction.  Below, errors are
    taken to be normal, and the quantile is Student's.

    Args:
        residuals: Each over its expected deviation.
    """
    count = len(residuals)
    if count < 2:
        return math.inf
    if count - 1 <= len(_STUDENT):
        return _STUDENT[count - 2] * math.sqrt(math.fsum(r * r for r in residuals) / count)
    sizes = sorted(abs(r) for r in residuals)
    return sizes[math.ceil((count + 1) * LEVEL) - 1]


def _chosen(places: np.ndarray, values: np.ndarray) -> tuple[float, float, tuple[float, ...]]:
    """Reach, scatter, and what they leave out: residuals over their expected deviation."""
    middle = _middle()
    if len(values) < 2:
        return *middle, ()
    options = [(r, s) for r in REACHES for s in SCATTERS] if len(values) >= _FEW else [middle]
    best, found = math.inf, (*middle, ())
    for reach, scatter in options:
        inverse = _inverse(places, reach, scatter)
        column, total = inverse.sum(axis=1), inverse.sum()
        centred = inverse - np.outer(column, column) / total
        diagonal = np.diag(centred)
        standard = (centred @ values) / np.sqrt(diagonal)  # left-out error over its deviation
        size = max(float(np.mean(standard**2)), 1e-12)
        score = len(values) * math.log(size) - float(np.log(diagonal).sum())
        if score < best - 1e-9:
            best, found = score, (reach, scatter, tuple(standard.tolist()))
    return found


def _inverse(places: np.ndarray, reach: float, scatter: float) -> np.ndarray:
    alike = np.exp(-_distances(places, places) / reach)
    return np.linalg.inv(alike + scatter * np.eye(len(places)))


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.sqrt(((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2))


def _evenly(count: int, most: int) -> np.ndarray:
    """Indices of at most so many of ``count``, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
