"""Stand-in of flash-attn 2 below Transformer Engine, for ``attention_backend=flash``.

Shapes: q ``[batch, seq, heads, dim]``, k and v with their own sequence length and heads.  Saved
tensors follow ``flash_attn/flash_attn_interface.py`` of Dao-AILab/flash-attention 2.8; what its
kernels allocate follows ``csrc/flash_attn/flash_api.cpp`` there (``mha_fwd``, ``mha_bwd``): q, k,
v, the result, its log-sum-exp (fp32) and a random state are kept; a backward takes fp32 sums for
the gradient of q and, with grouped queries, gradients of k and v for every query head.  Sequences
are long enough for the forward not to be split over the keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError

GROUP = "flash_attention"
VERSION = "2.8.3"
_BLOCK = 128  # sequence lengths are rounded up to it

_library = torch.library.Library("primus_flash", "DEF")
_SIZES = ("int batch, int heads, int kv_heads, int seq_q, int seq_kv, int dim_qk, int dim_v, "
          "bool causal, int[2] window, float scale, float dropout")  # fmt: skip
_library.define(
    f"fused_attn_fwd(Tensor q, Tensor k, Tensor v, *, {_SIZES}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "fused_attn_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor rng, "
    f"Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)[] workspace, *, {_SIZES}) -> ()"
)


def _weights(q: torch.Tensor, k: torch.Tensor, attrs: dict[str, Any]) -> torch.Tensor:
    """Scaled and masked scores ``[batch, heads, seq_q, seq_kv]``, aligned at the bottom right."""
    if attrs["dropout"]:
        raise NotImplementedError("dropout of flash-attn's stand-in has no values")
    k = k.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * attrs["scale"]
    rows = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    columns = torch.arange(k.shape[1])[None]
    left, right = attrs["window"]
    right = 0 if attrs["causal"] else right
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    hidden |= (columns > rows + right) if right >= 0 else False
    hidden |= (columns < rows - left) if left >= 0 else False
    return scores.masked_fill(hidden, -math.inf)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **attrs: Any) -> Any:
    scores = _weights(q, k, attrs)
    v = v.float().repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.empty_like(q)
    out.copy_(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))
    return out, scores.logsumexp(-1), torch.zeros(2, dtype=torch.int64)


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **attrs: Any) -> Any:
    stats = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), stats, q.new_empty(2, dtype=torch.int64)


def _backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, rng: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    workspace: Any, **attrs: Any,
) -> None:  # fmt: skip
    share = (_weights(q, k, attrs) - lse[..., None]).exp()
    ratio = q.shape[2] // k.shape[2]
    wide_k, wide_v = (t.float().repeat_interleave(ratio, dim=2) for t in (k, v))
    inner = torch.einsum("bqhd,bkhd->bhqk", do.float(), wide_v)
    outer = (do.float() * o.float()).sum(-1).transpose(1, 2)[..., None]
    dscores = share * (inner - outer) * attrs["scale"]
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", dscores, wide_k))
    for into, grad in (
        (dk, torch.einsum("bhqk,bqhd->bkhd", dscores, q.float())),
        (dv, torch.einsum("bhqk,bqhd->bkhd", share, do.float())),
    ):
        into.copy_(grad.unflatten(2, (-1, ratio)).sum(3))


_library.impl("fused_attn_fwd", _forward, "CPU")
_library.impl("fused_attn_bwd", _backward, "CPU")
torch.library.register_fake("primus_flash::fused_attn_fwd", _forward_fake, lib=_library)
torch.library.register_fake(
    "primus_flash::fused_attn_bwd", lambda *_args, **_kwargs: None, lib=_library
)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class FlashAttnFunc(torch.autograd.Function):
    """Attention under autograd."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, dropout: float, scale: float, causal: bool,
                window: tuple[int, int]) -> torch.Tensor:  # fmt: skip
        """The result; what the backward needs is saved."""
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        ctx.attrs = {
            "batch": q.shape[0], "heads": q.shape[2], "kv_heads": k.shape[2],
            "seq_q": q.shape[1], "seq_kv": k.shape[1], "dim_qk": q.shape[3], "dim_v": v.shape[3],
            "causal": causal, "window": list(window), "scale": scale, "dropout": dropout,
        }  # fmt: skip
        out, lse, rng = torch.ops.primus_flash.fused_attn_fwd(q, k, v, **ctx.attrs)
        ctx.save_for_backward(q, k, v, out, lse, rng)
        return out

    @staticmethod
    def backward(ctx: Any, do: Any) -> tuple:  # type: ignore[override]
        """Gradients of q, k and v."""
        q, k, v, out, lse, rng = ctx.saved_tensors
        do = do if do.stride(-1) == 1 else do.contiguous()
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        batch, seq, heads, dim = q.shape
        rows, width = _rounded(seq, _BLOCK), _rounded(dim, 32 if dim <= 128 else 64)
        workspace = [
            torch.empty((batch, heads, rows), dtype=torch.float32),
            torch.empty((batch, rows, heads, width), dtype=torch.float32),
        ]
        if k.shape[2] != heads:
            wide = (batch, k.shape[1], heads, dim)
            workspace += [torch.empty(wide, dtype=q.dtype) for _ in ("dk", "dv")]
        torch.ops.primus_flash.fused_attn_bwd(
            do, q, k, v, out, lse, rng, dq, dk, dv, workspace, **ctx.attrs
        )
        return dq, dk, dv, None, None, None, None


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``flash_attn.flash_attn_func``.

    Raises:
        ProgramError: an argument is given whose kernels have no stand-in.
    """
    for name, value in (("softcap", softcap), ("alibi_slopes", alibi_slopes),
                        ("deterministic", deterministic),
                        ("return_attn_probs", return_attn_probs),
                        ("head_dim % 8", q.shape[-1] % 8)):  # fmt: skip
        if value is not None and value:
            raise ProgramError(
                f"{name}={value} of flash-attn can't be projected by this version; legal: unset"
            )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    return FlashAttnFunc.apply(q, k, v, dropout_p, scale, causal, (left, right))


def _refuse(*_args: Any, **_kwargs: Any) -> None:
    raise ProgramError(
        "attention_backend=flash with packed sequences or context_parallel_size > 1 can't be "
        "projected by this version; legal: attention_backend=fused"
    )


@patch("transformer_engine.pytorch.attention.dot_product_attention.backends",
       "flash_attn_func", "flash_attn_varlen_func", "_flash_attn_fwd", "_flash_attn_bwd",
       "fa_utils.set_flash_attention_version", group=GROUP, versions="transformer-engine 2.20",
       reason="flash-attn's kernels need a GPU; it is put in only where the program asks for it")
def _flash_attention(module: Any) -> None:
    from packaging.version import Version

    module.fa_utils.version = Version(VERSION)
    module.fa_utils.set_flash_attention_version()
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = _refuse
    module._flash_attn_fwd = module._flash_attn_bwd = _refuse
