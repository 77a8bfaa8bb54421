"""The answer: memory per role and time per step, each term with its evidence."""

from __future__ import annotations

import dataclasses
from typing import Any

from primus_ext.plan import Plan, ProgramRef

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Parts of a rank's peak, bytes; they add up to ``peak_bytes`` exactly."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    communication: int
    reserve: int

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return sum(getattr(self, f.name) for f in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Memory of all ranks that do the same work."""

    role: str
    """E.g. ``pp stage 0 (embedding, 20 layers)``."""
    ranks: int
    """How many ranks of the world have this role."""
    example_rank: int
    parameters: int
    """Elements held by one rank of the role."""
    peak_bytes: int
    """Peak of live tensor bytes."""
    reserved_bytes: int
    """Peak of what the device must provide: tensors, allocator slack, context, communicators."""
    parts: MemoryParts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory verdict."""

    verdict: str
    """fits, at_risk or oom."""
    capacity_bytes: int
    binding_role: str
    per_role: tuple[RoleMemory, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of the step time."""

    term: str
    seconds: float
    """Busy time of the term on the binding rank, hidden or not."""
    exposed_seconds: float
    """What it adds to the step; the exposed seconds of all terms add up to ``step_s`` exactly."""
    evidence: str
    """How it is known: measured, latency database, calibrated model or model, and from what."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Time per step and what follows from it."""

    step_s: float
    tokens_per_s_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    interval: dict[str, float]
    """low, high (seconds per step) and level."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Row:
    """Equal collectives of one step, on every rank of the pipeline ranks that are named."""

    pp_ranks: tuple[int, ...]
    direction: str
    """forward, backward, recompute, reduce (of gradients), gather (of parameters) or step."""
    kind: str
    """As :class:`primus_ext.trace.CollectiveKind`, with send and recv apart."""
    group: str
    size: int
    """Ranks of the group."""
    bytes: int
    """Of one of them, as :attr:`primus_ext.trace.Collective.bytes`."""
    dtype: str
    asynchronous: bool
    """Issued with a handle that is waited for later."""
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Everything that ``projection.json`` holds."""

    plan: Plan
    program: ProgramRef | None
    cluster: dict[str, Any]
    mode: str
    model: dict[str, int]
    """total_parameters, active_parameters."""
    memory: Memory
    throughput: Throughput
    breakdown: tuple[Term, ...]
    not_modelled: tuple[str, ...]
    warnings: tuple[str, ...]
    provenance: dict[str, Any]
    collectives: tuple[Row, ...] = ()
    """Every collective of one step; empty where they are more than
    :data:`primus_ext.project.inventory.MOST_ROWS` rows."""
    schema_version: int = SCHEMA_VERSION
