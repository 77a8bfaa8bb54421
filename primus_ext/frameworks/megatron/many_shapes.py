"""Record many parallel shapes of a job, one after another in the same few processes.

A shape is recorded by joining the virtual world as a rank of it, building its layer, running it and
leaving again.  All that torch derives once for each op and size (its fake-tensor cache), imports
and warm code are shared; what the frameworks keep of the shape before is put back.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from primus_ext import parametric
from primus_ext.emulate import rewind, session, virtual_world
from primus_ext.emulate.te import caches
from primus_ext.frameworks.megatron import layer_space

_WORTH_A_PROCESS = 4
"""Shapes: a process starts with cold caches, which cost about as much as recording so many."""

Numbered = Sequence[tuple[int, dict[str, Any]]]


def record_all(
    original: Callable[..., Any], call: inspect.BoundArguments, active: session.Session
) -> list[dict[str, Any]]:
    """Recordings of the job in each of the request's ``shapes``, or why there are none.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        active: Its request may have ``processes``, how many work at once (default: a processor
            each).

    Returns:
        In the order of the request: what :func:`layer_space.record` returns, as JSON has it, or
        ``refused``, one sentence.
    """
    pending = list(enumerate(active.request["shapes"]))
    found: dict[int, dict[str, Any]] = {}
    total = len(pending)
    while pending:
        active.progress(len(found), total, f"shape {len(found)}")
        forks = [
            session.Fork(functools.partial(_serve, original, call, part))
            for part in _split(pending, active.request.get("processes"))
        ]
        for fork in forks:
            found.update(fork.result())
        pending = [(number, shape) for number, shape in pending if number not in found]
    return [found[number] for number in range(total)]


def _split(shapes: Numbered, processes: int | None) -> list[Numbered]:
    """Neighbours stay together: they have sizes in common."""
    processes = processes or len(os.sched_getaffinity(0))
    parts = max(1, min(processes, len(shapes) // _WORTH_A_PROCESS))
    bounds = [len(shapes) * i // parts for i in range(parts + 1)]
    return [shapes[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _serve(
    original: Callable[..., Any], call: inspect.BoundArguments, shapes: Numbered
) -> dict[int, dict[str, Any]]:
    """Record shapes until one fails half-way: after that the process is not what it was."""
    state = rewind.State(growing=caches.by_size())
    found: dict[int, dict[str, Any]] = {}
    for number, shape in shapes:
        try:
            found[number] = _plain(layer_space.record(original, call, shape))
        except Exception as error:
            why = session.judgement_of(error)
            if why is None:
                raise
            found[number] = {"refused": why}
            if virtual_world.is_joined():
                return found
        virtual_world.leave()
        state.restore()
        caches.reset_quantization()
        gc.collect()
        gc.freeze()  # what is left are caches; collections need not look through them
    return found


def _plain(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "recordings": [parametric.to_plain(r) for r in one["recordings"]],
        "conditions": [
            [[c.share.numerator, c.share.denominator], c.modulus, c.reason]
            for c in one["conditions"]
        ],
        "cpu_seconds": one["cpu_seconds"],
        "saved_by_module": one["saved_by_module"],
    }
