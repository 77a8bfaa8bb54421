"""The stand-in of flash-attn 2 computes attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from primus_ext.emulate.flash_attention import flash_attn_func
from primus_ext.emulate.session import ProgramError


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(12, 12), (4, 12)])
@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)),
                                                (True, (3, 0))])  # fmt: skip
def test_result_and_gradients(
    seq_q: int, seq_kv: int, causal: bool, window: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, seq_q, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, seq_kv, 2, 8, requires_grad=True) for _ in range(2))
    rows = torch.arange(seq_q)[:, None] + seq_kv - seq_q
    columns = torch.arange(seq_kv)[None]
    seen = (columns <= rows) | (not causal)
    if window[0] >= 0:
        seen = seen & (columns >= rows - window[0])
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    ours = flash_attn_func(q, k, v, causal=causal, window_size=window)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    for one, two in zip(torch.autograd.grad(ours, (q, k, v), grad),
                        torch.autograd.grad(expected, (q, k, v), grad), strict=True):  # fmt: skip
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_what_has_no_stand_in_is_refused() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ProgramError, match="softcap=1.0 of flash-attn"):
        flash_attn_func(q, q, q, softcap=1.0)
