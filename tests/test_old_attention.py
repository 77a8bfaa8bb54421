"""Kernels before FlashAttention: one for dropout, one for a masked softmax, no score read first."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from primus_ext.emulate import shims_torch
from primus_ext.frameworks.megatron import before_flash
from primus_ext.observe import classify
from primus_ext.trace import Op

PLACE = "transformer_engine.pytorch.attention.dot_product_attention"


def shimmed() -> Any:
    """torch.nn.functional with the dropout of a CUDA device."""
    module = types.SimpleNamespace(dropout=F.dropout)
    shims_torch._dropout(module)
    return module.dropout


def test_dropout_keeps_a_mask_of_one_byte_and_scales_what_stays() -> None:
    dropout = shimmed()
    x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = dropout(x, 0.25)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.bool, x.numel())]
    assert set(y.detach().unique().tolist()) == {0.0, 1 / 0.75}
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())
    assert abs((y == 0).double().mean() - 0.25) < 0.05  # 4,096 draws: seven deviations


@pytest.mark.parametrize(
    ("p", "training"), [(0.0, True), (1.0, True), (0.5, False)], ids=["none", "all", "evaluation"]
)
def test_dropout_that_draws_nothing_is_torchs(p: float, training: bool) -> None:
    x = torch.arange(4.0)
    assert torch.equal(shimmed()(x, p, training), F.dropout(x, p, training))


def op(func: Any, *args: Any, **kwargs: Any) -> Op:
    """The op behind a call."""
    found = classify.classify(func, args, kwargs, [func(*args, **kwargs)], None)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_product_with_beta_0_does_not_read_what_it_replaces() -> None:
    a, b, c = torch.ones(4, 8, 16), torch.ones(4, 16, 32), torch.ones(4, 8, 32)
    func = torch.ops.aten.baddbmm.default
    moved = 4 * (a.numel() + b.numel() + c.numel())
    assert op(func, c, a, b, beta=0, alpha=2).bytes == moved
    assert op(func, c, a, b).bytes == moved + 4 * c.numel()
    assert op(func, c, a, b, beta=0).flops == 2 * 4 * 8 * 16 * 32


class Kernel:
    """An operator as torch dispatches it."""

    namespace = "te_softmax"
    _schema = types.SimpleNamespace(name="te_softmax::scaled_upper_triang_masked_softmax_fwd")


def test_the_causal_softmax_reads_half() -> None:
    scores = torch.ones(2, 8, 8)
    found = classify.classify(Kernel(), (scores, 1.0), {}, [scores], None)  # type: ignore[arg-type]
    assert found is not None and found.bytes == 4 * scores.numel() * 3 // 2


class Softmax:
    """A stand-in of FusedScaleMaskSoftmax."""

    attn_mask_type = "causal"

    def forward_fused_softmax(self, inp: Any, mask: Any, scale: float | None = None) -> Any:
        return "another kernel"


def test_no_mask_is_built_and_the_softmax_is_that_of_the_upper_triangle() -> None:
    called: list[tuple[tuple[int, ...], float]] = []

    def kernel(scores: torch.Tensor, scale: float) -> torch.Tensor:
        called.append((tuple(scores.shape), scale))
        return scores

    names = types.SimpleNamespace(scaled_upper_triang_masked_softmax_fwd=kernel)
    ops = types.SimpleNamespace(te_softmax=names)
    module = types.SimpleNamespace(
        torch=types.SimpleNamespace(ops=ops), FusedScaleMaskSoftmax=Softmax,
        get_full_mask=lambda *_args, **_named: "a mask",
    )  # fmt: skip
    before_flash._no_mask(module)
    before_flash._upper_triangle(module)
    build = module.get_full_mask
    assert build(8, 8, attn_mask_type="causal", attention_mask=None) == ("causal", *[None] * 3)
    assert build(8, 8, attn_mask_type="padding", attention_mask=None) == "a mask"
    scores, softmax = torch.ones(2, 3, 8, 8), Softmax()
    assert softmax.forward_fused_softmax(scores, None).shape == scores.shape
    assert called == [((6, 8, 8), 1.0)]
    assert softmax.forward_fused_softmax(scores, scores) == "another kernel"
    softmax.attn_mask_type = "padding"
    assert softmax.forward_fused_softmax(scores, None) == "another kernel"


@pytest.mark.parametrize("name", [
    "megatron", "megatron.before_flash", "megatron.deepspeed", "megatron.moe_2025",
    "megatron.te_2024", "megatron.te_loss", "megatron.torchtitan_blocks",
    "megatron.torchtitan_eager_blocks", "megatron.torchtitan_loss",
])  # fmt: skip
def test_every_framework_takes_the_request_it_is_hooked_for(name: str) -> None:
    """As ``emulate/bootstrap.py`` calls them all."""
    install = importlib.import_module(f"primus_ext.frameworks.{name}").install
    inspect.signature(install).bind({"device": {}})
