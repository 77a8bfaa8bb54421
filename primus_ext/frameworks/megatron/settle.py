"""A microbatch like all later ones: caches that the first one fills must not be part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primus_ext.frameworks.megatron import microbatch
from primus_ext.observe.recorder import Recorder
from primus_ext.trace import ChunkTrace


def settled(
    recorder: Recorder,
    make: Callable[[list[Any]], microbatch.Microbatch],
    index: int,
    losses: list[Any],
) -> ChunkTrace:
    """Record a microbatch; once more if more tensors are left than before it.

    Layers keep tables that they make on their first visit, or on the first of a shape (rope's
    sines and cosines of multi-latent attention, offsets of sequences).

    Args:
        recorder: It counts what is live.
        make: A microbatch that reports its losses to the list.
        index: Of the chunk.
        losses: Where they go, those of one microbatch.
    """
    before, known = recorder.memory.live, len(losses)
    trace = microbatch.record(make, recorder.memory, index, losses)
    if recorder.memory.live - before <= trace.memory.logged_bytes:
        return trace
    del losses[known:]
    return microbatch.record(make, recorder.memory, index, losses)
