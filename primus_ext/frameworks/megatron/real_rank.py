"""The whole rank with real tensors on this CPU, metered by PyTorch's own allocator events.

The other ranks stay virtual, unless the request has a ``rendezvous``: then they are real processes
(gloo) that run the same.  Routing is forced to be balanced, as in the virtual run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from primus_ext.emulate import device_kernels, session, virtual_peers
from primus_ext.emulate.host_tensor import host_values
from primus_ext.frameworks.megatron import microbatch, packed, rank, routing, whole_rank
from primus_ext.observe.allocator_meter import AllocatorMeter, Metered
from primus_ext.observe.recorder import LiveBytes

"""What the dispatcher hands to collectives as lists; on the CPU it would leave tensors."""
LARGEST = 40
"""Blocks of the peak that are reported, the largest first."""


class Observer:
    """Stands where the recorder stands in the whole-rank run, and only marks and meters."""

    def __init__(self) -> None:
        self.group_names: dict[str, str] = {}
        self.memory = self
        self.host = LiveBytes(lambda _size, _op: 0)  # offloading with storage is not metered
        self.metered: Metered | None = None
        self._meter = AllocatorMeter()

    def __enter__(self) -> Observer:
        self._meter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The process of a rank ends with its run; nothing is left to undo."""

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self._meter.mark()

    @property
    def live(self) -> int:
        """Known only when the profile is evaluated; :func:`peak` fills it in."""
        return 0

    @property
    def peak(self) -> int:
        """Bytes; ends the profile."""
        if self.metered is None:
            self.metered = self._meter.stop()
        return self.metered.peak_bytes


def peak(
    original: Callable[..., Any], call: inspect.BoundArguments, member: int
) -> dict[str, Any]:
    """As :func:`whole_rank.peak`, with real tensors; meant to run in a fork.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        member: Global rank.

    Returns:
        ``rank``, ``peak_bytes``, ``live_bytes`` and ``largest``: size, count and operator of the
        largest blocks of the peak.
    """
    observer = Observer()
    microbatch.batches = _batches
    _force_balance()
    if "rendezvous" not in session.current().request:
        virtual_peers.answer()
    device_kernels.write_random_values()
    found = rank.run(original, call, member, whole_rank.two_steps, observer)
    assert observer.metered is not None
    sizes: dict[tuple[int, str], int] = {}
    for block in observer.metered.at_peak:
        sizes[block.size, block.owner] = sizes.get((block.size, block.owner), 0) + 1
    ordered = sorted(sizes.items(), key=lambda item: -item[0][0] * item[1])
    return {
        **found,
        "live_bytes": observer.metered.live_bytes,
        "largest": [[size, n, owner] for (size, owner), n in ordered[:LARGEST]],
    }


def _batches(args: Any) -> Iterator[dict[str, torch.Tensor]]:
    """As :func:`microbatch.batches`, with token ids that exist."""
    shape = (args.micro_batch_size, args.seq_length)
    with host_values():
        order = torch.arange(args.seq_length)
    while True:
        yield {
            "tokens": torch.empty(shape, dtype=torch.int64).random_(0, args.vocab_size),
            "labels": torch.empty(shape, dtype=torch.int64).random_(0, args.vocab_size),
            "loss_mask": torch.empty(shape, dtype=torch.float32).fill_(1.0),
            "position_ids": torch.empty(shape, dtype=torch.int64).copy_(order.expand(shape)),
            **packed.documents(args),
        }


def _balanced(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """Routing map ``[tokens, experts]`` (bool): every token goes to the next experts in turn."""
    chosen = (torch.arange(tokens * topk) % experts).view(tokens, topk)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


def _force_balance() -> None:
    """Routers choose what the virtual run assumes; the host's counts are not device memory."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    forward, preprocess = TopKRouter.forward, MoEAlltoAllTokenDispatcher.preprocess

    def balanced(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = forward(self, *args, **kwargs)
        tokens, experts = chosen.shape
        with host_values():
            chosen.copy_(_balanced(tokens, experts, self.config.moe_router_topk))
        return probs, chosen

    def counted_on_host(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        with host_values():
            return routing.on_the_host(self, preprocess, routing_map)

    TopKRouter.forward = balanced
    MoEAlltoAllTokenDispatcher.preprocess = counted_on_host
