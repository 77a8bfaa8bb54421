"""Kernels that only a device can run (Triton), where tensors are real: they write random values.

For metering memory alone.  What surrounds a launch is Transformer Engine's and Megatron's own
code, so the tensors are the right ones; their values are not, and nothing may depend on them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from primus_ext.emulate import registry, shims_torch, triton_kernels
from primus_ext.emulate.virtual_peers import random_values

GROUP = "device_kernels"
_OPERATORS = (
    "moe_permute_mask_map_forward", "moe_permute_mask_map_backward",
    "moe_unpermute_mask_map_forward", "moe_unpermute_mask_map_backward_with_probs",
    "moe_unpermute_mask_map_backward_no_probs", "moe_chunk_sort_forward",
    "moe_chunk_sort_backward",
)  # fmt: skip


def write_random_values() -> None:
    """Let Triton kernels be launched on real tensors of the CPU from now on.  Idempotent."""
    triton_kernels.on_real_tensors = _written
    registry.apply_all(GROUP)


def _written(kernel: Any, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name in triton_kernels.pointer_uses(kernel.src)[1] & tensors.keys():
            random_values(tensors[name])


@registry.patch("transformer_engine.pytorch.permutation", *_OPERATORS, group=GROUP,
                versions="transformer-engine 2.20",
                reason="inside a custom operator no function mode sends cuda to the CPU")
def _permutation(module: ModuleType) -> None:
    for name in _OPERATORS:
        operator = getattr(module, name)
        operator.register_kernel("cpu")(_in_device_mode(operator._init_fn))


def _in_device_mode(body: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with shims_torch.DeviceMode():
            return body(*args, **kwargs)

    return run
