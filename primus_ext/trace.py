"""What one rank of the target job does in one step, as pure data.

A :class:`RankTrace` is the only thing that the measuring rooms (``emulate``, ``observe``) hand to
the pricing rooms (``cost``, ``project``).  It holds no tensors and imports nothing.

Units: bytes, FLOPs (a multiply-add is 2), ranks are global ranks of the target world.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any


class Family(StrEnum):
    """Kinds of work that are priced by different models."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION = "attention"
    MEMORY = "memory"  # bound by HBM traffic: norms, activations, copies, rope, casts
    QUANTIZE = "quantize"
    COLLECTIVE = "collective"
    P2P = "p2p"
    TRANSFER = "transfer"  # copy between host and device memory (attr direction: d2h or h2d)
    HOST = "host"  # no device work: views, metadata, host synchronisation


class CollectiveKind(StrEnum):
    """Collectives as torch.distributed issues them."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND_RECV = "send_recv"
    BARRIER = "barrier"


class ScopeKind(StrEnum):
    """What part of the model a :class:`Segment` is."""

    EMBEDDING = "embedding"
    DENSE_LAYER = "dense_layer"
    MOE_LAYER = "moe_layer"
    MAMBA_LAYER = "mamba_layer"
    ATTENTION_LAYER = "attention_layer"  # of a hybrid model: attention without an MLP
    MLP_LAYER = "mlp_layer"  # of a hybrid model: an MLP without attention
    MTP_LAYER = "mtp_layer"
    OUTPUT = "output"  # final norm, output layer and loss
    OTHER = "other"  # batch fetch and what else lies between the layers


LAYERS = (ScopeKind.DENSE_LAYER, ScopeKind.MOE_LAYER, ScopeKind.MAMBA_LAYER,
          ScopeKind.ATTENTION_LAYER, ScopeKind.MLP_LAYER)  # fmt: skip
"""Parts that pipelines deal out over their stages."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that an op reads or writes."""

    shape: tuple[int, ...]
    dtype: str
    """Short name: fp32, bf16, fp16, fp8_e4m3, fp8_e5m2, int64, uint8, ..."""
    origins: tuple[str, ...] = ()
    """Where each dimension comes from, e.g. ``("mbs*seq/tp", "hidden_size")``; empty if unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective call."""

    kind: CollectiveKind
    group: str
    """Key into :attr:`RankTrace.groups`: tp, cp, ep, etp, pp, dp, dp_cp, expert_dp, tp_ep, ..."""
    bytes: int
    """Size in bytes of the *whole* buffer: all_reduce and broadcast: the buffer; all_gather: the
    gathered output; reduce_scatter: the full input; all_to_all: this rank's whole input; send_recv:
    the message.  (The convention of nccl-tests.)"""
    dtype: str
    asynchronous: bool = False
    """The caller went on with a handle (``async_op=True``, every send and receive): it is exposed
    only as far as the calls that wait for it (:attr:`Call.waits`) make it so."""
    peer: int = 0
    """send_recv: how many places after this rank, round the group, the other side stands."""


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One operation, identical for every call with the same signature."""

    name: str
    """E.g. ``aten.mm``, ``te.gemm``, ``c10d.allreduce_``."""
    family: Family
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    flops: int
    """FLOPs really computed (causal attention counts the computed half only)."""
    bytes: int
    """Bytes read plus written if every input and output moves once."""
    attrs: tuple[tuple[str, Any], ...] = ()
    """Sorted scalars that the price depends on.  gemm: m, n, k, batch, layout (tn|nn|nt), dtype,
    accumulate, out_dtype.  grouped_gemm: additionally groups (m is the total over groups), and rows
    (of each group; in layout nt its contraction) where the groups differ.
    attention: batch, heads, kv_heads, seq_q, seq_kv, dim_qk, dim_v, causal, direction
    (forward|backward), fused, window.  all_to_all: received_bytes, where it is not what is
    sent."""
    collective: Collective | None = None

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of one attribute, or ``default``."""
        return dict(self.attrs).get(name, default)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One execution of an op; calls stand in the order in which the host issued them.

    Calls of one stream run in order.  An asynchronous collective runs beside its stream, in the
    order of its group's collectives.
    """

    op: int
    """Index into :attr:`RankTrace.ops`."""
    phase: str
    """forward, backward, or recompute (forward work repeated inside the backward pass)."""
    module: str
    """Name of the innermost module below the segment that ran it, '' where unknown."""
    stream: str = ""
    """The stream it is issued on; '' is the one that computes."""
    waits: tuple[tuple[str, int], ...] = ()
    """What it waits for beside earlier calls of its stream, as the program said (``Work.wait``,
    ``wait_stream``, ``wait_event``): a stream, or a group whose asynchronous collectives are meant,
    and how many of the calls last issued there need not be complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive work of one part of the model; equal layers are stored once with a count."""

    kind: ScopeKind
    name: str
    """Module path of the first occurrence, e.g. ``decoder.layers.0``."""
    count: int
    """How many equal segments this chunk holds."""
    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    places: tuple[int, ...] = ()
    """Where its occurrences stand among all parts of the chunk, in the order of the forward."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationKind:
    """What all allocations of the same size, made by the same op at the same place, share."""

    bytes: int
    op: str
    """What made the tensor, e.g. ``aten.mm`` or ``te.generic_gemm``; '' where unknown."""
    module: str
    """Part of the model and module below it, layers without their number; '' where unknown."""
    phase: str
    """forward, backward, recompute, step or setup; of what lives through the whole step:
    parameters, gradients, optimizer or workspaces."""
    stream: int = 0
    """Which stream was current; 0: the one on which the program starts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkEvents:
    """Allocations and frees of one microbatch through one model chunk, in order.

    ``n >= 0`` allocates a tensor of kind ``n`` (index into :attr:`RankTrace.allocations`);
    ``n < 0`` frees the ``-n - 1``-th allocation, counted through forward and backward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    received: int = -1
    """Number of the allocation that holds the activation from the stage before; -1: none."""
    output: int = -1
    """The activation for the next stage."""
    gradient: int = -1
    """The gradient from the next stage."""
    input_gradient: int = -1
    """The gradient for the stage before."""
    kept: tuple[int, ...] = ()
    """Numbers of the allocations that outlive the microbatch: modules remember them until the next
    forward makes new ones."""
    logged: tuple[int, ...] = ()
    """Numbers of those that stay until the step ends: its losses."""


@dataclasses.dataclass(frozen=True, slots=True)
class StaticEvents:
    """Allocations and frees around the microbatches, in order; events as in :class:`ChunkEvents`.

    Numbers count through ``setup`` and ``first_step``; ``step`` counts by itself.
    """

    setup: tuple[int, ...] = ()
    """Model, buffers and optimizer, as they are built."""
    workspaces: tuple[int, ...] = ()
    """Kinds of what the first forward leaves behind."""
    late_workspaces: tuple[int, ...] = ()
    """Kinds of what the first backward leaves behind."""
    first_step: tuple[int, ...] = ()
    """The first optimizer step, which makes the optimizer's state."""
    step: tuple[int, ...] = ()
    """Gradient finalisation and every later optimizer step."""


@dataclasses.dataclass(frozen=True, slots=True)
class FirstMicrobatch:
    """Memory of the first microbatch of a step where it differs, as in ``ChunkMemory``.

    Its forward quantizes the weights again.  Without gradients (recomputation) it drops the copies
    that only a backward needs, and its backward makes them again.
    """

    absent_bytes: int
    """Of tensors that are static otherwise, not there between its forward and its backward."""
    forward_peak_bytes: int
    """What modules kept of the step before counted in."""
    backward_peak_bytes: int | None = None
    """Above the state before its forward, when nothing was absent yet.  None: the same."""
    inflight_backward_peak_bytes: int | None = None
    """The same with a later microbatch in flight."""


@dataclasses.dataclass(frozen=True, slots=True)
class AfterBackward:
    """What differs once a microbatch's backward has passed in the chunk with later ones in flight.

    Recomputation gives modules tensors with a graph, which holds the recomputed part's input and
    its gradient until modules are given others.
    """

    leftover_bytes: int
    """Kept until the chunk's next forward or backward, beside what the later ones hold."""
    forward_peak_bytes: int
    """Highest point inside the forward that comes next, above what those in flight hold; what the
    schedule counts of the output of the microbatch before left out."""
    backward_peak_bytes: int
    """The same of a backward that comes next, with a later microbatch in flight."""
    last_backward_peak_bytes: int
    """The same of a backward that comes next, with no other microbatch in flight."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkMemory:
    """Live tensor bytes of one microbatch through one model chunk, above what was live before."""

    saved_bytes: int
    """Held from the end of the forward to the backward of the same microbatch."""
    forward_peak_bytes: int
    """Highest point inside the forward, above its start."""
    backward_peak_bytes: int
    """Highest point inside the backward, above the state before this microbatch's forward."""
    logged_bytes: int = 0
    """What the microbatch leaves until the end of the step, not in ``saved_bytes``: its losses."""
    counted_bytes: int = 0
    """The number of tokens, which the schedule holds until its next forward is through; not in
    ``saved_bytes``.  0 if interleaved."""
    stub_bytes: int = 0
    """Part of ``saved_bytes``: what is left of an output that was sent, one element; in the last
    stage of a pipeline the loss."""
    graph_bytes: int = 0
    """What the graph of such an output keeps after its backward while that is referred to: e.g. the
    handles of DeepEP's exchanges, which are no saved tensors."""
    leftover_bytes: int = 0
    """What modules keep of a microbatch after its backward, until the chunk's next forward: e.g.
    the token dispatcher's tables."""
    forward_peak_after_bytes: int | None = None
    """As ``forward_peak_bytes`` where such leftovers of a microbatch before exist, counted in; they
    go while the forward passes.  None: the same."""
    forward_peak_beside_bytes: int | None = None
    """The same where the schedule still refers to the output of that microbatch; what it counts of
    that, ``stub_bytes`` and ``graph_bytes``, left out.  None: the same."""
    inflight_saved_bytes: int | None = None
    """``saved_bytes`` once another microbatch's forward has passed: modules keep the latest one's
    tables only.  None: the same."""
    inflight_forward_peak_bytes: int | None = None
    """Highest point inside a forward while an earlier microbatch is in flight, above what that one
    holds afterwards.  None: ``forward_peak_bytes``."""
    inflight_backward_peak_bytes: int | None = None
    """Highest point inside a backward while a later microbatch is in flight, above the state
    without this microbatch.  None: ``backward_peak_bytes``."""
    host_bytes: int = 0
    """Of host memory, held from the end of the forward to the backward (offloaded tensors)."""
    first: FirstMicrobatch | None = None
    """None: the first microbatch of a step is like the others."""
    after_backward: AfterBackward | None = None
    """None: what modules keep then is the same."""

    def sizes(self) -> list[int]:
        """Every number of bytes that is there."""
        parts = [part for part in (self, self.first, self.after_backward) if part is not None]
        values = [getattr(part, field.name) for part in parts for field in dataclasses.fields(part)]
        return [value for value in values if isinstance(value, int)]


@dataclasses.dataclass(frozen=True, slots=True)
class MicrobatchTrace:
    """One of the microbatches of a step, where they are not all the same."""

    segments: tuple[Segment, ...]
    """Empty where they are the chunk's."""
    memory: ChunkMemory
    extra_bytes: int
    """Live at its start, above the static tensors; negative where those gradients that count as
    static are yet to be made."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkTrace:
    """One model chunk (virtual pipeline stage) of the rank, one microbatch."""

    vpp_stage: int
    segments: tuple[Segment, ...]
    memory: ChunkMemory
    boundary_bytes: int
    """Size of the activation sent to the next stage (0 on the last)."""
    events: ChunkEvents | None = None
    """None where allocations were not recorded."""
    microbatches: tuple[MicrobatchTrace, ...] = ()
    """Where the microbatches of a step differ (sharded data parallelism): the first, one of the
    middle and the last, or as many as a step has; ``segments`` and ``memory`` are those of the
    middle one, or of the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class StaticMemory:
    """Tensor bytes that live through the whole step."""

    parameters: int
    gradients: int
    optimizer: int
    workspaces: int
    """Kernel workspaces and caches the framework keeps (cuBLAS, Transformer Engine)."""
    step_peak_bytes: int
    """Highest point of gradient finalisation and optimizer step above the static tensors."""
    libraries: int = 0
    """Buffers of communication libraries other than NCCL or RCCL (DeepEP), which are allocated
    beside torch's allocator; not part of any other number here."""
    host_bytes: int = 0
    """Tensors in host memory (offloaded optimizer state, pools), not part of the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """One gradient/parameter bucket of the data-parallel wrapper."""

    parameters: int
    group: str
    """Group that the bucket is reduced over (key into ``groups``)."""
    grad_bytes: int
    param_bytes: int
    chunk: int
    """Model chunk (vpp stage) that the bucket belongs to."""
    gathers: int = 1
    """How often its parameters are gathered in a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How unevenly tokens fall on the expert-parallel ranks, and what gates the rank's layers."""

    layers: dict[str, tuple[int, ...]]
    """Layer to copies of one rank's tokens that each expert-parallel rank gets; the key is the
    layer's number from 1, or ``mtp.`` and that of a multi-token prediction."""
    rank: int
    """The expert-parallel rank that was run: the one with most copies over its layers."""
    ops: tuple[Op, ...] = ()
    """Of ``segments``."""
    segments: tuple[tuple[Segment, ...], ...] = ()
    """By chunk: the same layers as each one's busiest rank runs it, for which the others wait;
    empty where that is the rank that was run."""


@dataclasses.dataclass(frozen=True, slots=True)
class RankTrace:
    """One distinct kind of rank."""

    rank: int
    """The global rank that was run."""
    pp_ranks: tuple[int, ...]
    """All pipeline ranks that hold the same modules as this one."""
    groups: dict[str, tuple[int, ...]]
    """Process groups of the rank, by name, as tuples of global ranks."""
    ops: tuple[Op, ...]
    chunks: tuple[ChunkTrace, ...]
    step: tuple[Call, ...]
    """Gradient finalisation, the optimizer step and the statistics of the log (phase ``step``)."""
    buckets: tuple[Bucket, ...]
    parameters: int
    """Elements of the real module on this rank (sharded; padding of the vocabulary included)."""
    global_parameters: int
    """Elements of the same stage over all its tp, ep, etp ranks, each counted once, without
    vocabulary padding."""
    active_parameters: int
    """Of ``global_parameters``, those one token passes through (top-k of the routed experts)."""
    static: StaticMemory
    sync: tuple[Call, ...] = ()
    """Collectives that reduce the gradient buckets (phase ``reduce``) and gather the parameters
    (``gather``) once a step; they are in no other list."""
    allocations: tuple[AllocationKind, ...] = ()
    """Kinds of allocations that the events of the trace refer to."""
    static_events: StaticEvents | None = None
    """None where allocations were not recorded."""
    experts: ExpertLoad | None = None
    """None where every expert gets the same number of tokens."""
    recorded_events: tuple[tuple[int, ...], ...] = ()
    """Where the microbatches of a step differ: allocations and frees as they were recorded, of the
    setup and of each step; events as in :class:`ChunkEvents`, numbered through all of them."""
    only_timed: bool = False
    """Allocations, and what a microbatch holds beside others, were not recorded: no memory can be
    composed of this."""


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and enums to JSON-able values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, StrEnum):
        return str(value)
    return value
