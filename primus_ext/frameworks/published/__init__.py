"""A published, measured run as the nearest Megatron program, and what had to be assumed.

The schema of a run is that of a runs file: ``hardware``, ``model``, ``parallelism``, ``batch``,
``precision``, ``recompute``, ``flags``, ``software``.  Each module of this package writes one of
these parts as Megatron arguments; nothing looks at what was measured.
"""

from __future__ import annotations

from typing import Any

from primus_ext.frameworks.published import (
    architecture,
    experts,
    hardware,
    options,
    parallel,
    precision,
    recompute,
)
from primus_ext.frameworks.published.assumed import completed
from primus_ext.frameworks.published.draft import Draft, NotProjectable, PublishedProgram

__all__ = ["NotProjectable", "PublishedProgram", "completed", "program"]


def program(run: dict[str, Any]) -> PublishedProgram:
    """The nearest Megatron program of a run.

    Raises:
        NotProjectable: an accelerator, architecture or option that is not supported, or a knob
            that is not stated.
    """
    run = completed(run)
    draft = Draft(run, notes=list(run.get("assumed", ())))
    target = hardware.target(draft)
    architecture.write(draft)
    experts.write(draft)
    parallel.write(draft)
    _batch(draft)
    precision.write(draft)
    recompute.write(draft)
    options.write(draft)
    return PublishedProgram(
        argv=tuple(draft.argv),
        accelerator=target.accelerator,
        nodes=target.nodes,
        gpus_per_node=target.gpus_per_node,
        approximations=tuple(draft.notes),
        emulations=tuple(draft.emulations),
        conditions=dict(draft.conditions),
        network=target.network,
    )


def _batch(draft: Draft) -> None:
    batch = draft.run["batch"]
    for key, option in (
        ("mbs", "--micro-batch-size"),
        ("gbs", "--global-batch-size"),
        ("seq_len", "--seq-length"),
    ):
        draft.add(option, draft.stated(batch, key))
