"""DeepEP's kernels as opaque operators, in namespace ``primus_deep_ep``.

A real CPU kernel answers for peers that send what this rank sends: what arrives is this rank's own
tokens for itself, once for each peer.  Tokens that other ranks compute come back as rows of this
rank's own result: finite numbers of the right shape, not the true ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "primus_deep_ep"
_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as the CPU kernel of a new operator and return the latter.

    Args:
        schema: In the syntax of ``torch.library``.
        fake: The kernel for tensors without values.
    """
    name = schema.partition("(")[0]

    def register(cpu: Callable[..., Any]) -> Any:
        _library.define(schema)
        _library.impl(name, cpu, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        return getattr(torch.ops.primus_deep_ep, name).default

    return register


def _layout_fake(
    topk_idx: torch.Tensor, *, experts: int, ranks: int, nodes: int
) -> list[torch.Tensor]:
    made = [
        topk_idx.new_empty((ranks,), dtype=torch.int32),
        topk_idx.new_empty((experts,), dtype=torch.int32),
        topk_idx.new_empty((topk_idx.shape[0], ranks), dtype=torch.bool),
    ]
    if nodes > 1:
        made.append(topk_idx.new_empty((nodes,), dtype=torch.int32))
    return made


@define(
    "layout(Tensor topk_idx, *, int experts, int ranks, int nodes) -> Tensor[]", fake=_layout_fake
)
def layout(topk_idx: torch.Tensor, *, experts: int, ranks: int, nodes: int) -> list[torch.Tensor]:
    """Tokens to each rank, to each expert, whether token goes to rank, and tokens to each node."""
    chosen = torch.zeros(topk_idx.shape[0], experts + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(topk_idx < 0, experts, topk_idx), True)
    chosen = chosen[:, :experts]
    in_rank = chosen.view(topk_idx.shape[0], ranks, -1).any(-1)
    made = [in_rank.sum(0).int(), chosen.sum(0).int(), in_rank]
    if nodes > 1:
        made.append(in_rank.view(topk_idx.shape[0], nodes, -1).any(-1).sum(0).int())
    return made


DISPATCH = (
    "dispatch(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor in_rank, *, str group, "
    "int rank, int experts, int received, int sent, int node_sent, int row_bytes, int sms, "
    "int[][] tables) -> Tensor[]"
)
"""``tables``: shapes of the int32 tables that the kernel leaves behind; ``sent``: rows to all
ranks; ``node_sent``: rows to all nodes but this one; ``row_bytes``: of one row on the wire."""


def _dispatch_fake(
    x: torch.Tensor, topk_idx: Any, topk_weights: Any, in_rank: torch.Tensor, *, received: int,
    tables: list[list[int]], **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    made = [x.new_empty((received, x.shape[1]))]
    for tensor in (topk_idx, topk_weights):
        if tensor is not None:
            made.append(tensor.new_empty((received, tensor.shape[1])))
    return made + [x.new_empty(shape, dtype=torch.int32) for shape in tables]


@define(DISPATCH, fake=_dispatch_fake)
def dispatch(
    x: torch.Tensor, topk_idx: Any, topk_weights: Any, in_rank: torch.Tensor, *, rank: int,
    experts: int, tables: list[list[int]], **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Send tokens to the ranks of their experts; what arrives, then the tables."""
    ranks = in_rank.shape[1]
    mine = in_rank[:, rank].nonzero()[:, 0]
    made = [x[mine].repeat(ranks, 1)]
    if topk_idx is not None:
        local = experts // ranks
        index = topk_idx[mine] - rank * local
        here = (index >= 0) & (index < local)
        made.append(torch.where(here, index, -1).repeat(ranks, 1))
        made.append((topk_weights[mine] * here).repeat(ranks, 1))
    return made + [torch.zeros(shape, dtype=torch.int32) for shape in tables]


def _combine_fake(
    x: torch.Tensor, topk_weights: Any, in_rank: torch.Tensor, **_: Any
) -> list[torch.Tensor]:
    tokens = in_rank.shape[0]
    made = [x.new_empty((tokens, x.shape[1]))]
    if topk_weights is not None:
        made.append(topk_weights.new_empty((tokens, topk_weights.shape[1])))
    return made


@define(
    "combine(Tensor x, Tensor? topk_weights, Tensor in_rank, *, str group, int rank, int sent, "
    "int node_sent, int row_bytes, int sms) -> Tensor[]",
    fake=_combine_fake,
)
def combine(
    x: torch.Tensor, topk_weights: Any, in_rank: torch.Tensor, *, rank: int, **_: Any
) -> list[torch.Tensor]:
    """Bring tokens back to the rank they came from and sum them."""
    tokens = in_rank.shape[0]
    mine = in_rank[:, rank].nonzero()[:, 0]
    made = []
    for value in (x, topk_weights):
        if value is None:
            continue
        back = value.new_zeros((tokens, value.shape[1]))
        if value.shape[0]:
            back = value[torch.arange(tokens) % value.shape[0]]
            back[mine] = value[: mine.numel()]
        made.append(back)
    return made
