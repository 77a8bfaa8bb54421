"""Factors of training over short runs, from measured step times: least squares in logarithms.

A step time is a sum of parts, so that its logarithm is nearly linear in the logarithms of the
factors on the parts: the slope of each is the part's share of the step, found by pricing again.
Every factor is drawn to a prior, 1 (kernels run in training as they do alone), so that one without
rows stays there.  Rows far off count by their distance, not its square, and rows of one group
(source, model, GPU) count together as the square root of their number.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Parameter = tuple[str, str]
"""Who shares a factor (a generation or a vendor), and its kind."""
Floats = NDArray[np.float64]

FOLDS = 5
NOISE = 0.1
"""Deviation of ln(measured/modelled) from which a row counts by its distance: 10 %."""
WIDTH = 0.3
"""Deviation of the prior, in logarithms."""
WIDTHS = {"host_call_s": 0.7, "gemm/mxfp8": 0.5, "gemm/nvfp4": 0.5, "exchange": 0.5}
"""Where less is known beforehand: hosts differ, and the evidence of these kernels is one source."""
LARGEST_STEP = 0.7
"""In logarithms, of one round: shares change with the factors."""
_ITERATIONS = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A run, measured, and priced at the factors of this round."""

    id: str
    source: str
    group: str
    measured_s: float
    priced_s: float
    slopes: Mapping[Parameter, float]
    """d ln(priced) / d ln(factor)."""
    stratum: str
    """What its interval goes by: dense or experts."""


def fold_of(group: str) -> int:
    """The fold in which a group is left out, the same in every run of the fit."""
    return int(hashlib.sha256(group.encode()).hexdigest(), 16) % FOLDS


def _matrix(samples: Sequence[Sample], names: Sequence[Parameter]) -> Floats:
    place = {name: index for index, name in enumerate(names)}
    found = np.zeros((len(samples), len(names)))
    for row, sample in enumerate(samples):
        for name, slope in sample.slopes.items():
            found[row, place[name]] += slope
    return found


def solve(
    samples: Sequence[Sample], factors: Mapping[Parameter, float],
    prior: Mapping[Parameter, float], without: int | None = None,
) -> tuple[dict[Parameter, float], Floats]:  # fmt: skip
    """Factors that explain the measured times best.

    Args:
        samples: Priced at ``factors``.
        factors: Of this round.
        prior: What they are drawn to.
        without: A fold to leave out.

    Returns:
        The new factors, and ln(priced/measured) of every sample with them.
    """
    names = sorted(factors)
    slopes = _matrix(samples, names)
    now = np.log([factors[name] for name in names])
    goal = np.log([prior[name] for name in names])
    width = np.array([WIDTHS.get(kind, WIDTH) for _, kind in names])
    missing = np.array([np.log(s.measured_s / s.priced_s) for s in samples])
    count = Counter(s.group for s in samples)
    weight = np.array([count[s.group] ** -0.5 for s in samples])
    if without is not None:
        weight = weight * np.array([fold_of(s.group) != without for s in samples])
    found = now.copy()
    for _ in range(_ITERATIONS):
        off = slopes @ (found - now) - missing
        # the weight that makes squares grow as distances beyond NOISE (soft L1)
        near = (weight / NOISE) ** 2 / np.sqrt(1.0 + (off * weight / NOISE) ** 2)
        normal = slopes.T @ (slopes * near[:, None]) + np.diag(width**-2.0)
        right = slopes.T @ (near * (missing + slopes @ now)) + goal / width**2
        found = np.linalg.solve(normal, right)
    step = np.clip(found - now, -LARGEST_STEP, LARGEST_STEP)
    values = np.exp(now + step)
    return dict(zip(names, (float(v) for v in values), strict=True)), slopes @ step - missing


def left_out(
    samples: Sequence[Sample], factors: Mapping[Parameter, float], prior: Mapping[Parameter, float]
) -> Floats:
    """ln(priced/measured) of every sample, with the factors of a fit without its group's fold."""
    folds = np.array([fold_of(s.group) for s in samples])
    found = np.zeros(len(samples))
    for fold in range(FOLDS):
        _, off = solve(samples, factors, prior, without=fold)
        found[folds == fold] = off[folds == fold]
    return found


def quantile_of_errors(samples: Sequence[Sample], off: Floats, level: float) -> dict[str, float]:
    """By stratum, the |ln(priced/measured)| that ``level`` of the held-out rows stay within.

    Groups count as they do in the fit, so that one with many rows does not decide alone.
    """
    count = Counter(s.group for s in samples)
    found = {}
    for stratum in sorted({s.stratum for s in samples}):
        mine = [(abs(float(e)), count[s.group] ** -0.5)
                for s, e in zip(samples, off, strict=True) if s.stratum == stratum]  # fmt: skip
        mine.sort()
        total, passed = sum(w for _, w in mine), 0.0
        for error, weight in mine:
            passed += weight
            if passed >= level * total:
                found[stratum] = error
                break
    return found
