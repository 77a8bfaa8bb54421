"""What a price is made of."""

from __future__ import annotations

import dataclasses

MODEL = "model"
"""Evidence of a price that comes from published figures alone; nothing was measured here."""

TABLE = "latency database"
"""Evidence of a price between measured times of the same kind of work on the same product."""

MEASURED = "measured"
"""Evidence of a price between times that were measured with the job's own libraries."""


class CostError(ValueError):
    """Something has no price; the message is one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """A duration and how it is known."""

    seconds: float
    evidence: str
    """``model``, ``latency database`` or, later, ``measured``, ``calibrated model``."""
    terms: dict[str, float]
    """Parts that were compared or added, seconds: compute, memory, launch, latency, wire, ..."""
    interval: tuple[float, float] | None = None
    """Seconds between which it lies as far as measured times tell; None: not known."""
    basis: str = ""
    """What a measured price stands on, in words."""

    @property
    def processor_s(self) -> float:
        """Of a collective without engines of its own, what takes a core; all of it if not known."""
        return self.terms.get("processor", self.seconds)


FREE = Priced(0.0, MODEL, {})
"""The price of what keeps no device busy."""
