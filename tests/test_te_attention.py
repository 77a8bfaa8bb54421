"""Fused attention of the Transformer Engine stand-in against torch's own attention."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from primus_ext.emulate.te import attention, enums, target
from primus_ext.emulate.te.attention_backend import get_fused_attn_backend

NO_BIAS = enums.NVTE_Bias_Type["NVTE_NO_BIAS"]
VANILLA = enums.NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"]


@pytest.fixture(autouse=True)
def hopper() -> None:
    target.set_target((9, 0))


class Case:
    """One attention: runs the stand-in forward and backward and a reference in fp64."""

    def __init__(
        self, *, batch: int = 2, heads: int = 4, kv_heads: int = 2, seq_q: int = 9,
        seq_kv: int = 9, dim_qk: int = 8, dim_v: int = 8, mask: str = "CAUSAL_MASK",
        window: tuple[int, int] = (-1, -1), softmax: str = "VANILLA", fmt: str = "sbhd",
        bias: bool = False, bottom_right: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.__dict__.update(locals())
        self.layout = "_".join([fmt] * 3)
        shapes = ((seq_q, heads, dim_qk), (seq_kv, kv_heads, dim_qk), (seq_kv, kv_heads, dim_v))
        self.q, self.k, self.v = (
            torch.randn(*((s, batch, h, d) if fmt == "sbhd" else (batch, s, h, d))).bfloat16()
            for s, h, d in shapes
        )
        out = (seq_q, batch, heads, dim_v) if fmt == "sbhd" else (batch, seq_q, heads, dim_v)
        self.do = torch.randn(out).bfloat16()
        self.offset = torch.randn(1, heads, 1, 1) if softmax == "LEARNABLE" else None
        self.bias = torch.randn(1, heads, seq_q, seq_kv).bfloat16() if bias else None
        self.scale = 0.7 / math.sqrt(dim_qk)

    def common(self) -> tuple:
        bias = enums.NVTE_Bias_Type["NVTE_POST_SCALE_BIAS"] if self.bias is not None else NO_BIAS
        return (bias, enums.NVTE_Mask_Type[f"NVTE_{self.mask}"],
                enums.NVTE_Softmax_Type[f"NVTE_{self.softmax}_SOFTMAX"], self.window,
                self.bottom_right)  # fmt: skip

    def run(self) -> tuple[Any, Any, Any]:
        layout = enums.NVTE_QKV_Layout[f"NVTE_{self.layout.upper()}"]
        fmt = enums.NVTE_QKV_Format[f"NVTE_{self.fmt.upper()}"]
        cu_q = torch.arange(self.batch + 1, dtype=torch.int32) * self.seq_q
        cu_kv = torch.arange(self.batch + 1, dtype=torch.int32) * self.seq_kv
        out, *aux = attention.fused_attn_fwd(
            self.seq_q, self.seq_kv, True, self.scale, 0.0, True, layout, fmt, None,
            *self.common(), cu_q, cu_kv, self.q, self.k, self.v, torch.bfloat16, None, None, None,
            None, None, None, self.bias, self.offset, None, 0, False, False,
        )  # fmt: skip
        gradients = attention.fused_attn_bwd(
            self.seq_q, self.seq_kv, self.scale, 0.0, True, layout, fmt, fmt, layout, None, None,
            *self.common(), False, cu_q, cu_kv, self.q, self.k, self.v, out, self.do,
            torch.bfloat16, aux, None, None, None, None, None, False,
        )  # fmt: skip
        return out, aux, gradients

    def visible(self) -> torch.Tensor:
        """Spelled out pair by pair, independently of the kernels."""
        seen = torch.zeros(self.seq_q, self.seq_kv, dtype=torch.bool)
        for i in range(self.seq_q):
            for j in range(self.seq_kv):
                shift = self.seq_kv - self.seq_q
                ok = True
                if self.mask == "CAUSAL_MASK":
                    ok = j <= i
                elif self.mask == "CAUSAL_BOTTOM_RIGHT_MASK":
                    ok = j <= i + shift
                at = i + (shift if self.bottom_right else 0)
                left, right = self.window
                ok &= left < 0 or j >= at - left
                ok &= right < 0 or j <= at + right
                seen[i, j] = ok
        return seen

    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Output, gradients (q, k, v, bias, sink) and log-sum-exp, fp64."""
        order = "bhsd"
        leaves = [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        q, k, v = (t.permute([self.fmt.index(c) for c in order]) for t in leaves)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = q @ k.transpose(-1, -2) * self.scale
        extra = []
        if self.bias is not None:
            extra.append(self.bias.double().requires_grad_())
            scores = scores + extra[0]
        scores = scores.masked_fill(~self.visible(), -math.inf)
        if self.softmax != "VANILLA":
            sink = torch.zeros(1, self.heads, 1, 1, dtype=torch.float64)
            if self.offset is not None:
                sink = self.offset.double().requires_grad_()
                extra.append(sink)
            column = sink.expand(self.batch, -1, self.seq_q, 1)
            scores = torch.cat([scores, column], -1)
        lse = scores.logsumexp(-1).detach()
        p = torch.softmax(scores, -1)[..., : self.seq_kv]
        out = (p @ v).permute([order.index(c) for c in self.fmt])
        out.backward(self.do.double())
        return out.detach(), [t.grad for t in leaves + extra], lse


CASES = {
    "causal_gqa": {},
    "full_bshd": {"mask": "NO_MASK", "fmt": "bshd"},
    "mha": {"kv_heads": 4},
    "mla_dims": {"dim_qk": 12, "dim_v": 8, "kv_heads": 4},
    "window": {"window": (3, 0)},
    "window_full": {"window": (2, 1), "mask": "NO_MASK"},
    "sink": {"softmax": "LEARNABLE", "window": (4, 0)},
    "off_by_one": {"softmax": "OFF_BY_ONE"},
    "bias": {"bias": True},
    "cross_top_left": {"seq_q": 5},
    "cross_bottom_right": {"seq_q": 5, "mask": "CAUSAL_BOTTOM_RIGHT_MASK", "bottom_right": True},
    "cross_window_bottom_right": {
        "seq_q": 5, "mask": "CAUSAL_BOTTOM_RIGHT_MASK", "bottom_right": True, "window": (3, 0)},
}  # fmt: skip


def close(value: torch.Tensor, expected: torch.Tensor, limit: float = 1.2e-2) -> None:
    error = (value.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error <= limit, float(error)


@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_backward(name: str) -> None:
    case = Case(**CASES[name])
    out, aux, gradients = case.run()
    expected, expected_gradients, lse = case.reference()
    assert out.shape == case.do.shape and out.dtype == torch.bfloat16
    close(out, expected)
    assert aux[0].shape == (case.batch, case.heads, case.seq_q, 1)
    torch.testing.assert_close(aux[0][..., 0].double(), lse, rtol=1e-5, atol=1e-5)
    given = [g for g in gradients if g is not None]
    if case.softmax == "OFF_BY_ONE":
        given = given[:3]  # its offset is not learnable
    for value, want in zip(given, expected_gradients, strict=True):
        close(value, want)


def test_agrees_with_scaled_dot_product_attention() -> None:
    case = Case(kv_heads=4, fmt="bshd")
    out = case.run()[0]
    q, k, v = (t.transpose(1, 2).double() for t in (case.q, case.k, case.v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=case.scale)
    close(out, expected.transpose(1, 2))


def test_packed_sequences_equal_single_ones() -> None:
    lengths, dims = [3, 6, 1], (4, 8)
    padded = [0, 4, 10, 12]  # a gap after each sequence
    cu = torch.tensor([0, 3, 9, 10], dtype=torch.int32)
    q, k, v = (torch.randn(12, *dims).bfloat16() for _ in range(3))
    layout, fmt = enums.NVTE_QKV_Layout["NVTE_THD_THD_THD"], enums.NVTE_QKV_Format["NVTE_THD"]
    mask = enums.NVTE_Mask_Type["NVTE_PADDING_CAUSAL_MASK"]
    starts = torch.tensor(padded, dtype=torch.int32)
    rule = (NO_BIAS, mask, VANILLA, (-1, 0), False)
    out, stats, rng = attention.fused_attn_fwd(
        6, 6, True, 0.3, 0.0, True, layout, fmt, None, *rule, cu, cu, q, k, v, torch.bfloat16,
        starts, starts, None, None, None, None, None, None, None, 0, False, False)  # fmt: skip
    assert stats.shape == (12, 4, 1)
    do = torch.randn(12, *dims).bfloat16()
    dq, dk, dv, _, _ = attention.fused_attn_bwd(
        6, 6, 0.3, 0.0, True, layout, fmt, fmt, layout, None, None, *rule, False, cu, cu, q, k, v,
        out, do, torch.bfloat16, [stats, rng], starts, starts, None, None, None, False)  # fmt: skip
    for start, length in zip(padded, lengths, strict=False):
        rows = slice(start, start + length)
        parts = [t[rows].double().transpose(0, 1).requires_grad_() for t in (q, k, v)]
        one = torch.nn.functional.scaled_dot_product_attention(
            *(p[None] for p in parts), is_causal=True, scale=0.3)[0]
        one.backward(do[rows].double().transpose(0, 1))
        close(out[rows], one.detach().transpose(0, 1))
        for value, part in zip((dq, dk, dv), parts, strict=True):
            # the first token's score gradient is exactly zero
            want = part.grad.transpose(0, 1)
            assert (value[rows].double() - want).abs().max() <= 2e-2
    assert not dq[3].any() and not dv[11:].any()


def test_packed_layout_gradients_share_one_buffer() -> None:
    case = Case(heads=2, kv_heads=2)
    packed = torch.stack([case.q, case.k, case.v], 2)
    case.q, case.k, case.v = packed.unbind(2)
    case.layout = "sb3hd"
    _, _, gradients = case.run()
    separate = Case(heads=2, kv_heads=2)
    expected = separate.run()[2]
    base = {g.untyped_storage().data_ptr() for g in gradients[:3]}
    assert len(base) == 1 and gradients[0].stride() == case.q.stride()
    for value, want in zip(gradients[:3], expected[:3], strict=True):
        torch.testing.assert_close(value, want)


def test_dropout_is_reproduced_in_the_backward_pass() -> None:
    case = Case(mask="NO_MASK", kv_heads=4, seq_q=32, seq_kv=32)
    layout, fmt = enums.NVTE_QKV_Layout["NVTE_SBHD_SBHD_SBHD"], enums.NVTE_QKV_Format["NVTE_SBHD"]
    cu = torch.arange(3, dtype=torch.int32) * 32

    def forward(v: torch.Tensor) -> tuple:
        return attention.fused_attn_fwd(
            32, 32, True, case.scale, 0.5, True, layout, fmt, None, *case.common(), cu, cu, case.q,
            case.k, v, torch.bfloat16, None, None, None, None, None, None, None, None, None, 0,
            False, False)  # fmt: skip

    out, *aux = forward(torch.ones_like(case.v))
    assert 0.9 < out.float().mean() < 1.1 and out.float().std() > 0.1
    dv = attention.fused_attn_bwd(
        32, 32, case.scale, 0.5, True, layout, fmt, fmt, layout, None, None, *case.common(), False,
        cu, cu, case.q, case.k, case.v, out, torch.ones_like(case.do), torch.bfloat16, aux, None,
        None, None, None, None, False)[2]  # fmt: skip
    # each output row sums the kept, rescaled probabilities; so do the columns of dv in total
    close(dv.float().sum((0, 3)), out.float().sum((0, 3)).double(), 3e-2)


def test_fake_kernel_allocates_no_scores() -> None:
    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(result):
                if isinstance(t, torch.Tensor):
                    self.largest = max(self.largest, t.numel())
            return result

    with FakeTensorMode(), Sizes() as sizes:
        case = Case(batch=1, heads=8, kv_heads=1, seq_q=2**17, seq_kv=2**17, dim_qk=128, dim_v=128)
        out, aux, gradients = case.run()
        assert out.shape == (2**17, 1, 8, 128) and aux[0].shape == (1, 8, 2**17, 1)
        assert gradients[1].shape == (2**17, 1, 1, 128)
    assert sizes.largest == 2**17 * 8 * 128


def params(**changes: Any) -> SimpleNamespace:
    """TE's ``FusedAttentionParams`` of a causal bf16 training attention."""
    base = {
        "qkv_dtype": enums.DType.kBFloat16, "is_training": True, "deterministic": False,
        "attn_mask_type": enums.NVTE_Mask_Type["NVTE_CAUSAL_MASK"], "bias_type": NO_BIAS,
        "window_size_left": -1, "window_size_right": 0, "softmax_type": VANILLA, "dropout": 0.0,
        "qkv_layout": enums.NVTE_QKV_Layout["NVTE_SBHD_SBHD_SBHD"], "num_attn_heads": 8,
        "num_gqa_groups": 2, "head_dim_qk": 128, "head_dim_v": 128, "max_seqlen_q": 4096,
        "max_seqlen_kv": 4096, "return_max_logit": False,
    }  # fmt: skip
    return SimpleNamespace(**{**base, **changes})


@pytest.mark.parametrize(
    ("capability", "changes", "fused"),
    [
        ((9, 0), {}, True),
        ((8, 0), {}, True),
        ((10, 0), {}, True),
        ((7, 5), {}, False),
        ((9, 0), {"qkv_dtype": enums.DType.kFloat32}, False),
        ((9, 0), {"head_dim_qk": 256, "head_dim_v": 256}, True),
        ((8, 0), {"head_dim_qk": 256, "head_dim_v": 256}, False),
        ((10, 0), {"head_dim_qk": 256, "head_dim_v": 256}, True),
        ((9, 0), {"head_dim_qk": 192, "head_dim_v": 128}, True),
        ((10, 0), {"head_dim_qk": 192, "head_dim_v": 128}, True),
        ((8, 0), {"head_dim_qk": 192, "head_dim_v": 128}, False),
        ((9, 0), {"head_dim_qk": 192, "head_dim_v": 160}, False),
        ((9, 0), {"window_size_left": 127}, True),
        ((9, 0), {"window_size_left": 127, "dropout": 0.1}, False),
        ((9, 0), {"head_dim_qk": 100}, False),
        ((8, 0), {"qkv_layout": enums.NVTE_QKV_Layout["NVTE_THD_THD_THD"],
                  "attn_mask_type": enums.NVTE_Mask_Type["NVTE_PADDING_CAUSAL_MASK"]}, False),
        ((9, 5), {"head_dim_qk": 192, "head_dim_v": 128}, True),
        ((9, 4), {"head_dim_qk": 256, "head_dim_v": 256, "window_size_left": 127}, True),
        ((9, 5), {"head_dim_qk": 512, "head_dim_v": 512}, False),
        ((9, 5), {"window_size_right": 5}, False),
        ((9, 4), {"qkv_layout": enums.NVTE_QKV_Layout["NVTE_SB3HD"]}, False),
        ((9, 4), {"qkv_dtype": enums.DType.kFloat32}, False),
    ],
)  # fmt: skip
def test_backend(capability: tuple[int, int], changes: dict, fused: bool) -> None:
    """Support as the comments of nvte_get_fused_attn_backend (cuDNN) and of Composable Kernel's
    filter (9.4 and 9.5 are AMD's) state it."""
    target.set_target(capability)
    backend, reason = get_fused_attn_backend(params(**changes))
    assert backend.name == ("NVTE_F16_arbitrary_seqlen" if fused else "NVTE_No_Backend")
    assert bool(reason) is not fused
