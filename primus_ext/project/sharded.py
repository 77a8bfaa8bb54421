"""Memory and time of a rank whose microbatches differ: sharded parameters and gradients (FSDP).

A microbatch gathers parameters and frees them again: that is inside its peaks.  The first of a
step may start without gradients, or gather what the optimizer changed; the last may reduce what
the others left.
"""

from __future__ import annotations

from primus_ext.project.result import MemoryParts
from primus_ext.trace import MicrobatchTrace, RankTrace


def parts(trace: RankTrace, microbatches: int) -> MemoryParts:
    """Parts of the highest moment of a step.

    Gradients that the first backward of a step makes are temporaries there.

    Args:
        trace: Of a rank with one model chunk, whose microbatches differ.
        microbatches: Of a step.
    """
    recorded = trace.chunks[0].microbatches
    logged = (microbatches - len(recorded)) * recorded[-1].memory.logged_bytes
    found = [_during(trace, recorded[0], 0)]
    found += [_during(trace, microbatch, logged) for microbatch in recorded[1:]]
    found.append(_parts(trace, 0, 0, trace.static.step_peak_bytes + logged))
    return max(found, key=lambda each: each.total)


def _during(trace: RankTrace, microbatch: MicrobatchTrace, logged: int) -> MemoryParts:
    """Highest moment of a microbatch; losses of ``logged`` bytes were not recorded."""
    memory = microbatch.memory
    top = max(memory.forward_peak_bytes, memory.backward_peak_bytes)
    saved = max(0, min(memory.saved_bytes, top))
    return _parts(trace, microbatch.extra_bytes, saved, top - saved + logged)


def _parts(trace: RankTrace, extra: int, saved: int, above: int) -> MemoryParts:
    static = trace.static
    return MemoryParts(
        parameters=static.parameters,
        gradients=static.gradients + min(0, extra),
        optimizer=static.optimizer,
        activations=saved,
        temporaries=above + max(0, extra),
        communication=0,
        reserve=static.workspaces,
    )


def weights(recorded: int, microbatches: int) -> list[int]:
    """How often each recorded microbatch runs in a step, the middle one twice in the list.

    The second of the middle ones is in the steady state: it stands for all that follow.

    Args:
        recorded: Microbatches that the trace has, at most three.
        microbatches: Of a step.
    """
    if recorded < 3:
        return [1] * recorded
    if microbatches == 3:
        return [1, 1, 0, 1]
    return [1, 1, microbatches - 3, 1]
