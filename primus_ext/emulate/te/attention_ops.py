"""Operators of fused attention (cuDNN's F16 arbitrary-seqlen kernels), forward and backward.

Saved statistics have the shapes of ``fused_attn_f16_arbitrary_seqlen.cu`` (Transformer Engine
2.20): log-sum-exp ``[batch, heads, seq_q, 1]``, or ``[tokens, heads, 1]`` for packed sequences, in
fp32, and a ``[2]`` int64 random state.  cuDNN's workspaces are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from primus_ext.emulate.te import attention_math
from primus_ext.emulate.te.attention_layout import (
    convert_shape,
    formats,
    to_bhsd,
)
from primus_ext.emulate.te.attention_math import Rule
from primus_ext.emulate.te.ops import define
from primus_ext.emulate.te.target import target

_SEQUENCES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? cu_seqlens_q_padded, "
    "Tensor? cu_seqlens_kv_padded"
)
_ATTRIBUTES = (
    "str qkv_layout, str o_format, str mask, str bias_type, str softmax_type, int[] window, "
    "bool bottom_right, bool causal, float scale, float dropout, int batch, int heads, "
    "int kv_heads, int seq_q, int seq_kv, int dim_qk, int dim_v"
)


def ragged_statistics(fmt: str) -> bool:
    """Whether the statistics are stored token by token (cuDNN >= 9.6, not on sm120)."""
    return fmt == "thd" and target().sm_arch != 120


def _stats_shape(q: torch.Tensor, attrs: dict[str, Any]) -> list[int]:
    if ragged_statistics(formats(attrs["qkv_layout"])[0]):
        return [q.shape[0], attrs["heads"], 1]
    return [attrs["batch"], attrs["heads"], attrs["seq_q"], 1]


def _forward_fake(
    q: torch.Tensor, k: Any, v: Any, bias: Any, softmax_offset: Any, cu_q: Any, cu_kv: Any,
    cu_q_padded: Any, cu_kv_padded: Any, *, max_logit: bool, training: bool, **attrs: Any,
) -> Any:
    shape = convert_shape(
        [*q.shape[:-1], attrs["dim_v"]], formats(attrs["qkv_layout"])[0], attrs["o_format"])
    stats = q.new_empty(_stats_shape(q, attrs), dtype=torch.float32)
    maximum = torch.empty_like(stats) if max_logit else None
    return q.new_empty(shape), stats, maximum, q.new_empty((2,), dtype=torch.int64)


class _Sequences:
    """Iterates the sequences of a batch as (heads, seq, dim) blocks, in every format."""

    def __init__(self, attrs: dict[str, Any], cu_q: Any, cu_kv: Any, q_pad: Any, kv_pad: Any):
        self.attrs = attrs
        self.q_format, self.kv_format = formats(attrs["qkv_layout"])
        self.lengths = [(cu[1:] - cu[:-1]).tolist() for cu in (cu_q, cu_kv)]
        starts = [cu_q if q_pad is None else q_pad, cu_kv if kv_pad is None else kv_pad]
        self.starts = [s.tolist() for s in starts]

    def bounds(self, index: int, side: int) -> tuple[int, int]:
        """First position and length of sequence ``index``; side 0 is the query."""
        fmt = (self.q_format, self.kv_format)[side]
        if fmt == "thd":
            return self.starts[side][index], self.lengths[side][index]
        whole = self.attrs["seq_q" if side == 0 else "seq_kv"]
        return 0, self.lengths[side][index] if "padding" in self.attrs["mask"] else whole

    def block(self, tensor: torch.Tensor, index: int, side: int, fmt: str = "") -> torch.Tensor:
        """The view (heads, length, dim) of sequence ``index``."""
        fmt = fmt or (self.q_format, self.kv_format)[side]
        start, length = self.bounds(index, side)
        if fmt == "thd":
            return tensor[start : start + length].transpose(0, 1)
        return to_bhsd(tensor, fmt)[index, :, :length]

    def statistic(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The view (heads, length) of a saved statistic."""
        start, length = self.bounds(index, 0)
        if tensor.dim() == 3:
            return tensor[start : start + length, :, 0].transpose(0, 1)
        return tensor[index, :, :length, 0]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.attrs["batch"]))


def _bias(bias: Any, index: int, heads: int, lengths: tuple[int, int]) -> Any:
    if bias is None:
        return None
    one = bias[index if bias.shape[0] > 1 else 0].float()
    seq_q = slice(None) if one.shape[1] == 1 else slice(lengths[0])
    return one.expand(heads, -1, -1)[:, seq_q, : lengths[1]]


def _generator(rng_state: torch.Tensor, dropout: float) -> torch.Generator | None:
    if dropout == 0.0:
        return None
    generator = torch.Generator()
    generator.manual_seed(int(rng_state[0]))
    return generator


def _random_state(dropout: float) -> torch.Tensor:
    """Seed and offset; without dropout the generator is left alone."""
    if dropout == 0.0:
        return torch.tensor([torch.default_generator.initial_seed() % 2**63, 0])
    return torch.cat([torch.randint(2**62, (1,)), torch.zeros(1, dtype=torch.int64)])


@define(
    "fused_attn_fwd(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? softmax_offset, "
    f"{_SEQUENCES}, *, {_ATTRIBUTES}, bool max_logit, bool training)"
    " -> (Tensor, Tensor, Tensor?, Tensor)",
    fake=_forward_fake,
)
def fused_attn_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, softmax_offset: Any, cu_q: Any,
    cu_kv: Any, cu_q_padded: Any, cu_kv_padded: Any, *, max_logit: bool, training: bool,
    **attrs: Any,
) -> Any:
    """Output, log-sum-exp, maximum (only with ``max_logit``) and random state."""
    rule, sequences = Rule.of(attrs), _Sequences(attrs, cu_q, cu_kv, cu_q_padded, cu_kv_padded)
    rng_state = _random_state(attrs["dropout"])
    rng = _generator(rng_state, attrs["dropout"])
    offset = None if softmax_offset is None else softmax_offset.reshape(-1).float()
    o_format = attrs["o_format"]
    shape = convert_shape([*q.shape[:-1], attrs["dim_v"]], sequences.q_format, o_format)
    out = q.new_zeros(shape)
    stats = q.new_zeros(_stats_shape(q, attrs), dtype=torch.float32)
    maximum = torch.full_like(stats, -torch.inf) if max_logit else None
    for i in sequences:
        blocks = [sequences.block(t, i, side).float() for t, side in ((q, 0), (k, 1), (v, 1))]
        lengths = (blocks[0].shape[1], blocks[1].shape[1])
        one_bias = _bias(bias, i, attrs["heads"], lengths)
        query, key, value = blocks
        o, lse, top = attention_math.forward(query, key, value, one_bias, offset, rule, rng)
        sequences.block(out, i, 0, o_format).copy_(o)
        sequences.statistic(stats, i).copy_(lse)
        if maximum is not None:
            sequences.statistic(maximum, i).copy_(top)
    return out, stats, maximum, rng_state


_BACKWARD_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor o, Tensor do, Tensor stats, Tensor rng_state, "
    f"Tensor? bias, Tensor? softmax_offset, {_SEQUENCES}"
)
_BACKWARD_ATTRIBUTES = f"{_ATTRIBUTES}, str do_format, str dqkv_layout, bool deterministic"


def _small_gradients(q: torch.Tensor, bias: Any, attrs: dict[str, Any]) -> Any:
    dbias = doffset = None
    if attrs["bias_type"] in ("pre_scale_bias", "post_scale_bias"):
        dbias = torch.empty_like(bias, dtype=q.dtype)
    if attrs["softmax_type"] != "vanilla":
        doffset = q.new_empty((1, attrs["heads"], 1, 1), dtype=torch.float32)
    return dbias, doffset


def _gradient_shapes(q: Any, k: Any, v: Any, attrs: dict[str, Any]) -> tuple[list[int], ...]:
    source, to = formats(attrs["qkv_layout"]), formats(attrs["dqkv_layout"])
    return tuple(
        convert_shape(list(t.shape), source[side], to[side]) for t, side in ((q, 0), (k, 1), (v, 1))
    )


def _backward_fake(
    q: Any, k: Any, v: Any, o: Any, do: Any, stats: Any, rng_state: Any, bias: Any,
    softmax_offset: Any, cu_q: Any, cu_kv: Any, cu_q_padded: Any, cu_kv_padded: Any, **attrs: Any,
) -> Any:
    gradients = (q.new_empty(shape, dtype=q.dtype) for shape in _gradient_shapes(q, k, v, attrs))
    return (*gradients, *_small_gradients(q, bias, attrs))


def _backward_out_fake(
    q: Any, k: Any, v: Any, o: Any, do: Any, stats: Any, rng_state: Any, bias: Any,
    softmax_offset: Any, cu_q: Any, cu_kv: Any, cu_q_padded: Any, cu_kv_padded: Any, dq: Any,
    dk: Any, dv: Any, **attrs: Any,
) -> Any:
    return _small_gradients(q, bias, attrs)


@define(
    f"fused_attn_bwd.out({_BACKWARD_INPUTS}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, *, "
    f"{_BACKWARD_ATTRIBUTES}) -> (Tensor?, Tensor?)",
    fake=_backward_out_fake,
)
def fused_attn_bwd_out(
    q: Any, k: Any, v: Any, o: Any, do: Any, stats: Any, rng_state: Any, bias: Any,
    softmax_offset: Any, cu_q: Any, cu_kv: Any, cu_q_padded: Any, cu_kv_padded: Any, dq: Any,
    dk: Any, dv: Any, **attrs: Any,
) -> Any:
    """Gradients into ``dq``, ``dk``, ``dv``; returns those of bias and softmax offset."""
    rule, sequences = Rule.of(attrs), _Sequences(attrs, cu_q, cu_kv, cu_q_padded, cu_kv_padded)
    rng = _generator(rng_state, attrs["dropout"])
    offset = None if softmax_offset is None else softmax_offset.reshape(-1).float()
    dbias, doffset = _small_gradients(q, bias, attrs)
    for small in (dbias, doffset):
        if small is not None:
            small.zero_()
    to = formats(attrs["dqkv_layout"])
    for gradient in (dq, dk, dv):
        gradient.zero_()
    for i in sequences:
        blocks = [sequences.block(t, i, side).float() for t, side in ((q, 0), (k, 1), (v, 1))]
        query, key, value = blocks
        output = sequences.block(o, i, 0, attrs["o_format"]).float()
        upstream = sequences.block(do, i, 0, attrs["do_format"]).float()
        lengths = (blocks[0].shape[1], blocks[1].shape[1])
        one_bias = _bias(bias, i, attrs["heads"], lengths)
        gradients = attention_math.backward(
            query, key, value, output, upstream, sequences.statistic(stats, i), one_bias, offset,
            rule, rng,
        )  # fmt: skip
        for gradient, part, side in zip((dq, dk, dv), gradients[:3], (0, 1, 1), strict=True):
            sequences.block(gradient, i, side, to[side]).copy_(part)
        if dbias is not None:
            _add_bias_gradient(dbias, gradients[3], i)
        if doffset is not None and gradients[4] is not None:
            doffset += gradients[4].reshape(doffset.shape)
    return dbias, doffset


def _add_bias_gradient(dbias: torch.Tensor, value: torch.Tensor, index: int) -> None:
    """Add (heads, seq_q, seq_kv) to the gradient, summed over the dimensions that broadcast."""
    into = dbias[index if dbias.shape[0] > 1 else 0]
    if into.shape[0] == 1:
        value = value.sum(0, keepdim=True)
    if into.shape[1] == 1:
        value = value.sum(1, keepdim=True)
    into[:, : value.shape[1], : value.shape[2]] += value.to(dbias.dtype)


@define(
    f"fused_attn_bwd({_BACKWARD_INPUTS}, *, {_BACKWARD_ATTRIBUTES})"
    " -> (Tensor, Tensor, Tensor, Tensor?, Tensor?)",
    fake=_backward_fake,
)
def fused_attn_bwd(
    q: Any, k: Any, v: Any, o: Any, do: Any, stats: Any, rng_state: Any, bias: Any,
    softmax_offset: Any, *sequences: Any, **attrs: Any,
) -> Any:
    """Gradients of query, key, value, bias and softmax offset."""
    gradients = [q.new_empty(shape) for shape in _gradient_shapes(q, k, v, attrs)]
    small = torch.ops.primus_te.fused_attn_bwd.out(
        q, k, v, o, do, stats, rng_state, bias, softmax_offset, *sequences, *gradients, **attrs)
    return (*gradients, *small)

