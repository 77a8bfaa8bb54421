"""Packed sequences (``--sft``, ``--dataloader-inter-document-masking``): where documents begin.

Nothing is known of the data, so one document fills every sequence: shorter ones would need less
attention, and the same memory.  Boundaries have values in every world, as the host reads them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate import selection
from primus_ext.emulate.host_tensor import host_values, keep
from primus_ext.emulate.registry import patch
from primus_ext.plan import is_packed

_CORE = "megatron-core 0.19"


def documents(args: Any) -> dict[str, torch.Tensor]:
    """What a batch of Megatron's packing data sets holds beside tokens; nothing where none packs.

    Args:
        args: Megatron's arguments.

    Returns:
        ``cu_seqlens`` int32 ``[mbs, seq + 1]``, filled up with ``seq`` behind the last boundary,
        and ``max_seqlen`` int32 ``[mbs]`` (``SFTDataset.__getitem__``, collated).
    """
    if not is_packed(vars(args)):
        return {}
    shape, seq = (args.micro_batch_size, args.seq_length + 1), args.seq_length
    return {
        "cu_seqlens": _of_the_device(torch.empty(shape, dtype=torch.int32), seq, begins=True),
        "max_seqlen": _of_the_device(torch.empty(shape[:1], dtype=torch.int32), seq),
    }


def _of_the_device(memory: torch.Tensor, value: int, begins: bool = False) -> torch.Tensor:
    """A tensor with values that takes its memory of the device.

    Args:
        memory: Without values.
        value: What it is filled with.
        begins: Whether every row begins with 0.
    """
    real = memory
    with host_values():
        if isinstance(memory, FakeTensor):
            real = keep(torch.empty(memory.shape, dtype=memory.dtype), memory=memory)
        real.fill_(value)
        if begins:
            real[:, 0] = 0
    return real


@patch("megatron.core.utils", "get_batch_on_this_tp_rank", group="megatron", versions=_CORE,
       reason="ranks other than the first of a tensor-parallel group are sent how many boundaries "
              "there are, and then these, which the host reads; a virtual group sends nothing")
def _received(module: Any) -> None:
    original = module.get_batch_on_this_tp_rank

    @functools.wraps(original)
    def get_batch(batch: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        arguments: Any = get_args()
        if kwargs.get("tp_rank") == 0 or not is_packed(vars(arguments)):
            return original(batch, *args, **kwargs)
        count = arguments.micro_batch_size * (arguments.seq_length + 1)
        with selection.reading(count, 0):  # 0: no second, padded boundaries
            found = original(batch, *args, **kwargs)
        for name, begins in (("cu_seqlens", True), ("max_seqlen", False)):
            if found[name] is not None:
                found[name] = _of_the_device(found[name], arguments.seq_length, begins)
        return found

    module.get_batch_on_this_tp_rank = get_batch
