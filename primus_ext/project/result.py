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
class LiveAllocations:
    """Equal allocations that are live at the same time."""

    module: str
    """Part of the model and module below it, without the layer's number; '' where unknown."""
    op: str
    phase: str
    """forward, backward, recompute, step, communication, or the part that is static."""
    bytes: int
    """Of one of them."""
    count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Bytes of live tensors over one step, by part."""

    columns: tuple[str, ...]
    """``position``, then the parts."""
    points: tuple[tuple[float, ...], ...]
    """The highest moments in order.  Position 3.25: a quarter of the fourth piece is done."""
    pieces: tuple[str, ...]
    """What runs: forward and backward of a microbatch, exchange, optimizer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What PyTorch's caching allocator makes of a rank's allocations, bytes."""

    allocated_bytes: int
    """Highest ``torch.cuda.memory_allocated``: tensors rounded up to blocks, BLAS workspaces."""
    setup_bytes: int
    """The same while the model and the optimizer are built."""
    reserved_bytes: int
    """Highest ``torch.cuda.memory_reserved``."""
    tensor_bytes: int
    """Most bytes of tensors, BLAS workspaces included, that are live at once in a later step."""
    timeline: Timeline
    top_allocations: tuple[LiveAllocations, ...]
    """Live at the highest moment, the most bytes first."""


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
    """Peak of what is taken from the device: segments of the allocator and what is ``outside``."""
    parts: MemoryParts
    outside: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes beside torch's allocator by source: context, communicators."""
    library_bytes: int = 0
    """Workspaces that the BLAS library takes from torch's allocator; not in ``peak_bytes``."""
    allocated_bytes: int | None = None
    """What ``torch.cuda.max_memory_allocated`` will say; None where allocations are unknown."""
    allocator_bytes: int | None = None
    """What ``torch.cuda.max_memory_reserved`` will say: segments, ``outside`` left out."""
    replayed_bytes: int | None = None
    """The replay's own ``peak_bytes``: where it is not the composed one, nothing of the replay is
    used."""
    setup_bytes: int | None = None
    """Highest allocated bytes while the model is built, before the first step: more than any step
    needs where parameters are sharded only afterwards.  None where allocations are unknown."""
    host_bytes: int = 0
    """Peak of tensors in host memory (offloading); no part of ``peak_bytes``."""
    timeline: Timeline | None = None
    top_allocations: tuple[LiveAllocations, ...] = ()

    @property
    def least_bytes(self) -> int:
        """What the device must have at least, were nothing lost to rounding and fragments."""
        step = self.peak_bytes + self.library_bytes
        return max(step, self.setup_bytes or 0) + sum(self.outside.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory verdict."""

    verdict: str
    """fits, at_risk or oom."""
    capacity_bytes: int
    binding_role: str
    per_role: tuple[RoleMemory, ...]
    notes: tuple[str, ...] = ()
    """What else is known of a job at risk."""


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
class ExpertImbalance:
    """Tokens of the busiest expert-parallel rank over the mean of its group."""

    per_layer: dict[str, float]
    """By number of the layer, from 1; of pipeline ranks that do the same, those of one."""
    largest: float
    """Of them."""
    gating: float
    """The busiest ranks' tokens of all layers of a pipeline rank over the mean's: what experts of
    a step wait for."""
    pooled: float
    """Tokens of the busiest rank over all layers of a pipeline rank over the mean: what one rank
    holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """What the slowest rank would add to a step; no time of a projection contains it."""

    rank_cv: float
    """Standard deviation of one rank's step time over its mean, as it was given."""
    ranks: int
    """That wait for each other, each as fast as chance has it."""
    low_s: float
    """Seconds more than the step."""
    high_s: float
    level: float
    """Probability that what is added lies between them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRow:
    """The job under one pipeline schedule."""

    schedule: str
    title: str
    offered_by: str
    """Frameworks that run it, and how it is asked for there."""
    chunks: int
    """Model chunks on each rank."""
    role: str
    """``runs``: what the program runs; ``asked``: what the step is projected with; '' else."""
    step_s: float | None = None
    """None where it can't be: see ``refused``."""
    bubble_share: float | None = None
    """Share of the pipeline's time in which its ranks, on average, neither compute nor wait for a
    transfer that is on its way."""
    in_flight: float | None = None
    """Most microbatches that a rank holds between a forward and its weight gradients; a chunk is
    its share of one."""
    peak_bytes: tuple[int, ...] = ()
    """Live tensors at the highest moment, by pipeline rank."""
    fits: bool | None = None
    """Whether that and what lies beside the tensors is within the device."""
    memory_evidence: str = ""
    refused: str = ""
    """Why the job can't run it, one sentence."""


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
    simulated: tuple[Term, ...] = ()
    """Terms as the model alone has them, where both was asked for."""
    schedules: tuple[ScheduleRow, ...] = ()
    """The schedule that was asked for beside the program's own, or all of them."""
    expert_imbalance: ExpertImbalance | None = None
    """None where every expert gets the same number of tokens."""
    stragglers: Stragglers | None = None
    """None where nothing was said of how ranks differ."""
    schema_version: int = SCHEMA_VERSION
