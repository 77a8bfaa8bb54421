"""Functions that torch.compile fuses into one kernel on the device.

On the virtual accelerator they run eagerly, so each is recorded as one op that reads its inputs
and writes its outputs once; intermediates never take device memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.observe import recorder
from primus_ext.observe.allocator_meter import FUSED, region


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for ``torch.compile`` on a point-wise function."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        active = recorder.current()
        if active is None:
            with region(FUSED):
                return function(*args, **kwargs)
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        with active.fused(function.__name__, inputs) as outputs:
            result = function(*args, **kwargs)
            outputs += [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        return result

    return run
