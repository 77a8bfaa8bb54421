"""``deep_ep.HybridEPBuffer``: a dispatch that delivers rows sorted by expert, and its inverse."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.deep_ep import held, hybrid_ops, hybrid_sizes, load
from primus_ext.emulate.host_tensor import host_values, keep
from primus_ext.emulate.session import ProgramError

DOMAIN = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
"""HybridEP's own variable: how many ranks of a group share an NVLink domain."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Routing:
    """What the metadata kernel learned, on the host."""

    load: load.Load
    rows: tuple[int, ...]
    """Rows of each local expert, padding included."""
    chosen: torch.Tensor
    """This rank's routing map ``[tokens, experts of the group]`` bool."""


class HybridEPBuffer:
    """Communication buffers of one group of expert-parallel ranks."""

    def __init__(
        self, group: dist.ProcessGroup, hidden_dim: int, max_num_of_tokens_per_rank: int,
        num_local_experts: int, use_fp8: bool = False, num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None, num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None, num_blocks_unpermute: int | None = None,
        **_unused: Any,
    ) -> None:  # fmt: skip
        """Allocate the buffers.

        Args:
            group: Ranks that exchange tokens.
            hidden_dim: Hidden size.
            max_num_of_tokens_per_rank: Most tokens that a rank sends.
            num_local_experts: Experts of a rank.
            use_fp8: Must be False.
            num_sms_dispatch_api: SMs of the dispatch.
            num_sms_combine_api: SMs of the combine.
            num_sms_preprocessing_api: SMs of the metadata kernel.
            num_blocks_permute: Blocks of the permutation.
            num_blocks_unpermute: Blocks of its inverse.

        Raises:
            NotImplementedError: For FP8.
            ProgramError: The ranks are not whole nodes.
        """
        if use_fp8:
            raise NotImplementedError("deep_ep: HybridEP's FP8 dispatch has no stand-in")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.per_node = ranks_per_node(group)
        if self.group_size % self.per_node:
            raise ProgramError(
                f"expert_model_parallel_size x expert_tensor_parallel_size={self.group_size} is "
                f"not supported by HybridEP; legal: a multiple of the {self.per_node} ranks that "
                f"share a node ({DOMAIN} says otherwise)"
            )
        self.nodes = self.group_size // self.per_node
        default_sms = 24 if self.nodes == 1 else 8
        self.sms = num_sms_dispatch_api or default_sms
        self.combine_sms = num_sms_combine_api or default_sms
        self.local_experts = num_local_experts
        shape = hybrid_sizes.Shape(
            hidden_dim, max_num_of_tokens_per_rank, num_local_experts, self.per_node, self.nodes,
            num_sms_preprocessing_api or 108,
        )  # fmt: skip
        self._shape = shape
        held.hold(self, hybrid_sizes.buffer_bytes(shape))

    def dispatch_with_permute(
        self, *, hidden: torch.Tensor, routing_map: Any = None, probs: Any = None,
        scaling_factor: Any = None, num_of_experts_per_rank: int | None = None,
        pad_multiple: int | None = None, num_permuted_tokens: Any = None, handle: Any = None,
        non_blocking: bool = False, fuse_permute_dispatch: bool = False, **_unused: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Send tokens to their experts' ranks and sort them by expert.

        Args:
            hidden: ``[tokens, hidden]``.
            routing_map: ``[tokens, experts of the group]`` bool, with a new routing.
            probs: ``[tokens, experts of the group]`` fp32, with a new routing.
            scaling_factor: Must be None.
            num_of_experts_per_rank: Local experts.
            pad_multiple: Rows of each expert are rounded up to it.
            num_permuted_tokens: Rows of the result, where they are fixed beforehand.
            handle: Of an earlier dispatch whose routing is used again.
            non_blocking: Whether the host does not wait for the counts.
            fuse_permute_dispatch: One kernel for both.

        Returns:
            Rows ``[rows, hidden]``, their weights ``[rows]`` or None, None (scales), rows of each
            local expert, and the handle.

        Raises:
            NotImplementedError: With scales.
        """
        if scaling_factor is not None:
            raise NotImplementedError("deep_ep: HybridEP's FP8 dispatch has no stand-in")
        tables: tuple[torch.Tensor, ...]
        if handle is None:
            self._grow(hidden.shape[0])
            gathered = routing_map.new_empty(
                (routing_map.shape[0] * self.group_size, routing_map.shape[1])
            )
            dist.all_gather_into_tensor(gathered, routing_map, group=self.group)
            tables = tuple(
                hybrid_ops.metadata(
                    gathered, tokens=hidden.shape[0], local_experts=self.local_experts,
                    per_node=self.per_node, nodes=self.nodes,
                )
            )  # fmt: skip
            del gathered
            routing = self._routing(routing_map, pad_multiple or 1)
        else:
            routing, tables = handle[0], handle[1:]
        rows = sum(routing.rows) if num_permuted_tokens is None else int(num_permuted_tokens)
        made = hybrid_ops.dispatch(
            hidden, probs, routing.chosen, group=self.group.group_name, rank=self.rank,
            rows=rows, counts=list(routing.rows), sent=routing.load.sent,
            arrived=routing.load.received, node_sent=self._off_node(routing.load),
            row_bytes=self._row_bytes(hidden, probs is not None), sms=self.sms,
        )  # fmt: skip
        with host_values():
            counts = keep(torch.tensor(routing.rows, dtype=torch.int64))
        weights = made[1] if probs is not None else None
        return made[0], weights, None, counts, (routing, *tables)

    def combine_with_unpermute(
        self, *, hidden: torch.Tensor, probs: Any = None, handle: Any = None,
        pad_multiple: int | None = None, fuse_unpermute_combine: bool = False, **_unused: Any,
    ) -> tuple[torch.Tensor, Any]:  # fmt: skip
        """Bring every token's rows back to its rank and sum them.

        Args:
            hidden: ``[rows, hidden]``.
            probs: ``[rows]`` fp32 to bring back too.
            handle: Of the dispatch.
            pad_multiple: As in the dispatch.
            fuse_unpermute_combine: One kernel for both.

        Returns:
            ``[tokens, hidden]`` and the weights ``[tokens, experts of the group]`` or None.
        """
        routing = handle[0]
        made = hybrid_ops.combine(
            hidden, probs, routing.chosen, group=self.group.group_name, rank=self.rank,
            sent=routing.load.received, node_sent=self._off_node(routing.load),
            row_bytes=self._row_bytes(hidden, probs is not None), sms=self.combine_sms,
        )  # fmt: skip
        return made[0], made[1] if probs is not None else None

    def _grow(self, tokens: int) -> None:
        """A larger microbatch than before reallocates the buffers."""
        if tokens > self._shape.rounded_tokens:
            self._shape = dataclasses.replace(self._shape, tokens=tokens)
            held.hold(self, hybrid_sizes.buffer_bytes(self._shape))

    def _routing(self, chosen: torch.Tensor, multiple: int) -> _Routing:
        if isinstance(chosen, FakeTensor):
            counts = load.expected()
        else:
            with host_values():
                counts = load.from_map(chosen, self.group_size, self.rank, self.per_node)
        rows = tuple(-(-n // multiple) * multiple for n in counts.per_local_expert)
        return _Routing(counts, rows, chosen)

    def _off_node(self, counts: load.Load) -> int:
        own = self.rank // self.per_node
        return sum(n for node, n in enumerate(counts.sent_to_nodes) if node != own)

    def _row_bytes(self, hidden: torch.Tensor, weights: bool) -> int:
        """Bytes of one token on the wire: hidden state, weights of the experts of a node."""
        size = hidden.shape[1] * hidden.element_size()
        return size + (4 * self.local_experts * self.per_node if weights else 0)


def ranks_per_node(group: dist.ProcessGroup) -> int:
    """Ranks of the group that share this rank's NVLink domain."""
    given = os.environ.get(DOMAIN)
    if given is not None:
        return int(given)
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    node = dist.get_rank() // size
    return sum(rank // size == node for rank in dist.get_process_group_ranks(group))
