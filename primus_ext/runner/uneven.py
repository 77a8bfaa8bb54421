"""What a run is told of uneven experts and of slow ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from primus_ext.runner.outcome import UsageError

if TYPE_CHECKING:
    from primus_ext.project.result import Projection

MOST_CV = 0.5
"""From there on a normal distribution would give one rank in forty a negative time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Uneven:
    """``+projection.expert_skew`` and ``+projection.rank_cv`` as numbers."""

    skew: float | None
    """Tokens of every layer's busiest expert-parallel rank over the mean; None: not said."""
    rank_cv: float | None
    """Standard deviation of one rank's step time over its mean; None: not said."""

    @staticmethod
    def of(skew: str | None, rank_cv: str | None, routing: str | None, mode: str) -> Uneven:
        """Read what was typed.

        Args:
            skew: Of ``expert_skew``; what a model's router can't have is refused when it is known.
            rank_cv: Of that key.
            routing: Of that key.
            mode: The one that runs.

        Raises:
            UsageError: One of them is not legal.
        """
        if skew is not None and routing is not None:
            raise UsageError(
                f"+projection.expert_skew={skew} is not legal with +projection.routing: recorded "
                "counts say how uneven the load is, so drop one of them"
            )
        given = {"expert_skew": skew, "routing": routing}
        for key, value in given.items():
            if value is not None and mode != "simulate":
                raise UsageError(
                    f"+projection.{key}={value} is not legal with mode {mode}: a router that is "
                    "measured chooses the experts itself; legal: +projection=simulate"
                )
        return Uneven(
            _number("expert_skew", skew, 1.0, math.inf), _number("rank_cv", rank_cv, 0.0, MOST_CV)
        )

    def with_stragglers(self, found: Projection) -> Projection:
        """The projection with what slow ranks would add, if anything was said of them."""
        from primus_ext.project import imbalance

        if self.rank_cv is None:
            return found
        return dataclasses.replace(found, stragglers=imbalance.stragglers(found, self.rank_cv))


def _number(key: str, text: str | None, low: float, high: float) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or math.isinf(value):
        bounds = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
        raise UsageError(f"+projection.{key}={text} is not legal: it must be a number {bounds}")
    return value
