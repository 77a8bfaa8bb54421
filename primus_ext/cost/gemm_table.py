"""Measured matrix products around a shape: what the formula misses there."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from primus_ext.cost import tables

_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8_block": "fp8_block"}
"""Number format here, what the tables call it.  fp16 runs at the rate of bf16.  Per-tensor FP8 and
NVFP4 are left out: the timed calls quantise as well, and cuBLASLt alone is up to twice as fast
(Azure 8fd0c6e and 2a370be)."""
_UNSCALED = ("bf16", "fp16")


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbour:
    """What was measured near a shape."""

    ratio: float
    """Measured over modelled seconds."""
    octaves: float
    """Distance to the nearest measured shape, in doublings of the dimension that differs most."""
    source: str


class GemmTable:
    """Median seconds over the frameworks, on a grid of m, n and k."""

    def __init__(self, axes: tuple[Any, Any, Any], seconds: Any, source: str) -> None:
        """Hold a grid.

        Args:
            axes: Sorted m, n and k (numpy).
            seconds: ``[len(m), len(n), len(k)]``, NaN where nothing was measured.
            source: Name and version of the tables.
        """
        self._axes = axes
        self._logs = tuple([math.log2(v) for v in axis.tolist()] for axis in axes)
        self._seconds = seconds
        self._source = source

    def near(
        self, m: int, n: int, k: int, model: Callable[[int, int, int], float]
    ) -> Neighbour | None:
        """Measured over modelled around [m, k] x [k, n], None where too little was measured.

        The ratio is interpolated in the logarithms of the three dimensions between the eight shapes
        around; at each it is the median over three neighbouring m, since libraries change their
        choice of kernel from one m to the next and single points scatter.  Outside the grid the
        ratio of its edge holds.

        Args:
            m: Rows.
            n: Columns.
            k: Contraction.
            model: Modelled seconds of a shape, in the conditions of the tables.
        """
        places = [self._between(i, size) for i, size in enumerate((m, n, k))]
        total = weights = 0.0
        for corner in itertools.product(*places):
            weight = math.prod(part for _, part in corner)
            ratio = self._ratio([index for index, _ in corner], model) if weight > 0 else None
            if ratio is not None:
                total, weights = total + weight * math.log(ratio), weights + weight
        if weights < 0.5:
            return None
        octaves = max(
            min(abs(math.log2(size) - log) for log in logs)
            for size, logs in zip((m, n, k), self._logs, strict=True)
        )
        return Neighbour(math.exp(total / weights), octaves, self._source)

    def _between(self, axis: int, size: int) -> list[tuple[int, float]]:
        """Indices on both sides of a size and their weights."""
        logs, wanted = self._logs[axis], math.log2(size)
        if wanted <= logs[0] or wanted >= logs[-1]:
            return [(0 if wanted <= logs[0] else len(logs) - 1, 1.0)]
        above = next(i for i, log in enumerate(logs) if log >= wanted)
        part = (wanted - logs[above - 1]) / (logs[above] - logs[above - 1])
        return [(above - 1, 1.0 - part), (above, part)]

    def _ratio(self, index: list[int], model: Callable[[int, int, int], float]) -> float | None:
        i, j, o = index
        found = []
        for row in (i - 1, i, i + 1):
            if 0 <= row < len(self._logs[0]):
                seconds = float(self._seconds[row, j, o])
                if seconds > 0:  # not NaN
                    place = zip(self._axes, (row, j, o), strict=True)
                    found.append(seconds / model(*(int(axis[at]) for axis, at in place)))
        return sorted(found)[len(found) // 2] if found else None


def load(system: str, number_format: str, without: tuple[str, ...] = ()) -> GemmTable | None:
    """The table of a product and number format, None where there is none.

    Plain formats: the median over the frameworks.  Scaled ones: the fastest, because some of the
    frameworks quantise inside the timed call, and a trace has its quantisations as ops of their
    own.

    Args:
        system: Product as the tables call it.
        number_format: As in :mod:`primus_ext.cost.formats`.
        without: Frameworks to leave out, for validation.
    """
    import numpy as np

    dtype = _DTYPES.get(number_format)
    found = tables.files(system, "gemm", "gemm_perf") if dtype else {}
    columns = [
        tables.read(path, ["m", "n", "k", "latency"], [("gemm_dtype", "=", dtype)])
        for framework, path in found.items()
        if framework not in without
    ]
    columns = [c for c in columns if len(c["m"])]
    if not columns:
        return None
    axes = tuple(np.unique(np.concatenate([c[name] for c in columns])) for name in "mnk")
    grids = np.full((len(columns), *(len(axis) for axis in axes)), np.nan)
    for grid, c in zip(grids, columns, strict=True):
        place = tuple(np.searchsorted(axis, c[n]) for axis, n in zip(axes, "mnk", strict=True))
        grid[place] = np.where(c["latency"] > 0, c["latency"] * 1e-3, np.nan)
    measured = ~np.isnan(grids).all(axis=0)
    middle = np.nanmedian if number_format in _UNSCALED else np.nanmin
    seconds = np.full(measured.shape, np.nan)
    seconds[measured] = middle(grids[:, measured], axis=0)
    return GemmTable(axes, seconds, tables.source() or "")  # pyright: ignore[reportArgumentType]
