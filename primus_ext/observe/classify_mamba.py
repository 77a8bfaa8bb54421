"""Ops of the stand-ins of ``mamba_ssm`` and ``causal_conv1d`` (namespace ``primus_mamba``).

They are priced by their memory traffic: with chunks of 128 steps, states of 128 and heads of 64 a
scan computes some tens of FLOPs for each byte that it moves, far below what an accelerator could.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.observe.classify_te import arguments
from primus_ext.observe.specs import moved_bytes, spec
from primus_ext.trace import Family, Op


def classify(name: str, func: Any, args: tuple, kwargs: dict) -> Op:
    """The kernels behind one call: inputs read, outputs written, the workspace written and read."""
    by_name = arguments(func, args, kwargs)
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for argument in func._schema.arguments:
        value = by_name.get(argument.name)
        if isinstance(value, torch.Tensor):
            is_output = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_output else read).append(value)
    workspace = list(by_name.get("workspace") or [])
    return Op(
        name=name,
        family=Family.MEMORY,
        inputs=tuple(spec(t) for t in read),
        outputs=tuple(spec(t) for t in written),
        flops=by_name["flops"],
        bytes=moved_bytes(read) + moved_bytes(written) + 2 * moved_bytes(workspace),
        attrs=(("scan", True),) if "scan" in name else (),
    )
