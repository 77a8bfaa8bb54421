"""Values for what a rank gets from outside, where tensors have any: tokens and activations."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.host_tensor import host_values

_SEED = 1234


def fill(tensor: torch.Tensor, below: int | None = None) -> torch.Tensor:
    """Give a new tensor values that are the same in every run; the tensor itself.

    Args:
        tensor: Left alone if it has no storage.
        below: Integers from 0 to this; None: standard normal numbers.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    generator = torch.Generator().manual_seed(_SEED)
    with host_values(), torch.no_grad():
        if below is None:
            tensor.normal_(generator=generator)
        else:
            tensor.random_(0, below, generator=generator)
    return tensor


def put(tensor: torch.Tensor, value: float | None = None) -> torch.Tensor:
    """Give a new tensor one value, or None: that of the place in the last dimension; the tensor.

    Args:
        tensor: Left alone if it has no storage.
        value: Of every element.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    with host_values(), torch.no_grad():
        tensor.copy_(torch.arange(tensor.shape[-1]) if value is None else torch.tensor(value))
    return tensor
