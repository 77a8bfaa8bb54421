"""Terms of the step time and what each of them adds up to."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from enum import StrEnum


class TermName(StrEnum):
    """Terms in the order in which they are shown."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped gemm"
    ATTENTION = "attention"
    MEMORY = "memory-bound"
    QUANTIZE = "quantize"
    EDGES = "embedding, output and loss"
    RECOMPUTE = "recompute"
    TENSOR = "tensor-parallel communication"
    CONTEXT = "context-parallel communication"
    EXPERT = "expert communication"
    OTHER = "other communication"
    P2P = "pipeline p2p"
    DATA = "data-parallel communication"
    OPTIMIZER = "optimizer"
    HOST = "waiting for the host"
    BUBBLE = "pipeline bubble"


class Kind(StrEnum):
    """Kinds of work that share one uncertainty (``Accelerator.residuals``)."""

    GEMM = "gemm"
    ATTENTION = "attention"
    MEMORY = "memory"
    COMMUNICATION = "communication"


@dataclasses.dataclass(slots=True)
class Ledger:
    """Seconds by term and by kind of work; exposed seconds add up to a duration."""

    busy: dict[TermName, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    exposed: dict[TermName, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    kinds: dict[Kind, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    def work(self, term: TermName, kind: Kind, seconds: float) -> None:
        """Work that nothing hides."""
        self.busy[term] += seconds
        self.exposed[term] += seconds
        self.kinds[kind] += seconds

    def hidden(self, term: TermName, seconds: float) -> None:
        """Work beside other work."""
        self.busy[term] += seconds

    def waited(self, term: TermName, kind: Kind, seconds: float) -> None:
        """The part of hidden work that was not hidden after all."""
        self.exposed[term] += seconds
        self.kinds[kind] += seconds

    def add(self, other: Ledger, times: float = 1.0) -> None:
        """Add another ledger, ``times`` over."""
        for mine, theirs in ((self.busy, other.busy), (self.exposed, other.exposed)):
            for term, seconds in theirs.items():
                mine[term] += seconds * times
        for kind, seconds in other.kinds.items():
            self.kinds[kind] += seconds * times

    @property
    def seconds(self) -> float:
        """Sum of what is exposed."""
        return sum(self.exposed.values())
