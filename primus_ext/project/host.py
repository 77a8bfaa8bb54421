"""Host memory of a pipeline rank: what it offloads."""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.project.programs import FORWARD, TRANSFER, Program
from primus_ext.trace import ChunkMemory, RankTrace


def peak(trace: RankTrace, program: Program) -> int:
    """Most bytes of host memory that tensors of one rank take.

    Args:
        trace: Of the rank.
        program: What it runs, in order.
    """
    return trace.static.host_bytes + _in_flight([c.memory for c in trace.chunks], program)


def _in_flight(chunks: Sequence[ChunkMemory], program: Program) -> int:
    """Offloaded activations of all microbatches between their forward and their backward."""
    live = most = 0
    for kind, chunk, _ in program:
        if kind != TRANSFER:
            size = chunks[chunk].host_bytes
            live += size if kind == FORWARD else -size
            most = max(most, live)
    return most
