"""Helpers of context parallelism on packed sequences (``thd``), and format conversions.

The operators follow ``transformer_engine/common/fused_attn/context_parallel.cu`` (2.20).
Everywhere ``cu_seqlens`` are int32 prefix sums of the sequences' (padded) lengths.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.ops import define, nothing


def _spans(cu_seqlens: torch.Tensor, divisor: int = 1) -> list[tuple[int, int]]:
    """(start, end) of every sequence in boundaries divided by ``divisor``."""
    bounds = (cu_seqlens // divisor).tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _half_shape(tensor: torch.Tensor) -> list[int]:
    axis = tensor.dim() - 3
    return [size // 2 if i == axis else size for i, size in enumerate(tensor.shape)]


@define(
    "thd_read_half_tensor(Tensor x, Tensor cu_seqlens, *, int half) -> Tensor",
    fake=lambda x, cu_seqlens, *, half: x.new_empty(_half_shape(x)),
)
def _read_half(x: torch.Tensor, cu_seqlens: torch.Tensor, *, half: int) -> torch.Tensor:
    out = x.new_empty(_half_shape(x))
    axis = x.dim() - 3
    for start, end in _spans(cu_seqlens, 2):
        length = end - start
        source = x.narrow(axis, 2 * start + half * length, length)
        out.narrow(axis, start, length).copy_(source)
    return out


@binding()
def thd_read_half_tensor(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int
) -> torch.Tensor:
    """First or second half of every sequence of [t, h, d] or [2, t, h, d]."""
    return _read_half(tensor, cu_seqlens, half=half_idx)


def _second_halves(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, packed: bool
) -> list[tuple[torch.Tensor, int, int, int]]:
    """Views of the second halves of the sequences: (view, sequence, first position, length)."""
    views = []
    for i, (start, end) in enumerate(_spans(cu_seqlens, 2)):
        length = end - start
        if packed:
            views.append((lse[:, start + end : start + end + length], i, start, length))
        else:
            views.append((lse[i, :, length : 2 * length], i, 0, length))
    return views


@define(
    "thd_second_half_lse_correction(Tensor(a!) lse, Tensor lse_per_step, Tensor cu_seqlens, *, "
    "bool packed) -> ()",
    fake=nothing,
)
def _lse_correction(
    lse: torch.Tensor, per_step: torch.Tensor, cu_seqlens: torch.Tensor, *, packed: bool
) -> None:
    for view, i, start, length in _second_halves(lse, cu_seqlens, packed):
        source = per_step if packed else per_step[i]
        view.copy_(torch.logaddexp(view, source[:, start : start + length]))


@binding()
def thd_second_half_lse_correction(
    lse: torch.Tensor, lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool
) -> None:
    """Merge a step's log-sum-exp into the second half of every sequence."""
    _lse_correction(lse, lse_per_step, cu_seqlens, packed=lse_packed)


def _second_half_shape(lse: torch.Tensor, length: int) -> list[int]:
    return [*lse.shape[:-1], length]


@define(
    "thd_read_second_half_lse(Tensor lse, Tensor cu_seqlens, *, bool packed, int length) -> Tensor",
    fake=lambda lse, cu_seqlens, *, packed, length: lse.new_empty(_second_half_shape(lse, length)),
)
def _read_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, *, packed: bool, length: int
) -> torch.Tensor:
    out = lse.new_zeros(_second_half_shape(lse, length))
    for view, i, start, size in _second_halves(lse, cu_seqlens, packed):
        target = out if packed else out[i]
        target[:, start : start + size] = view
    return out


@binding()
def thd_read_second_half_lse(
    lse: torch.Tensor, cu_seqlens: torch.Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> torch.Tensor:
    """Second halves of the log-sum-exp [h, t] (packed) or [b, h, s]."""
    return _read_lse(lse, cu_seqlens, packed=lse_packed, length=second_half_lse_seqlen)


@define(
    "thd_out_correction(Tensor(a!) out, Tensor out_per_step, Tensor old_lse, Tensor lse, "
    "Tensor lse_per_step, Tensor cu_seqlens, *, bool only_second_half, bool packed) -> ()",
    fake=nothing,
)
def _out_correction(
    out: torch.Tensor, per_step: torch.Tensor, old_lse: torch.Tensor, lse: torch.Tensor,
    lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, *, only_second_half: bool, packed: bool,
) -> None:
    half = int(only_second_half)
    for i, (start, end) in enumerate(_spans(cu_seqlens, 1 + half)):
        length, shift = end - start, half * end
        old, whole, step = (x if packed else x[i] for x in (old_lse, lse, lse_per_step))
        at = start + shift if packed else half * length
        at_step = start if packed else 0
        merged = whole[:, at : at + length]
        kept = (old[:, at : at + length] - merged).exp().t()[..., None]
        added = (step[:, at_step : at_step + length] - merged).exp().t()[..., None]
        target = out[start + shift : end + shift]
        target.copy_(target.float() * kept + per_step[start:end].float() * added)


@binding()
def thd_out_correction(
    out: torch.Tensor, out_per_step: torch.Tensor, old_lse: torch.Tensor, lse: torch.Tensor,
    lse_per_step: torch.Tensor, cu_seqlens: torch.Tensor, only_second_half: bool, lse_packed: bool,
) -> None:
    """Add a step's output [t, h, d], both weighted by their shares of the softmax.

    Its Python equivalent is ``flash_attn_fwd_incremental_out_correction`` (``context_parallel.py``,
    2.20.2).
    """
    _out_correction(
        out, out_per_step, old_lse, lse, lse_per_step, cu_seqlens,
        only_second_half=only_second_half, packed=lse_packed,
    )  # fmt: skip


@define(
    "thd_grad_correction(Tensor(a!) grad, Tensor grad_per_step, Tensor cu_seqlens, *, "
    "str first_half, str second_half) -> ()",
    fake=nothing,
)
def _grad_correction(
    grad: torch.Tensor, per_step: torch.Tensor, cu_seqlens: torch.Tensor, *, first_half: str,
    second_half: str,
) -> None:
    axis = grad.dim() - 3
    # a step that covers one half of the sequences holds no more than that half
    whole = per_step.shape[axis] == grad.shape[axis]
    for start, end in _spans(cu_seqlens, 2):
        length = end - start
        for half, action in enumerate((first_half, second_half)):
            if action == "none":
                continue
            target = grad.narrow(axis, 2 * start + half * length, length)
            begin = 2 * start + half * length if whole else start
            if action == "zero":
                target.zero_()
                continue
            source = per_step.narrow(axis, begin, length)
            if action == "add":
                target.add_(source)
            else:
                target.copy_(source)


@binding()
def thd_grad_correction(
    grad: torch.Tensor, grad_per_step: torch.Tensor, cu_seqlens: torch.Tensor, first_half: str,
    second_half: str,
) -> None:
    """Apply ``add``, ``copy``, ``zero`` or ``none`` to both halves of every sequence."""
    _grad_correction(
        grad, grad_per_step, cu_seqlens, first_half=first_half, second_half=second_half)


def _sources(cu_seqlens: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Positions in the whole sequences of the tokens of one rank (two chunks a sequence)."""
    parts = []
    for start, end in _spans(cu_seqlens, world):
        length = end - start
        index = torch.arange(length)
        offset = torch.where(index < length // 2, rank, 2 * (world - 1) - rank)
        parts.append(index + start * world + length // 2 * offset)
    return torch.cat(parts)


@define(
    "thd_get_partitioned_indices(Tensor cu_seqlens, *, int tokens, int world, int rank) -> Tensor",
    fake=lambda cu_seqlens, *, tokens, world, rank: cu_seqlens.new_empty(
        (tokens // world,), dtype=torch.int32
    ),
)
def _indices(cu_seqlens: torch.Tensor, *, tokens: int, world: int, rank: int) -> torch.Tensor:
    return _sources(cu_seqlens, world, rank).to(torch.int32)


@binding()
def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Positions of the tokens that context-parallel rank ``rank`` holds."""
    return _indices(cu_seqlens, tokens=total_tokens, world=world_size, rank=rank)


@define(
    "thd_reorder(Tensor x, Tensor cu_seqlens, *, int cp_size, bool to_sequence_order) -> Tensor",
    fake=lambda x, cu_seqlens, **_: x.new_empty(x.shape),
)
def _reorder(
    x: torch.Tensor, cu_seqlens: torch.Tensor, *, cp_size: int, to_sequence_order: bool
) -> torch.Tensor:
    order = torch.cat([_sources(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    if not to_sequence_order:
        return x[order]
    out = torch.empty_like(x)
    out[order] = x
    return out


@binding()
def thd_sequence_order_to_cp_rank_order(
    inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """Group the tokens by context-parallel rank."""
    return _reorder(inp.contiguous(), cu_seqlens, cp_size=cp_size, to_sequence_order=False)


@binding()
def thd_cp_rank_order_to_sequence_order(
    inp: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, total_tokens: int
) -> torch.Tensor:
    """The inverse."""
    return _reorder(inp.contiguous(), cu_seqlens, cp_size=cp_size, to_sequence_order=True)


@define(
    "thd_copy_valid_tokens(Tensor(a!) out, Tensor inp, Tensor cu_seqlens_padded, "
    "Tensor cu_seqlens) -> ()",
    fake=nothing,
)
def _copy_valid(out: torch.Tensor, inp: torch.Tensor, padded: Any, valid: Any) -> None:
    for (start, _), (low, high) in zip(_spans(padded), _spans(valid), strict=True):
        out[start : start + high - low] = inp[start : start + high - low]


@binding()
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: torch.Tensor, inp: torch.Tensor, cu_seqlens_padded: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> None:
    """Copy the tokens that are no padding."""
    _copy_valid(out, inp.contiguous(), cu_seqlens_padded.contiguous(), cu_seqlens.contiguous())


@define(
    "convert_thd_to_bshd(Tensor x, Tensor cu_seqlens, *, int batch, int length) -> Tensor",
    fake=lambda x, cu_seqlens, *, batch, length: x.new_empty((batch, length, *x.shape[1:])),
)
def _to_bshd(
    x: torch.Tensor, cu_seqlens: torch.Tensor, *, batch: int, length: int
) -> torch.Tensor:
    out = x.new_zeros((batch, length, *x.shape[1:]))
    for i, (start, end) in enumerate(_spans(cu_seqlens)):
        out[i, : end - start] = x[start:end]
    return out


@binding()
def convert_thd_to_bshd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, b: int, max_seq_len: int
) -> torch.Tensor:
    """Unpack sequences into a padded batch."""
    return _to_bshd(tensor, cu_seqlens, batch=b, length=max_seq_len)


@define(
    "convert_bshd_to_thd(Tensor x, Tensor cu_seqlens, *, int tokens) -> Tensor",
    fake=lambda x, cu_seqlens, *, tokens: x.new_empty((tokens, *x.shape[2:])),
)
def _to_thd(x: torch.Tensor, cu_seqlens: torch.Tensor, *, tokens: int) -> torch.Tensor:
    out = x.new_zeros((tokens, *x.shape[2:]))
    for i, (start, end) in enumerate(_spans(cu_seqlens)):
        out[start:end] = x[i, : end - start]
    return out


@binding()
def convert_bshd_to_thd(
    tensor: torch.Tensor, cu_seqlens: torch.Tensor, t: int
) -> torch.Tensor:
    """Pack a padded batch."""
    return _to_thd(tensor, cu_seqlens, tokens=t)
