"""What keeps joining a large virtual world from taking seconds (group ``megatron_world``).

Results stay what Megatron's own code gives; only work for ranks that don't exist is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from primus_ext.emulate import virtual_world
from primus_ext.emulate.registry import patch

_CORE = "megatron-core 0.19"
WORLD = "megatron_world"
"""Group of what virtual ranks need whether or not tensors have values."""


def orthogonal_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Ranks of every group along the axes in ``mask``, in Megatron's order.

    A rank is ``sum(index[i] * stride[i])`` with the first axis running fastest.

    Args:
        world_size: Ranks in all.
        parallel_size: Size of every axis.
        mask: For each axis, whether it runs inside the groups.
    """
    inside = [size for size, chosen in zip(parallel_size, mask, strict=True) if chosen]
    members = int(np.prod(inside, dtype=np.int64))
    if world_size % members or world_size > np.prod(parallel_size, dtype=np.int64):
        raise AssertionError(f"{world_size} ranks can't be split by {list(parallel_size)}")
    strides = np.cumprod([1, *parallel_size])[:-1]

    def offsets(chosen: bool) -> np.ndarray:
        total = np.zeros(1, dtype=np.int64)
        for size, stride, masked in zip(parallel_size, strides, mask, strict=True):
            if masked is chosen:  # later axes run slower
                total = (np.arange(size)[:, None] * stride + total[None, :]).reshape(-1)
        return total

    groups = offsets(False)[: world_size // members, None] + offsets(True)[None, :]
    return groups.tolist()


@patch("megatron.core.parallel_state", "generate_masked_orthogonal_rank_groups", "create_group",
       group=WORLD, versions=_CORE,
       reason="Python loops over all ranks for every kind of group: seconds for 8,192 ranks")
def _groups(module: Any) -> None:
    create = module.create_group

    def create_own(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and virtual_world.is_stranger_to(ranks):
            return virtual_world.NOT_A_MEMBER
        return create(ranks, *args, **kwargs)

    module.generate_masked_orthogonal_rank_groups = orthogonal_groups
    module.create_group = create_own


@patch("megatron.core.timers", "Timers.log", group=WORLD, versions=_CORE,
       reason="timings of ranks that don't exist, gathered and read one by one")
def _timers(module: Any) -> None:
    module.Timers.log = lambda *_args, **_kwargs: None


class Shards(Sequence[Any]):
    """Equal parts of a buffer, each made where it is asked for."""

    def __init__(self, buffer: Any, parts: int) -> None:
        """Split ``buffer`` (one dimension) into ``parts``."""
        self._buffer, self._parts = buffer, parts
        self._size = buffer.numel() // parts
        if self._size * parts != buffer.numel():
            raise AssertionError(f"{buffer.numel()} elements can't be split into {parts} shards")

    def __len__(self) -> int:
        return self._parts

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._parts:
            raise IndexError(index)
        return self._buffer[index * self._size : (index + 1) * self._size]


@patch("megatron.core.distributed.param_and_grad_buffer", "shard_buffer", group=WORLD,
       versions=_CORE,
       reason="a view of every bucket for each of thousands of data-parallel ranks; one is used")
def _shards(module: Any) -> None:
    module.shard_buffer = Shards
