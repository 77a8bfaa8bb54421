"""``deep_ep.Buffer``: dispatch and combine within a node (NVLink) or across nodes (RDMA)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.deep_ep import config, held, load, ops
from primus_ext.emulate.deep_ep.events import EventHandle, EventOverlap
from primus_ext.emulate.host_tensor import host_values


@dataclasses.dataclass(frozen=True, slots=True)
class _Handle:
    """What a later call on the same routing needs: the real library's tuple of tables."""

    in_rank: torch.Tensor
    tables: tuple[torch.Tensor, ...]
    load: load.Load
    experts: int


class Buffer:
    """Communication buffers of one group of expert-parallel ranks."""

    num_sms: int = 20

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, **_unused: Any,
    ) -> None:  # fmt: skip
        """Allocate the buffers.

        Args:
            group: Ranks that exchange tokens.
            num_nvl_bytes: Size of the NVLink buffer.
            num_rdma_bytes: Size of the RDMA buffer.
            low_latency_mode: Must be False.

        Raises:
            NotImplementedError: For the low-latency mode.
        """
        if low_latency_mode:
            raise NotImplementedError("deep_ep: low_latency_mode has no stand-in")
        self.group = group
        self.rank, self.group_size = group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.nodes = max(1, self.group_size // config.NVLINK_PEERS)
        held.hold(self, config.buffer_bytes(num_nvl_bytes, num_rdma_bytes))

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set how many SMs the kernels use.

        Raises:
            AssertionError: The number is odd.
        """
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> config.Config:
        """The recommended configuration of a dispatch."""
        return config.dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> config.Config:
        """The recommended configuration of a combine."""
        return config.combine_config(num_ranks, Buffer.num_sms)

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: Any = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Count where tokens go.

        Args:
            topk_idx: ``[tokens, topk]`` int64, -1 for none.
            num_experts: Experts of the group.
            previous_event: Waited for; nothing to do.
            async_finish: Whether an event is returned.
            allocate_on_comm_stream: Whose tensors they are; nothing to do.

        Returns:
            Tokens to each rank, to each node (None within one), to each expert, whether a token
            goes to a rank ``[tokens, ranks]``, and the event.
        """
        made = ops.layout(topk_idx, experts=num_experts, ranks=self.group_size, nodes=self.nodes)
        per_node = made[3] if self.nodes > 1 else None
        return made[0], per_node, made[1], made[2], _event(async_finish)

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None, topk_idx: Any = None, topk_weights: Any = None,
        expert_alignment: int = 1, num_worst_tokens: int = 0, config: Any = None,
        previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Send every token to the ranks that hold its experts.

        Args:
            x: ``[tokens, hidden]``.
            handle: Of an earlier dispatch whose routing is used again.
            num_tokens_per_rank: From the layout.
            num_tokens_per_rdma_rank: From the layout.
            is_token_in_rank: From the layout, ``[tokens, ranks]`` bool.
            num_tokens_per_expert: From the layout.
            topk_idx: ``[tokens, topk]`` int64, with a new routing.
            topk_weights: ``[tokens, topk]`` fp32, with a new routing.
            expert_alignment: Must be 1.
            num_worst_tokens: Must be 0.
            config: Chunk sizes; by default the recommended ones.
            previous_event: Waited for; nothing to do.
            async_finish: Whether an event is returned.
            allocate_on_comm_stream: Whose tensors they are; nothing to do.

        Returns:
            Received tokens, their experts' local numbers and weights, tokens of each local expert,
            the handle, and the event; None for all but the first and last with an old routing.

        Raises:
            NotImplementedError: For quantized tokens, an alignment or a worst-case size.
        """
        if not isinstance(x, torch.Tensor) or expert_alignment != 1 or num_worst_tokens:
            raise NotImplementedError(
                "deep_ep: dispatch of quantized tokens, expert_alignment and num_worst_tokens have "
                "no stand-in"
            )
        chosen = config or self.get_dispatch_config(self.group_size)
        if handle is not None:
            received = self._send(x, None, None, handle, chosen.channels, again=True)[0]
            return received, None, None, None, None, _event(async_finish)
        new = self._new_handle(is_token_in_rank, topk_idx, num_tokens_per_expert.shape[0])
        made = self._send(x, topk_idx, topk_weights, new, chosen.channels, again=False)
        new = dataclasses.replace(new, tables=tuple(made[3:]))
        return (*made[:3], list(new.load.per_local_expert), new, _event(async_finish))

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: Any = None, bias: Any = None,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, Any, EventOverlap]:  # fmt: skip
        """Sum every token's rows on the rank that it came from.

        Args:
            x: ``[received, hidden]``.
            handle: Of the dispatch.
            topk_weights: ``[received, topk]`` fp32 to bring back too.
            bias: Must be None.
            config: Chunk sizes; by default the recommended ones.
            previous_event: Waited for; nothing to do.
            async_finish: Whether an event is returned.
            allocate_on_comm_stream: Whose tensors they are; nothing to do.

        Returns:
            ``[tokens, hidden]``, the weights ``[tokens, topk]`` or None, and the event.

        Raises:
            NotImplementedError: With a bias.
        """
        if bias is not None:
            raise NotImplementedError("deep_ep: combine with a bias has no stand-in")
        tokens = handle.load.received
        topk = 0 if topk_weights is None else topk_weights.shape[1]
        made = ops.combine(
            x, topk_weights, handle.in_rank, group=self.group.group_name, rank=self.rank,
            sent=tokens, node_sent=self._off_node(handle.load),
            row_bytes=self._row_bytes(x, 0, topk), sms=Buffer.num_sms,
        )  # fmt: skip
        return made[0], made[1] if topk else None, _event(async_finish)

    def _new_handle(self, in_rank: torch.Tensor, indices: torch.Tensor, experts: int) -> _Handle:
        if isinstance(indices, FakeTensor):
            counts = load.expected()
        else:
            with host_values():
                counts = load.from_indices(
                    indices, experts, self.group_size, self.rank, self._per_node
                )
        return _Handle(in_rank, (), counts, experts)

    @property
    def _per_node(self) -> int:
        return min(self.group_size, config.NVLINK_PEERS)

    def _send(
        self, x: torch.Tensor, indices: Any, weights: Any, handle: _Handle, channels: int,
        again: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        topk = 0 if indices is None else indices.shape[1]
        return ops.dispatch(
            x, indices, weights, handle.in_rank, group=self.group.group_name, rank=self.rank,
            experts=handle.experts, received=handle.load.received, sent=handle.load.sent,
            node_sent=self._off_node(handle.load), row_bytes=self._row_bytes(x, topk, topk),
            sms=Buffer.num_sms, tables=self._tables(x.shape[0], handle.load, channels, again),
        )  # fmt: skip

    def _off_node(self, counts: load.Load) -> int:
        """Rows that leave the node (a combine brings as many back)."""
        own = self.rank // self._per_node
        return sum(n for node, n in enumerate(counts.sent_to_nodes) if node != own)

    def _row_bytes(self, x: torch.Tensor, indices: int, weights: int) -> int:
        """Bytes of one token on the wire: hidden state, expert numbers, weights."""
        hidden = x.shape[1] * x.element_size()
        if self.nodes == 1:
            return hidden + 8 * indices + 4 * weights
        # across nodes expert numbers are 32 bits wide and messages end on 16 bytes
        size = hidden + config.SOURCE_META_BYTES + 4 * indices + 4 * weights
        return -(-size // 16) * 16

    def _tables(
        self, tokens: int, counts: load.Load, channels: int, again: bool
    ) -> list[list[int]]:
        """Shapes of the int32 tables that the kernels make (``csrc/deep_ep.cpp``)."""
        ranks, nodes, received = self.group_size, self.nodes, counts.received
        if nodes == 1:
            made = [[received], [ranks, channels], [tokens, ranks]]
            return made if again else [*made, [ranks, ranks], [ranks, channels]]
        if again:
            return []
        forwarded = nodes * counts.sent_to_nodes[self.rank // self._per_node]
        return [
            [nodes, channels], [nodes], [ranks, channels], [ranks],
            [received, config.SOURCE_META_BYTES // 4], [nodes, channels], [ranks, channels],
            [tokens, nodes], [forwarded, config.NVLINK_PEERS],
        ]  # fmt: skip


def _event(asynchronous: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if asynchronous else None)
