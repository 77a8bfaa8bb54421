"""Token permutation by index map and padding of expert inputs (mixture of experts)."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.ops import define, nothing


@define(
    "moe_permute(Tensor x, Tensor indices, *, int num_out_tokens) -> (Tensor, Tensor)",
    fake=lambda x, indices, *, num_out_tokens: (
        x.new_empty((num_out_tokens, x.shape[1])),
        x.new_empty((indices.numel(),), dtype=torch.int32),
    ),
)
def _permute(x: torch.Tensor, indices: torch.Tensor, *, num_out_tokens: int) -> Any:
    tokens, topk = indices.shape
    order = torch.argsort(indices.reshape(-1), stable=True)
    row_of = torch.full((topk * tokens,), -1, dtype=torch.int32)
    for row, source in enumerate(order[:num_out_tokens].tolist()):
        token, choice = divmod(source, topk)
        row_of[choice * tokens + token] = row
    return x[order[:num_out_tokens] // topk], row_of


@define(
    "moe_unpermute(Tensor x, Tensor row_id_map, Tensor? prob, *, int tokens, int topk) -> Tensor",
    fake=lambda x, row_id_map, prob, *, tokens, topk: x.new_empty((tokens, x.shape[1])),
)
def _unpermute(x: torch.Tensor, rows: torch.Tensor, prob: Any, *, tokens: int, topk: int) -> Any:
    out = torch.zeros((tokens, x.shape[1]), dtype=torch.float32)
    for choice in range(topk):
        row = rows[choice * tokens : (choice + 1) * tokens].long()
        kept = row >= 0
        part = x[row.clamp(min=0)].float() * kept[:, None]
        out += part if prob is None else part * prob[:, choice, None].float()
    return out.to(x.dtype)


@define(
    "moe_unpermute_bwd(Tensor dy, Tensor x, Tensor row_id_map, Tensor? prob, *, int tokens, "
    "int topk) -> (Tensor, Tensor)",
    fake=lambda dy, x, row_id_map, prob, *, tokens, topk: (
        dy.new_empty((x.shape[0], dy.shape[1])),
        dy.new_empty((tokens, topk), dtype=torch.float32),
    ),
)
def _unpermute_bwd(
    dy: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, prob: Any, *, tokens: int, topk: int
) -> Any:
    dx = torch.zeros((x.shape[0], dy.shape[1]), dtype=dy.dtype)
    dprob = torch.zeros((tokens, topk), dtype=torch.float32)
    for choice in range(topk):
        row = rows[choice * tokens : (choice + 1) * tokens].long()
        kept = (row >= 0).nonzero()[:, 0]
        weight = 1.0 if prob is None else prob[kept, choice, None].float()
        dx[row[kept]] = (dy[kept].float() * weight).to(dy.dtype)
        dprob[kept, choice] = (dy[kept].float() * x[row[kept]].float()).sum(-1)
    return dx, dprob


def _given(prob: torch.Tensor) -> torch.Tensor | None:
    return prob if prob.numel() > 0 else None


@binding()
def moe_permute_fwd(
    input: torch.Tensor, dtype: Any, indices: torch.Tensor, num_out_tokens: int,
    workspace: list[torch.Tensor], max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Sort token copies by expert; returns them, the row map and the sort's workspace.

    The temporary storage of the radix sort is not modelled.
    """
    if not workspace:
        size = (max_expanded_token_num,)
        workspace = [input.new_empty(size, dtype=torch.int32) for _ in range(3)]
    count = num_out_tokens if num_out_tokens > 0 else indices.numel()
    permuted, row_id_map = _permute(input, indices, num_out_tokens=count)
    return permuted, row_id_map, workspace


@binding("moe_permute_bwd", "moe_unpermute_fwd")
def moe_unpermute_fwd(
    input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor,
    num_tokens: int, topK: int,
) -> torch.Tensor:
    """Bring token copies back and sum them, weighted by ``prob`` if given."""
    return _unpermute(input, row_id_map, _given(prob), tokens=num_tokens, topk=topK)


@binding()
def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: Any, row_id_map: torch.Tensor,
    prob: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the token copies and of the weights."""
    weights = _given(prob)
    tokens, topk = (row_id_map.shape[0], 1) if weights is None else weights.shape
    return _unpermute_bwd(input_bwd, input_fwd, row_id_map, weights, tokens=tokens, topk=topk)


@define(
    "multi_row_padding(Tensor x, Tensor(a!) out, *, int[] rows, int[] padded_rows, bool pad) -> ()",
    fake=nothing,
)
def _multi_row_padding(
    x: torch.Tensor, out: torch.Tensor, *, rows: list[int], padded_rows: list[int], pad: bool
) -> None:
    source = x.split(rows if pad else padded_rows)
    target = out.split(padded_rows if pad else rows)
    for a, b in zip(source, target, strict=True):
        count = min(a.shape[0], b.shape[0])
        b[:count] = a[:count]
        b[count:] = 0


@binding()
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int],
    padded_input_row_list: list[int],
) -> None:
    """Copy each expert's rows into a taller block and zero the rest."""
    _multi_row_padding(
        input, output, rows=list(input_row_list), padded_rows=list(padded_input_row_list),
        pad=True,
    )  # fmt: skip


@binding()
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: list[int],
    unpadded_input_row_list: list[int],
) -> None:
    """The inverse: drop the padding rows."""
    _multi_row_padding(
        input, output, rows=list(unpadded_input_row_list), padded_rows=list(input_row_list),
        pad=False,
    )  # fmt: skip
