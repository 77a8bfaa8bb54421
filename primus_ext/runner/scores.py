"""How far projected step times lie from measured ones: errors, ranking, intervals."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """One row that was projected."""

    measured_s: float
    predicted_s: float
    cell: Hashable
    """Rows of one cell are alternatives for the same work."""
    low: float | None = None
    high: float | None = None
    """Interval of the step time, seconds."""


def summary(rows: Sequence[Scored]) -> dict[str, Any]:
    """Figures of a group of rows; those that need more rows than there are, are null.

    ``mape``, ``bias``: percent of the measured step time.  ``spearman``, ``kendall``: of measured
    and projected times.  ``k``, ``k_cv``: mean of projected over measured throughput, and its
    coefficient of variation, percent: what one factor for all rows would leave.  ``regret``: by how
    many percent the alternative with the best projection is slower than the best measured one, the
    mean over cells with two or more; ``regret_worst`` the largest.  ``inside``: share of rows whose
    measured time lies in the interval, percent; ``half_width``: its median half width, percent.
    """
    if not rows:
        return {"rows": 0}
    measured = np.array([row.measured_s for row in rows])
    predicted = np.array([row.predicted_s for row in rows])
    error = predicted / measured - 1
    factor = measured / predicted
    regrets = _regrets(rows)
    return {
        "rows": len(rows),
        "mape": float(np.abs(error).mean() * 100),
        "bias": float(error.mean() * 100),
        "worst_factor": float(np.maximum(factor, 1 / factor).max()),
        "spearman": _pearson(_ranks(predicted), _ranks(measured)) if len(rows) > 2 else None,
        "kendall": _kendall(predicted, measured) if len(rows) > 2 else None,
        "k": float(factor.mean()),
        "k_cv": float(factor.std() / factor.mean() * 100),
        "cells": len(regrets),
        "regret": float(np.mean(regrets)) if regrets else None,
        "regret_worst": float(np.max(regrets)) if regrets else None,
        **_intervals(rows),
    }


def _intervals(rows: Sequence[Scored]) -> dict[str, float | None]:
    bounded = [row for row in rows if row.low is not None and row.high is not None]
    if not bounded:
        return {"inside": None, "half_width": None}
    low = np.array([row.low for row in bounded], dtype=float)
    high = np.array([row.high for row in bounded], dtype=float)
    measured = np.array([row.measured_s for row in bounded])
    middle = np.array([row.predicted_s for row in bounded])
    return {
        "inside": float(((low <= measured) & (measured <= high)).mean() * 100),
        "half_width": float(np.median((high - low) / 2 / middle) * 100),
    }


def _regrets(rows: Sequence[Scored]) -> list[float]:
    cells: dict[Hashable, list[Scored]] = defaultdict(list)
    for row in rows:
        cells[row.cell].append(row)
    found = []
    for alternatives in cells.values():
        if len(alternatives) > 1:
            best = min(row.measured_s for row in alternatives)
            chosen = min(alternatives, key=lambda row: row.predicted_s)
            found.append((chosen.measured_s / best - 1) * 100)
    return found


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values with their mean."""
    order = np.sort(values)
    left, right = np.searchsorted(order, values), np.searchsorted(order, values, side="right")
    return (left + right - 1) / 2


def _pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    if not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _kendall(a: np.ndarray, b: np.ndarray) -> float | None:
    """Tau-b: pairs in the same order less those in the other, over the pairs that differ."""
    above = np.triu_indices(len(a), 1)
    first, second = (np.sign(np.subtract.outer(v, v))[above] for v in (a, b))
    scale = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / scale) if scale else None
