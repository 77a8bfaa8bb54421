"""Fused rotary position embedding, of one tensor or of an interleaved QKV tensor."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.ops import define

_ATTRIBUTES = "*, str fmt, bool interleaved, int cp_size, int cp_rank"


def _rotate(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate_back(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Transpose of :func:`_rotate`."""
    return -_rotate(x, interleaved)


def _dual_chunk(length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Positions in the whole sequence of the ``length`` tokens of one context-parallel rank."""
    position = torch.arange(length)
    if cp_size == 1:
        return position
    half = length // 2
    tail = length * cp_size - (cp_rank + 1) * half - half
    return torch.where(position < half, position + cp_rank * half, position + tail)


def _positions(
    x: torch.Tensor, fmt: str, cu_seqlens: Any, start: Any, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Row of the frequency table for every token, shaped to broadcast over heads and dims."""
    if fmt == "thd":
        rows = torch.zeros(x.shape[0], dtype=torch.int64)
        bounds = (cu_seqlens // cp_size).tolist()
        for i, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            shift = 0 if start is None else int(start[i])
            rows[low:high] = _dual_chunk(high - low, cp_size, cp_rank) + shift
        return rows[:, None]
    length = x.shape[fmt.index("s")]
    batch = x.shape[fmt.index("b")]
    rows = _dual_chunk(length, cp_size, cp_rank)[:, None].expand(length, batch)
    if start is not None:
        rows = rows + start[None, :]
    return (rows if fmt == "sbhd" else rows.t())[..., None]


def _apply(
    x: torch.Tensor, freqs: torch.Tensor, start: Any, cu_seqlens: Any, *, fmt: str,
    interleaved: bool, cp_size: int, cp_rank: int, backward: bool,
) -> torch.Tensor:
    angles = freqs.reshape(freqs.shape[0], -1)[
        _positions(x, fmt, cu_seqlens, start, cp_size, cp_rank)
    ]
    width = angles.shape[-1]
    part = x[..., :width].float()
    if backward:
        turned = _rotate_back(part * angles.sin(), interleaved)
    else:
        turned = _rotate(part, interleaved) * angles.sin()
    out = torch.empty(x.shape, dtype=x.dtype)
    out[..., :width] = part * angles.cos() + turned
    out[..., width:] = x[..., width:]
    return out


def _same(x: torch.Tensor, *_args: Any, **_attrs: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@define(
    f"fused_rope_fwd(Tensor x, Tensor freqs, Tensor? start, Tensor? cu_seqlens, {_ATTRIBUTES})"
    " -> Tensor",
    fake=_same,
)
def _rope_fwd(x: torch.Tensor, freqs: torch.Tensor, start: Any, cu: Any, **attrs: Any) -> Any:
    return _apply(x, freqs, start, cu, backward=False, **attrs)


@define(
    f"fused_rope_bwd(Tensor dy, Tensor freqs, Tensor? start, Tensor? cu_seqlens, {_ATTRIBUTES})"
    " -> Tensor",
    fake=_same,
)
def _rope_bwd(x: torch.Tensor, freqs: torch.Tensor, start: Any, cu: Any, **attrs: Any) -> Any:
    return _apply(x, freqs, start, cu, backward=True, **attrs)


def _format(member: Any) -> str:
    return member.name.removeprefix("NVTE_").lower()


@binding()
def fused_rope_forward(
    input: torch.Tensor, freqs: torch.Tensor, start_positions: Any, qkv_format: Any,
    interleaved: bool, cu_seqlens: Any, cp_size: int, cp_rank: int,
) -> torch.Tensor:
    """Rotate ``input`` (sbhd, bshd or thd) by ``freqs`` [seq, 1, 1, d2]."""
    return _rope_fwd(
        input, freqs, start_positions, cu_seqlens, fmt=_format(qkv_format),
        interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank,
    )  # fmt: skip


@binding()
def fused_rope_backward(
    output_grads: torch.Tensor, freqs: torch.Tensor, start_positions: Any, qkv_format: Any,
    interleaved: bool, cu_seqlens: Any, cp_size: int, cp_rank: int,
) -> torch.Tensor:
    """Gradient of :func:`fused_rope_forward` with respect to its input."""
    return _rope_bwd(
        output_grads, freqs, start_positions, cu_seqlens, fmt=_format(qkv_format),
        interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank,
    )  # fmt: skip


def _qkv_shapes(qkv: torch.Tensor, split: list[int]) -> list[list[int]]:
    """Shapes of q, k, v; ``split`` is the widths of q (a whole group), k and v."""
    q, k, v = ([*qkv.shape[:2], qkv.shape[2], width] for width in (split[1], split[1], split[2]))
    q[2] = qkv.shape[2] * split[0] // split[1]
    return [q, k, v]


def _qkv_fwd_fake(qkv: torch.Tensor, *_args: Any, split: list[int], **_attrs: Any) -> Any:
    return tuple(qkv.new_empty(shape) for shape in _qkv_shapes(qkv, split))


@define(
    "fused_qkv_rope_fwd(Tensor qkv, Tensor q_freqs, Tensor k_freqs, Tensor? start, "
    f"{_ATTRIBUTES}, int[] split) -> (Tensor, Tensor, Tensor)",
    fake=_qkv_fwd_fake,
)
def _qkv_rope_fwd(
    qkv: torch.Tensor, q_freqs: torch.Tensor, k_freqs: torch.Tensor, start: Any, *,
    split: list[int], **attrs: Any,
) -> Any:
    shapes = _qkv_shapes(qkv, split)
    q, k, v = (
        part.reshape(shape) for part, shape in zip(qkv.split(split, -1), shapes, strict=True)
    )
    q = _apply(q, q_freqs, start, None, backward=False, **attrs)
    k = _apply(k, k_freqs, start, None, backward=False, **attrs)
    return q, k, v.clone(memory_format=torch.contiguous_format)


def _qkv_bwd_shape(dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, split: list[int]) -> Any:
    total = (dq.shape[2] + dk.shape[2] + dv.shape[2]) * dq.shape[3]
    return [*dq.shape[:2], total // sum(split), sum(split)]


@define(
    "fused_qkv_rope_bwd(Tensor dq, Tensor dk, Tensor dv, Tensor q_freqs, Tensor k_freqs, "
    f"{_ATTRIBUTES}, int[] split) -> Tensor",
    fake=lambda dq, dk, dv, *_, split, **__: dq.new_empty(_qkv_bwd_shape(dq, dk, dv, split)),
)
def _qkv_rope_bwd(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, q_freqs: Any, k_freqs: Any, *,
    split: list[int], **attrs: Any,
) -> torch.Tensor:
    shape = _qkv_bwd_shape(dq, dk, dv, split)
    dq = _apply(dq, q_freqs, None, None, backward=True, **attrs)
    dk = _apply(dk, k_freqs, None, None, backward=True, **attrs)
    parts = [g.reshape(*shape[:3], width) for g, width in zip((dq, dk, dv), split, strict=True)]
    return torch.cat(parts, -1)


@binding()
def fused_qkv_rope_forward(
    qkv_input: torch.Tensor, q_freqs: torch.Tensor, k_freqs: torch.Tensor, start_positions: Any,
    qkv_split_arg_list: list[int], qkv_format: Any, interleaved: bool, cp_size: int, cp_rank: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a QKV tensor (sbhd or bshd) and rotate q and k; returns q, k, v."""
    return _qkv_rope_fwd(
        qkv_input, q_freqs, k_freqs, start_positions, fmt=_format(qkv_format),
        interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank, split=list(qkv_split_arg_list),
    )  # fmt: skip


@binding()
def fused_qkv_rope_backward(
    q_grad_out: torch.Tensor, k_grad_out: torch.Tensor, v_grad_out: torch.Tensor,
    q_freqs: torch.Tensor, k_freqs: torch.Tensor, qkv_split_arg_list: list[int], qkv_format: Any,
    interleaved: bool, cp_size: int, cp_rank: int,
) -> torch.Tensor:
    """Gradient of :func:`fused_qkv_rope_forward` with respect to the QKV tensor."""
    return _qkv_rope_bwd(
        q_grad_out, k_grad_out, v_grad_out, q_freqs, k_freqs, fmt=_format(qkv_format),
        interleaved=interleaved, cp_size=cp_size, cp_rank=cp_rank, split=list(qkv_split_arg_list),
    )  # fmt: skip
