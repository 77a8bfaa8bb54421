"""Time of a collective against its size: straight lines between switch points found from data.

``a + b * bytes`` (Hockney 1994) holds as long as the library does the same thing; where it goes
over to another algorithm or protocol, or the buffers outgrow a cache, a new line begins.  Lines
are fitted by least squares of relative errors, neither ``a`` nor ``b`` negative.  How many there
are is decided by Schwarz' criterion (BIC): each costs an intercept, a slope and a switch point.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

POINTS = 3
"""Fewest points of a line: two parameters, and one more that can contradict them."""
FLOOR = 1e-3
"""Relative error below which a better fit is no argument for another line."""

Point = tuple[float, float]
"""Bytes and seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One piece."""

    upto: float
    """Bytes where the next one begins; infinity of the last."""
    start: float
    """Seconds."""
    rate: float
    """Seconds per byte."""


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """All pieces, and how well they fit."""

    lines: tuple[Line, ...]
    smallest: float
    """Bytes, of what was fitted."""
    largest: float
    residual: float
    """Root mean square of the relative errors, each line's two parameters taken off."""

    def at(self, size: float) -> Line:
        """The piece that holds a size."""
        return self.lines[bisect.bisect_right([line.upto for line in self.lines[:-1]], size)]

    def seconds(self, size: float) -> float:
        """Seconds of ``size`` bytes; the first and the last piece go on beyond the data."""
        line = self.at(size)
        return line.start + line.rate * size


def straight(points: Sequence[Point]) -> tuple[float, float]:
    """``start`` and ``rate``, neither negative, with the least sum of squared relative errors."""
    inverse = [(1 / t, s / t) for s, t in points]
    uu = math.fsum(u * u for u, _ in inverse)
    vv = math.fsum(v * v for _, v in inverse)
    uv = math.fsum(u * v for u, v in inverse)
    u1 = math.fsum(u for u, _ in inverse)
    v1 = math.fsum(v for _, v in inverse)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        start, rate = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
        if start >= 0 and rate >= 0:
            return start, rate
    alone = [(u1 / uu, 0.0)] + ([(0.0, v1 / vv)] if vv else [])
    return min(alone, key=lambda line: _squares(points, line))


def _squares(points: Sequence[Point], line: tuple[float, float]) -> float:
    return math.fsum(((line[0] + line[1] * s) / t - 1) ** 2 for s, t in points)


def fit(points: Sequence[Point], noise: float = 0.0) -> Curve:
    """Lines through measured points.

    Args:
        points: Bytes, each once, and seconds, all positive; at least one.
        noise: Relative error of a point: what is smaller is no reason for another line.

    Raises:
        ValueError: There is no point, or a time is not positive.
    """
    points = sorted(points)
    if not points or min(t for _, t in points) <= 0:
        raise ValueError("a curve needs points, and their times must be positive")
    cuts = _cuts(points, max(noise, FLOOR))
    pieces = [points[low:high] for low, high in itertools.pairwise((0, *cuts, len(points)))]
    fitted = [straight(piece) for piece in pieces]
    switches = [
        _switch(left, right, here[-1][0], there[0][0])
        for (left, right), (here, there) in zip(
            itertools.pairwise(fitted), itertools.pairwise(pieces), strict=True
        )
    ]
    lines = tuple(
        Line(upto, *line) for upto, line in zip((*switches, math.inf), fitted, strict=True)
    )
    squares = math.fsum(_squares(p, line) for p, line in zip(pieces, fitted, strict=True))
    freedom = max(1, len(points) - 2 * len(pieces))
    return Curve(lines, points[0][0], points[-1][0], math.sqrt(squares / freedom))


def _switch(
    left: tuple[float, float], right: tuple[float, float], low: float, high: float
) -> float:
    """Where one line takes over: where they cross, or half way (in powers) if they don't there."""
    if left[1] != right[1]:
        crossing = (right[0] - left[0]) / (left[1] - right[1])
        if low < crossing < high:
            return crossing
    return math.sqrt(max(low, 1.0) * high)


def _cuts(points: Sequence[Point], noise: float) -> tuple[int, ...]:
    """Where new lines begin, by the least value of the criterion."""
    count = len(points)
    squares = {
        (low, high): _squares(points[low:high], straight(points[low:high]))
        for low in range(count)
        for high in range(low + POINTS, count + 1)
    }
    # best[k][high]: of the first ``high`` points with k lines, sum of squares and cuts
    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{}]
    best.append({high: (squares[0, high], ()) for high in range(POINTS, count + 1)})
    for k in range(2, count // POINTS + 1):
        best.append({
            high: min(
                (best[k - 1][cut][0] + squares[cut, high], (*best[k - 1][cut][1], cut))
                for cut in range(POINTS * (k - 1), high - POINTS + 1)
            )
            for high in range(POINTS * k, count + 1)
        })  # fmt: skip
    found = [(k, *table[count]) for k, table in enumerate(best) if count in table]
    if not found:
        return ()
    return min(found, key=lambda one: _criterion(one[1], count, one[0], noise))[2]


def _criterion(squares: float, count: int, lines: int, noise: float) -> float:
    return count * math.log(squares / count + noise**2) + (3 * lines - 1) * math.log(count)
