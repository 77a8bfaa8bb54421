"""HybridEP's kernels as opaque operators (see :mod:`primus_ext.emulate.deep_ep.ops`)."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.deep_ep.hybrid_sizes import CHUNK
from primus_ext.emulate.deep_ep.ops import define


def _metadata_fake(
    routing: torch.Tensor, *, tokens: int, local_experts: int, per_node: int, nodes: int
) -> list[torch.Tensor]:
    """Maps of the metadata kernel (``csrc/hybrid_ep/executor/executor.cu``)."""
    everybody, chunks = tokens * per_node * nodes, -(-tokens // CHUNK)
    int32, boolean = torch.int32, torch.bool
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((tokens * nodes, per_node), int32),
        ((-(-tokens // 16) * 16, nodes), boolean),
        ((tokens, nodes - 1), boolean),
        ((everybody, local_experts), boolean),
        ((chunks * per_node * nodes,), int32),
        ((everybody, local_experts), int32),
        ((local_experts,), int32),
        ((1,), int32),  # the overflow flag, last
    ]
    return [routing.new_zeros(shape, dtype=dtype) for shape, dtype in shapes]


metadata = define(
    "metadata(Tensor routing, *, int tokens, int local_experts, int per_node, int nodes) "
    "-> Tensor[]",
    fake=_metadata_fake,
)(_metadata_fake)


def _dispatch_fake(
    x: torch.Tensor, probs: Any, chosen: torch.Tensor, *, rows: int, **_: Any
) -> list[torch.Tensor]:
    made = [x.new_empty((rows, x.shape[1]))]
    return made if probs is None else [*made, probs.new_empty((rows,))]


def _mine(chosen: torch.Tensor, rank: int, experts: int) -> list[torch.Tensor]:
    """Tokens of this rank for each local expert."""
    local = chosen[:, rank * experts : (rank + 1) * experts]
    return [local[:, e].nonzero()[:, 0] for e in range(experts)]


@define(
    "hybrid_dispatch(Tensor x, Tensor? probs, Tensor chosen, *, str group, int rank, int rows, "
    "int[] counts, int sent, int arrived, int node_sent, int row_bytes, int sms) -> Tensor[]",
    fake=_dispatch_fake,
)
def dispatch(
    x: torch.Tensor, probs: Any, chosen: torch.Tensor, *, rank: int, rows: int,
    counts: list[int], **_: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Send tokens, sort them by local expert; rows beyond an expert's tokens are zeros."""
    out = x.new_zeros((rows, x.shape[1]))
    weights = x.new_zeros((rows,), dtype=torch.float32)
    ranks, start = chosen.shape[1] // len(counts), 0
    for local, (tokens, count) in enumerate(
        zip(_mine(chosen, rank, len(counts)), counts, strict=True)
    ):
        here = tokens.repeat(ranks)[: max(0, rows - start)]
        out[start : start + here.numel()] = x[here]
        if probs is not None:
            weights[start : start + here.numel()] = probs[here, rank * len(counts) + local]
        start += count
    return [out] if probs is None else [out, weights]


def _combine_fake(
    x: torch.Tensor, probs: Any, chosen: torch.Tensor, **_: Any
) -> list[torch.Tensor]:
    made = [x.new_empty((chosen.shape[0], x.shape[1]))]
    return made if probs is None else [*made, probs.new_empty(tuple(chosen.shape))]


@define(
    "hybrid_combine(Tensor x, Tensor? probs, Tensor chosen, *, str group, int rank, int sent, "
    "int node_sent, int row_bytes, int sms) -> Tensor[]",
    fake=_combine_fake,
)
def combine(
    x: torch.Tensor, probs: Any, chosen: torch.Tensor, *, rank: int, **_: Any
) -> list[torch.Tensor]:
    """Sum the rows of every token; other ranks' sums are rows of this rank's."""
    tokens = chosen.shape[0]
    back = x.new_zeros((tokens, x.shape[1]))
    if x.shape[0]:
        back = x[torch.arange(tokens) % x.shape[0]]
    if probs is None:
        return [back]
    weights = probs.new_zeros(tuple(chosen.shape))
    if probs.numel():
        picked = probs[torch.arange(chosen.numel()) % probs.numel()].view(tuple(chosen.shape))
        weights = picked * chosen
    return [back, weights]
