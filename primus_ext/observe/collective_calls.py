"""Collectives as Megatron calls them, ready to be timed.

What gloo lacks torch 2.14 makes up: its ``reduce_scatter_tensor`` takes a copy and an all-reduce
of the whole (measured here 1.0 to 1.5 times as long as an all-reduce), and of a batch each send and
receive goes out by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from primus_ext.collective_samples import EXCHANGE, UNEVEN, Case
from primus_ext.trace import CollectiveKind

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPLIT = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
"""Kinds whose buffer has a part for every member."""
LARGEST = 3
"""Largest part of an uneven all-to-all over the smallest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A case on one rank, with its buffers."""

    run: Callable[[], None]
    """Issue it and wait, as the program's stream does."""
    refill: Callable[[], None]
    """Before each run: numbers that are added in place would grow without end."""
    share: float = 1.0
    """Of one run's time that is the collective's: a message there and back is two."""


def fitting(case: Case) -> Case:
    """The case with the nearest size that its buffer can have."""
    width = DTYPES[case.dtype].itemsize if case.bytes else 1
    step = width * (case.members if case.kind in SPLIT else 1)
    if case.variant == UNEVEN:
        step = width * sum(_weights(case.members))
    size = max(step, round(case.bytes / step) * step) if case.bytes else 0
    return dataclasses.replace(case, bytes=size)


def prepare(
    case: Case, group: dist.ProcessGroup, device: torch.device, generator: torch.Generator
) -> Prepared:
    """Buffers and the call.

    Args:
        case: Of a size that :func:`fitting` gave.
        group: Of this rank.
        device: Where the buffers are.
        generator: Of the numbers in them: zeros would travel, and be added, faster.
    """
    if case.kind is CollectiveKind.BARRIER:
        return Prepared(lambda: _waited(dist.barrier(group=group)), _nothing)
    count = case.bytes // DTYPES[case.dtype].itemsize

    def numbers(elements: int) -> torch.Tensor:
        values = torch.randn(elements, generator=generator, dtype=torch.float32)
        return values.to(device=device, dtype=DTYPES[case.dtype])

    if case.kind is CollectiveKind.ALL_REDUCE:
        source, buffer = numbers(count), numbers(count)
        return Prepared(
            lambda: _waited(dist.all_reduce(buffer, group=group)),
            lambda: _done(buffer.copy_(source)),
        )
    if case.kind is CollectiveKind.BROADCAST:
        first, sent = dist.get_global_rank(group, 0), numbers(count)
        return Prepared(lambda: _waited(dist.broadcast(sent, first, group=group)), _nothing)
    if case.kind is CollectiveKind.SEND_RECV:
        both = numbers(count), numbers(count)
        if case.variant == EXCHANGE:
            return Prepared(lambda: _exchange(both, group), _nothing)
        return Prepared(lambda: _there_and_back(both, group), _nothing, 0.5)
    return Prepared(_divided(case, group, numbers, count), _nothing)


def _divided(
    case: Case, group: dist.ProcessGroup, numbers: Callable[[int], torch.Tensor], count: int
) -> Callable[[], None]:
    """Kinds whose buffer has a part for every member."""
    whole, part = numbers(count), numbers(count // case.members)
    if case.kind is CollectiveKind.ALL_GATHER:
        return lambda: _waited(dist.all_gather_into_tensor(whole, part, group=group))
    if case.kind is CollectiveKind.REDUCE_SCATTER:
        return lambda: _waited(dist.reduce_scatter_tensor(part, whole, group=group))
    received = numbers(count)
    if case.variant != UNEVEN:
        return lambda: _waited(dist.all_to_all_single(received, whole, group=group))
    rank, weights = group.rank(), _weights(case.members)
    unit = count // sum(weights)
    # symmetric in sender and receiver, so that both sides agree on every part
    parts = [weights[(rank + peer) % case.members] * unit for peer in range(case.members)]
    return lambda: _waited(
        dist.all_to_all_single(
            received, whole, output_split_sizes=parts, input_split_sizes=parts, group=group
        )
    )


def _weights(members: int) -> list[int]:
    """Parts of an uneven all-to-all, from 1 to :data:`LARGEST` in equal steps."""
    last = members - 1
    return [last + place * (LARGEST - 1) for place in range(members)]


def _exchange(buffers: tuple[torch.Tensor, torch.Tensor], group: dist.ProcessGroup) -> None:
    """To the next member of the ring, and from the one before."""
    size, rank = group.size(), group.rank()
    after = dist.get_global_rank(group, (rank + 1) % size)
    before = dist.get_global_rank(group, (rank - 1) % size)
    _batched(
        dist.P2POp(dist.isend, buffers[0], after, group),
        dist.P2POp(dist.irecv, buffers[1], before, group),
    )


def _there_and_back(buffers: tuple[torch.Tensor, torch.Tensor], group: dist.ProcessGroup) -> None:
    """A message to the other member of a pair, and one back when it is there."""
    first = group.rank() == 0
    peer = dist.get_global_rank(group, int(first))
    send = dist.P2POp(dist.isend, buffers[0], peer, group)
    receive = dist.P2POp(dist.irecv, buffers[1], peer, group)
    for operation in (send, receive) if first else (receive, send):
        _batched(operation)


def _batched(*operations: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv(list(operations)):
        work.wait()


def _waited(_work: object) -> None:
    """Calls without a handle are waited for by torch."""


def _done(_tensor: torch.Tensor) -> None:
    """Of a call that is made for what it does."""


def _nothing() -> None:
    """Nothing to refill."""
