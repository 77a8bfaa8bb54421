"""A forward beside the backward of another microbatch: how long both take.

As megatron-core 0.19 orders them (``models/common/model_chunk_schedule_plan.py``): layer ``i`` of
the forward with the last but ``i`` of the backward, kernels on one lane and the experts' tokens on
another.  What is on one lane takes its turn; each lane computes or carries for one microbatch
while the other lane works for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cost.model import CostModel
from primus_ext.project import stage
from primus_ext.trace import Call, ChunkTrace, CollectiveKind, RankTrace, Segment

_EXPERTS = ("ep", "tp_ep")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Seconds of one layer by its turns; without experts everything is in ``attention``."""

    attention: float
    """Forward up to the dispatch of tokens."""
    dispatch: float = 0.0
    mlp: float = 0.0
    combine: float = 0.0
    after: float = 0.0
    attention_back: float = 0.0
    dispatch_back: float = 0.0
    mlp_back: float = 0.0
    mlp_weight: float = 0.0
    """Part of ``mlp_back``: its weight gradients."""
    combine_back: float = 0.0
    after_back: float = 0.0
    """Backward of what follows the combination."""


def pieces(cost: CostModel, trace: RankTrace, segment: Segment) -> Pieces:
    """The turns of one segment.

    Args:
        cost: Prices on the target.
        trace: Its rank.
        segment: With one occurrence.
    """
    ahead, back = _turns(trace, segment.forward), _turns(trace, segment.backward[::-1])
    names = ("attention", "dispatch", "mlp", "combine", "after")
    chunks = []
    for calls, others in zip(ahead, back, strict=True):
        part = dataclasses.replace(segment, forward=calls, backward=others[::-1])
        chunks.append(
            ChunkTrace(vpp_stage=0, segments=(part,), memory=trace.chunks[0].memory,
                       boundary_bytes=0)
        )  # fmt: skip
    times = stage.price(cost, dataclasses.replace(trace, step=(), chunks=tuple(chunks))).chunks
    found = {name: time.forward.seconds for name, time in zip(names, times, strict=True)}
    found |= {f"{n}_back": time.backward.seconds for n, time in zip(names, times, strict=True)}
    return Pieces(**found, mlp_weight=times[2].weight)


def _turns(trace: RankTrace, calls: Sequence[Call]) -> list[tuple[Call, ...]]:
    """Calls of a forward, or of a backward from its end, as the five turns of a forward.

    The last transfer of tokens is the combination, those before it are the dispatch.
    """
    travel = [index for index, call in enumerate(calls) if _carries_tokens(trace, call)]
    if len(travel) < 2:
        return [tuple(calls), (), (), (), ()]
    first, last = travel[0], travel[-1]
    inside = range(first, last)
    return [
        tuple(calls[:first]),
        tuple(calls[i] for i in travel[:-1]),
        tuple(calls[i] for i in inside if i not in travel),
        (calls[last],),
        tuple(calls[last + 1 :]),
    ]


def _carries_tokens(trace: RankTrace, call: Call) -> bool:
    found = trace.ops[call.op].collective
    return (
        found is not None and found.kind is CollectiveKind.ALL_TO_ALL and found.group in _EXPERTS
    )


class _Lanes:
    """When the kernels' lane and the tokens' lane are free."""

    def __init__(self) -> None:
        self.kernels = self.tokens = 0.0

    def compute(self, seconds: float, after: float = 0.0) -> float:
        self.kernels = max(self.kernels, after) + seconds
        return self.kernels

    def carry(self, seconds: float, after: float) -> float:
        if seconds:
            self.tokens = max(self.tokens, after) + seconds
        return max(after, self.tokens) if seconds else after


def seconds(ahead: Sequence[Pieces], back: Sequence[Pieces], delayed: bool = False) -> float:
    """Seconds of a forward and a backward beside each other.

    Args:
        ahead: Parts of the forward, in its order.
        back: Parts of the other microbatch's chunk, in the order of its forward.
        delayed: ``delay_wgrad_compute``: weight gradients of experts are computed while the
            gradients of their tokens travel.
    """
    lanes, forward, backward = _Lanes(), 0.0, 0.0
    reverse = list(reversed(back))
    for index in range(max(len(ahead), len(reverse))):
        f = ahead[index] if index < len(ahead) else None
        b = reverse[index] if index < len(reverse) else None
        forward, backward = _layer(lanes, f, b, forward, backward, delayed)
    return max(lanes.kernels, lanes.tokens)


def _layer(
    lanes: _Lanes, f: Pieces | None, b: Pieces | None, forward: float, backward: float,
    delayed: bool,
) -> tuple[float, float]:  # fmt: skip
    """One layer of each; returns when their outputs are there."""
    if b:
        backward = lanes.compute(b.after_back, backward)
        backward = lanes.carry(b.combine_back, backward)
    if f:
        forward = lanes.compute(f.attention, forward)
    late = b.mlp_weight if b and delayed else 0.0
    if b:
        backward = lanes.compute(b.mlp_back - late, backward)
    if f:
        forward = lanes.carry(f.dispatch, forward)
    if b:
        lanes.compute(late)
        backward = lanes.carry(b.dispatch_back, backward)
    if f:
        forward = lanes.compute(f.mlp, forward)
        forward = lanes.carry(f.combine, forward)
    if b:
        backward = lanes.compute(b.attention_back, backward)
    if f:
        forward = lanes.compute(f.after, forward)
    return forward, backward
