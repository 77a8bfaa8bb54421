"""The copies of torch FSDP2 between parameters and the flat buffers of its collectives."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.observe.classify_te import arguments
from primus_ext.observe.specs import moved_bytes, spec
from primus_ext.trace import Family, Op

# op -> arguments that are read; what is read is written once, in the dtype of ``_WRITTEN``
_READ = {
    "fsdp.all_gather_copy_in": "all_gather_inputs",
    "fsdp.split_with_sizes_copy": "all_gather_output",
    "fsdp.chunk_cat": "tensors",
}
_WRITTEN = {"fsdp.split_with_sizes_copy": "out", "fsdp.chunk_cat": "out"}


def classify(name: str, func: Any, args: tuple, kwargs: dict) -> Op | None:
    """The copy behind one dispatch; None for an op that is no copy."""
    if name not in _READ:
        return None
    given = arguments(func, args, kwargs)
    read = [t for t in tree_iter(given[_READ[name]]) if isinstance(t, torch.Tensor)]
    written = read
    if name in _WRITTEN:
        written = [t for t in tree_iter(given[_WRITTEN[name]]) if isinstance(t, torch.Tensor)]
    return Op(
        name=name,
        family=Family.MEMORY,
        inputs=tuple(spec(t) for t in read),
        outputs=tuple(spec(t) for t in written),
        flops=0,
        bytes=moved_bytes(read) + moved_bytes(written),
    )
