"""The model as a row of parts, layer by layer, so that it can be cut into other stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cost.model import CostModel
from primus_ext.project import beside, stage
from primus_ext.project.data_parallel import BucketTimes
from primus_ext.project.ledger import Ledger
from primus_ext.project.programs import ScheduleError
from primus_ext.trace import LAYERS, ChunkTrace, Op, RankTrace, ScopeKind, Segment, TensorSpec

_BITS = {"fp32": 32, "int32": 32, "bf16": 16, "fp16": 16, "int64": 64, "fp4": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class Filled:
    """What a part fills of the gradient buckets of one data-parallel group."""

    group: str
    count: float
    """How many buckets."""
    reduce: float
    """Seconds."""
    gather: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A layer, or what lies before or after the layers, and one microbatch through it."""

    layer: bool
    forward: Ledger
    backward: Ledger
    weight: float
    """Seconds of the backward, for weight gradients."""
    pieces: beside.Pieces
    """The same seconds, by what runs on which lane."""
    saved: float
    """Bytes held between forward and backward."""
    put_off: float
    """Bytes that weight gradients need which are computed later: their operands."""
    transient: float
    """Bytes above what is saved, at the highest moment of its chunk."""
    static: float
    """Bytes of parameters, gradients and optimizer."""
    buckets: tuple[Filled, ...]
    """Its part of gradient buckets, by data-parallel group."""
    step: Ledger
    """The optimizer."""
    boundary: int
    """Bytes of the activation that goes to the next part, were they on different ranks."""


def of_rank(
    cost: CostModel, trace: RankTrace, buckets: Sequence[BucketTimes], times: stage.StageTimes
) -> list[list[Part]]:
    """Parts of every chunk of a rank.

    What is known of a chunk only (saved bytes, parameters, communication) is shared out: saved
    bytes evenly over its layers, the rest by matrix elements; what the matrices of a chunk with an
    embedding don't account for is the embedding's.

    Args:
        cost: Prices on the target.
        trace: The rank.
        buckets: Its gradient buckets, priced.
        times: What it does, priced.
    """
    return [
        _of_chunk(cost, trace, chunk, buckets, here, times.step)
        for chunk, here in zip(trace.chunks, times.chunks, strict=True)
    ]


def _of_chunk(
    cost: CostModel, trace: RankTrace, chunk: ChunkTrace, buckets: Sequence[BucketTimes],
    times: stage.ChunkTimes, step: Ledger,
) -> list[Part]:  # fmt: skip
    segments = list(chunk.segments)
    alone = [dataclasses.replace(segment, count=1, places=(0,)) for segment in segments]
    owned = _parameters(trace, chunk)
    layers = sum(s.count for s in segments if s.kind in LAYERS)
    here = sum(s.count * share for s, share in zip(segments, owned, strict=True)) or 1.0
    mine = [bucket for bucket in buckets if bucket.chunk == chunk.vpp_stage]
    held = trace.static.parameters + trace.static.gradients + trace.static.optimizer
    memory = chunk.memory
    made = {}
    for index, (segment, time) in enumerate(zip(segments, times.segments, strict=True)):
        layer = segment.kind in LAYERS
        share, whole = owned[index] / here, owned[index] / max(1, trace.parameters)
        made[index] = Part(
            layer=layer, forward=time.forward, backward=time.backward,
            weight=time.weight, pieces=beside.pieces(cost, trace, alone[index]),
            saved=memory.saved_bytes / layers if layer else 0.0,
            put_off=float(_operands(trace, segment)),
            transient=float(max(memory.forward_peak_bytes, memory.backward_peak_bytes)
                            - memory.saved_bytes),
            static=held * whole, buckets=_filled_by(mine, share),
            step=_share(step, whole),
            boundary=chunk.boundary_bytes,
        )  # fmt: skip
    return [made[index] for index in _in_order(segments)]


def _filled_by(buckets: Sequence[BucketTimes], share: float) -> tuple[Filled, ...]:
    """A share of the buckets of every group."""
    groups: dict[str, list[BucketTimes]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.group, []).append(bucket)
    return tuple(
        Filled(group, share * len(found), share * sum(b.reduce_s for b in found),
               share * sum(b.gather_s for b in found))
        for group, found in groups.items()
    )  # fmt: skip


def _share(ledger: Ledger, share: float) -> Ledger:
    found = Ledger()
    found.add(ledger, share)
    return found


def _in_order(segments: Sequence[Segment]) -> list[int]:
    """Index of the segment at every place of the forward."""
    if all(len(segment.places) == segment.count for segment in segments):
        places = [(place, i) for i, segment in enumerate(segments) for place in segment.places]
        return [index for _, index in sorted(places)]
    return [i for i, segment in enumerate(segments) for _ in range(segment.count)]


def _parameters(trace: RankTrace, chunk: ChunkTrace) -> list[float]:
    """Parameters of one occurrence of each segment of a chunk, on this rank."""
    total = sum(b.parameters for b in trace.buckets if b.chunk == chunk.vpp_stage)
    if not trace.buckets:
        total = trace.parameters / len(trace.chunks)
    matrices = [float(_matrix_elements(trace, segment)) for segment in chunk.segments]
    known = sum(s.count * m for s, m in zip(chunk.segments, matrices, strict=True))
    rest = total - known
    for index, segment in enumerate(chunk.segments):
        if segment.kind is ScopeKind.EMBEDDING and rest > 0:
            matrices[index] += rest / segment.count
            return matrices
    scale = total / known if known else 0.0
    return [m * scale for m in matrices]


def _weight_ops(trace: RankTrace, segment: Segment) -> list[Op]:
    return [
        trace.ops[call.op]
        for call in segment.backward
        if stage.computes_weights(trace.ops[call.op], call)
    ]


def _matrix_elements(trace: RankTrace, segment: Segment) -> int:
    """Elements of the weights whose gradients a segment computes."""
    return sum(
        int(op.attr("m")) * int(op.attr("n")) * int(op.attr("groups", 1))
        for op in _weight_ops(trace, segment)
    )


def _operands(trace: RankTrace, segment: Segment) -> int:
    """Bytes that its weight gradients are computed from."""
    return sum(
        sum(_size(read) for read in op.inputs) or _by_sizes(op)
        for op in _weight_ops(trace, segment)
    )


def _by_sizes(op: Op) -> int:
    """Operands of a product whose tensors were not recorded."""
    k, m, n = (int(op.attr(name)) for name in "kmn")
    return k * (m + n) * _BITS.get(str(op.attr("dtype")), 8) // 8


def _size(tensor: TensorSpec) -> int:
    elements = 1
    for dimension in tensor.shape:
        elements *= dimension
    return elements * _BITS.get(tensor.dtype, 8) // 8


def cut(stages: Sequence[Sequence[Part]], own: int, pp: int, chunks: int) -> list[list[Part]]:
    """The parts of the whole model, cut into ``pp * chunks`` stages.

    The job's own cut is kept where the number of chunks is the same; its stages are put together or
    halved where that works out; otherwise all stages get as many layers.

    Args:
        stages: As the job has them, in the order of the model.
        own: Chunks on each rank there.
        pp: Pipeline ranks.
        chunks: Chunks on each rank that are wanted.

    Raises:
        ScheduleError: The layers can't be cut so.
    """
    flat = [part for stage_ in stages for part in stage_]
    counts = [sum(part.layer for part in stage_) for stage_ in stages]
    layers, wanted = sum(counts), pp * chunks
    if chunks == own:
        return [list(stage_) for stage_ in stages]
    if own % chunks == 0:
        together = own // chunks
        sizes = [sum(counts[i : i + together]) for i in range(0, len(counts), together)]
    elif chunks == 2 * own and not any(count % 2 for count in counts):
        sizes = [count // 2 for count in counts for _ in range(2)]
    elif layers % wanted == 0:
        sizes = [layers // wanted] * wanted
    else:
        raise ScheduleError(
            f"{layers} layers can't be cut into {wanted} equal stages (pp={pp} with {chunks} "
            f"chunks on each rank), nor the stages of vpp={own} be put together or halved"
        )
    return _filled(flat, sizes)


def _filled(flat: Sequence[Part], sizes: Sequence[int]) -> list[list[Part]]:
    """Stages with so many layers; what lies before a layer goes with it, the rest with the last."""
    found: list[list[Part]] = [[] for _ in sizes]
    stage_, left = 0, sizes[0]
    for part in flat:
        while part.layer and not left and stage_ + 1 < len(sizes):
            stage_, left = stage_ + 1, sizes[stage_ + 1]
        found[stage_].append(part)
        left -= part.layer
    return found
