"""Fused router of the mixture of experts: scores, top-k, auxiliary loss.

Follows ``transformer_engine/common/fused_router`` (2.20).  Routing maps as bit maps and the
quantile-balancing router are not emulated.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.ops import define, nothing

_EPSILON = 1e-20
"""Keeps the sum of sigmoid scores from zero (``fused_router/utils.h``)."""


def _bytemap(routing_map_format: int) -> None:
    if int(routing_map_format) != 0:
        raise NotImplementedError("routing maps as bit maps are not emulated")


def _score(x: torch.Tensor, function: str) -> torch.Tensor:
    if function == "softmax":
        return torch.softmax(x, -1)
    if function == "sigmoid":
        return torch.sigmoid(x)
    return torch.nn.functional.softplus(x).sqrt()


def _select(scores: torch.Tensor, topk: int, groups: int, group_topk: int) -> torch.Tensor:
    """Mask of the chosen experts, within the best groups if there are groups."""
    if group_topk > 0:
        grouped = scores.unflatten(-1, (groups, -1))
        best = grouped.topk(topk // group_topk, -1)[0].sum(-1).topk(group_topk, -1)[1]
        open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        scores = grouped.masked_fill(~open_groups[..., None], float("-inf")).flatten(-2)
    chosen = scores.topk(topk, -1)[1]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def _topk_fake(logits: torch.Tensor, expert_bias: Any, **_: Any) -> Any:
    return (
        logits.new_empty(logits.shape),
        logits.new_empty(logits.shape, dtype=torch.bool),
        logits.new_empty(logits.shape, dtype=torch.float32),
    )


@define(
    "fused_topk_router_fwd(Tensor logits, Tensor? expert_bias, *, int topk, bool pre_softmax, "
    "int groups, int group_topk, float scaling, str score_function) -> (Tensor, Tensor, Tensor)",
    fake=_topk_fake,
)
def _topk_fwd(
    logits: torch.Tensor, expert_bias: Any, *, topk: int, pre_softmax: bool, groups: int,
    group_topk: int, scaling: float, score_function: str,
) -> Any:
    x = logits.float()
    late = score_function == "softmax" and not pre_softmax
    scores = x if late else _score(x, score_function)
    ranked = scores if expert_bias is None else scores + expert_bias
    mask = _select(ranked, topk, groups, group_topk)
    saved = x if score_function == "sqrtsoftplus" else scores
    if late:
        scores = torch.softmax(x.masked_fill(~mask, float("-inf")), -1)
        saved = scores
    elif score_function != "softmax" and topk > 1:
        scores = scores / ((scores * mask).sum(-1, keepdim=True) + _EPSILON)
    return (scaling * scores * mask).to(logits.dtype), mask, saved.clone()


def _score_gradient(
    upstream: torch.Tensor, saved: torch.Tensor, mask: Any, function: str, normalized: bool
) -> torch.Tensor:
    """Gradient of the (masked, normalized) scores with respect to the logits."""
    if function == "softmax":
        return saved * (upstream - (upstream * saved).sum(-1, keepdim=True))
    scores = saved if function == "sigmoid" else _score(saved, function)
    derivative = (
        scores * (1 - scores) if function == "sigmoid" else torch.sigmoid(saved) / (2 * scores)
    )
    kept = scores if mask is None else scores * mask
    if normalized:
        total = kept.sum(-1, keepdim=True) + _EPSILON
        upstream = upstream / total - (upstream * kept).sum(-1, keepdim=True) / total**2
    if mask is not None:
        upstream = upstream * mask
    return upstream * derivative


@define(
    "fused_topk_router_bwd(Tensor routing_map, Tensor saved, Tensor grad_probs, "
    "Tensor(a!) grad_logits, *, int topk, bool pre_softmax, float scaling, str score_function)"
    " -> ()",
    fake=nothing,
)
def _topk_bwd(
    routing_map: torch.Tensor, saved: torch.Tensor, grad_probs: torch.Tensor,
    grad_logits: torch.Tensor, *, topk: int, pre_softmax: bool, scaling: float,
    score_function: str,
) -> None:
    upstream = scaling * grad_probs.float() * routing_map
    grad_logits.copy_(_score_gradient(upstream, saved, routing_map, score_function, topk > 1))


@binding()
def fused_topk_with_score_function_fwd(
    logits: torch.Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None,
    group_topk: int | None, scaling_factor: float | None, score_function: str,
    expert_bias: torch.Tensor | None, routing_map_format: int = 0, topk_indices: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Probabilities, routing map (bool) and what the backward pass needs.

    Raises:
        NotImplementedError: For dense indices and for bit maps.
    """
    _bytemap(routing_map_format)
    if topk_indices is not None:
        raise NotImplementedError("dense top-k indices are not emulated")
    return _topk_fwd(
        logits, expert_bias, topk=topk,
        pre_softmax=use_pre_softmax and score_function == "softmax",
        groups=num_groups or -1, group_topk=group_topk or -1,
        scaling=1.0 if scaling_factor is None else float(scaling_factor),
        score_function=score_function,
    )  # fmt: skip


@binding()
def fused_topk_with_score_function_bwd(
    routing_map: torch.Tensor, intermediate_output: torch.Tensor, grad_probs: torch.Tensor,
    grad_logits: torch.Tensor, topk: int, use_pre_softmax: bool, scaling_factor: float | None,
    score_function: str, use_dense_indices: bool = False, routing_map_format: int = 0,
) -> None:
    """Gradient of the logits, into ``grad_logits``."""
    _bytemap(routing_map_format)
    if use_dense_indices:
        raise NotImplementedError("dense top-k indices are not emulated")
    _topk_bwd(
        routing_map, intermediate_output, grad_probs, grad_logits, topk=topk,
        pre_softmax=use_pre_softmax,
        scaling=1.0 if scaling_factor is None else float(scaling_factor),
        score_function=score_function,
    )  # fmt: skip


@define(
    "fused_aux_scores_fwd(Tensor logits, *, int topk, str score_function)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda logits, **_: (
        logits.new_empty(logits.shape, dtype=torch.float32),
        logits.new_empty(logits.shape, dtype=torch.bool),
        logits.new_empty(logits.shape, dtype=torch.float32),
    ),
)
def _aux_scores_fwd(logits: torch.Tensor, *, topk: int, score_function: str) -> Any:
    x = logits.float()
    raw = _score(x, score_function)
    mask = _select(raw, topk, -1, -1)
    scores = raw
    if score_function != "softmax" and topk > 1:
        scores = raw / (raw.sum(-1, keepdim=True) + _EPSILON)
    saved = x if score_function == "sqrtsoftplus" else raw
    return scores.clone(), mask, saved.clone()


@define(
    "fused_aux_scores_bwd(Tensor saved, Tensor grad_scores, Tensor(a!) grad_logits, *, int topk, "
    "str score_function) -> ()",
    fake=nothing,
)
def _aux_scores_bwd(
    saved: torch.Tensor, grad_scores: torch.Tensor, grad_logits: torch.Tensor, *, topk: int,
    score_function: str,
) -> None:
    gradient = _score_gradient(grad_scores.float(), saved, None, score_function, topk > 1)
    grad_logits.copy_(gradient)


@binding()
def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (fp32) for the auxiliary loss, routing map and what the backward pass needs."""
    _bytemap(routing_map_format)
    return _aux_scores_fwd(logits, topk=topk, score_function=score_function)


@binding()
def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: torch.Tensor, grad_scores: torch.Tensor, grad_logits: torch.Tensor,
    topk: int, score_function: str,
) -> None:
    """Gradient of the logits, into ``grad_logits``."""
    _aux_scores_bwd(
        intermediate_output, grad_scores, grad_logits, topk=topk, score_function=score_function)


@define(
    "fused_aux_loss_fwd(Tensor probs, Tensor tokens_per_expert, Tensor? total_tokens, *, "
    "float tokens, int experts, int topk, float coeff) -> (Tensor, Tensor)",
    fake=lambda probs, tokens_per_expert, total_tokens, **_: (
        probs.new_empty(()),
        probs.new_empty((2,), dtype=torch.float32),
    ),
)
def _aux_loss_fwd(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_tokens: Any, *, tokens: float,
    experts: int, topk: int, coeff: float,
) -> Any:
    count = tokens if total_tokens is None else float(total_tokens)
    factor = experts * coeff / topk / count / count
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * factor
    return loss.to(probs.dtype), torch.tensor([factor, 0.0])


@binding()
def fused_moe_aux_loss_fwd(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: int,
    num_experts: int, num_rows: int, num_cols: int, topk: int, coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Auxiliary loss (scalar) and its constant factor."""
    return _aux_loss_fwd(
        probs, tokens_per_expert, None, tokens=float(total_num_tokens), experts=num_experts,
        topk=topk, coeff=float(coeff),
    )  # fmt: skip


@binding()
def fused_moe_aux_loss_fwd_graph_safe(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: torch.Tensor,
    num_experts: int, num_rows: int, num_cols: int, topk: int, coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the number of tokens in a tensor."""
    return _aux_loss_fwd(
        probs, tokens_per_expert, total_num_tokens, tokens=0.0, experts=num_experts, topk=topk,
        coeff=float(coeff),
    )  # fmt: skip


@define(
    "fused_aux_loss_bwd(Tensor factor, Tensor tokens_per_expert, Tensor grad, *, int rows, "
    "int cols) -> Tensor",
    fake=lambda factor, tokens_per_expert, grad, *, rows, cols: grad.new_empty((rows, cols)),
)
def _aux_loss_bwd(
    factor: torch.Tensor, tokens_per_expert: torch.Tensor, grad: torch.Tensor, *, rows: int,
    cols: int,
) -> torch.Tensor:
    row = factor[0] * tokens_per_expert.float() * grad.float()
    return row.expand(rows, cols).to(grad.dtype).contiguous()


@binding()
def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int,
    grad_aux_loss: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the probabilities."""
    return _aux_loss_bwd(
        Const_buf, tokens_per_expert, grad_aux_loss, rows=num_rows, cols=num_cols)
