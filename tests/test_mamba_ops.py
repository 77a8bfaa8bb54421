"""The stand-ins of mamba_ssm and causal_conv1d: numbers, and what they keep for the backward."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from primus_ext.emulate.mamba import combined, conv, norm, scan
from primus_ext.emulate.session import ProgramError

BATCH, SEQ, HEADS, DIM, GROUPS, STATE, CHUNK = 2, 24, 4, 8, 2, 8, 8
WIDTH = HEADS * DIM
CHANNELS = WIDTH + 2 * GROUPS * STATE


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: properties)


def layer_inputs() -> list[torch.Tensor]:
    """zxbcdt, convolution's weight and bias, dt's bias, A and D."""
    torch.manual_seed(1)
    shapes = [(BATCH, SEQ, WIDTH + CHANNELS + HEADS), (CHANNELS, 4), (CHANNELS,), (HEADS,),
              (HEADS,), (HEADS,)]  # fmt: skip
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[4] = -torch.rand(HEADS)
    return [t.requires_grad_() for t in tensors]


def step_by_step(
    zxbcdt: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor,
    a: torch.Tensor, d: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A Mamba 2 layer as a recurrence over the steps of a sequence."""
    z, xbc, dt = torch.split(zxbcdt, [WIDTH, CHANNELS, HEADS], dim=-1)
    padded = F.pad(xbc, (0, 0, 3, 0))
    convolved = sum(padded[:, i : i + SEQ] * weight[:, i] for i in range(4)) + bias
    x, b, c = torch.split(F.silu(convolved), [WIDTH, GROUPS * STATE, GROUPS * STATE], dim=-1)
    x = x.reshape(BATCH, SEQ, HEADS, DIM)
    b, c = (t.reshape(BATCH, SEQ, GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 2)
            for t in (b, c))  # fmt: skip
    dt = F.softplus(dt + dt_bias)
    state = torch.zeros(BATCH, HEADS, DIM, STATE)
    rows = []
    for step in range(SEQ):
        decay = torch.exp(dt[:, step] * a)[..., None, None]
        added = (dt[:, step][..., None] * x[:, step])[..., None] * b[:, step][:, :, None]
        state = state * decay + added
        rows.append((state * c[:, step][:, :, None]).sum(-1) + d[:, None] * x[:, step])
    out = torch.stack(rows, dim=1) * F.silu(z.reshape(BATCH, SEQ, HEADS, DIM))
    return out.reshape(BATCH, SEQ, WIDTH)


def fused(*inputs: Any) -> torch.Tensor:
    zxbcdt, weight, bias, dt_bias, a, d = inputs
    return combined.mamba_split_conv1d_scan_combined(
        zxbcdt, weight, bias, dt_bias, a, d, CHUNK, headdim=DIM, ngroups=GROUPS
    )


def apart(
    zxbcdt: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor,
    a: torch.Tensor, d: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Convolution and scan as two calls."""
    z, xbc, dt = torch.split(zxbcdt, [WIDTH, CHANNELS, HEADS], dim=-1)
    convolved = conv.causal_conv1d_fn(xbc.transpose(1, 2), weight, bias, activation="silu")
    x, b, c = torch.split(convolved.transpose(1, 2), [WIDTH, GROUPS * STATE, GROUPS * STATE], -1)
    return combined.mamba_chunk_scan_combined(
        x.unflatten(-1, (HEADS, DIM)), dt, a, b.unflatten(-1, (GROUPS, STATE)),
        c.unflatten(-1, (GROUPS, STATE)), CHUNK, D=d, z=z.unflatten(-1, (HEADS, DIM)),
        dt_bias=dt_bias, dt_softplus=True,
    ).flatten(2)  # fmt: skip


@pytest.mark.parametrize("layer", [fused, apart])
def test_layer_is_the_recurrence(layer: Callable[..., torch.Tensor]) -> None:
    inputs = layer_inputs()
    ours, theirs = layer(*inputs), step_by_step(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(ours)
    for one, two in zip(torch.autograd.grad(ours, inputs, grad),
                        torch.autograd.grad(theirs, inputs, grad), strict=True):  # fmt: skip
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_fused_layer_keeps_its_input_and_its_result_before_the_gate() -> None:
    inputs = layer_inputs()
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(*inputs)
    assert sum(kept) == sum(t.numel() for t in inputs) + BATCH * SEQ * WIDTH


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_gated_norm(gated: bool, before: bool) -> None:
    torch.manual_seed(2)
    module = norm.RMSNorm(32, group_size=8, norm_before_gate=before)
    x, z = (torch.randn(3, 5, 32, requires_grad=True) for _ in range(2))
    weight = torch.nn.Parameter(torch.randn(32))
    module.weight = weight
    value = x if before or not gated else x * F.silu(z)
    groups = value.view(3, 5, 4, 8)
    expected = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 5, 32)
    expected = expected * weight * (F.silu(z) if before and gated else 1)
    ours = module(x, z if gated else None)
    torch.testing.assert_close(ours, expected)
    leaves = [x, weight, *([z] if gated else [])]
    grad = torch.randn_like(ours)
    for one, two in zip(torch.autograd.grad(ours, leaves, grad),
                        torch.autograd.grad(expected, leaves, grad), strict=True):  # fmt: skip
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_flops_are_those_of_the_chunks() -> None:
    x, b = torch.empty(BATCH, SEQ, HEADS, DIM), torch.empty(BATCH, SEQ, GROUPS, STATE)
    size = scan.Sizes(x, b, CHUNK)
    chunks = BATCH * SEQ // CHUNK
    states = 2 * CHUNK * DIM * STATE * HEADS
    inside = 2 * (CHUNK * (CHUNK + 1) // 2) * DIM * HEADS
    scores = 2 * CHUNK * CHUNK * STATE * GROUPS
    assert size.flops(2, 1, 1) == chunks * (2 * states + inside + scores)


def test_what_training_does_not_use_is_refused() -> None:
    zxbcdt, weight, bias, dt_bias, a, d = layer_inputs()
    with pytest.raises(ProgramError, match="packed_sequences of mamba_ssm's scan"):
        combined.mamba_split_conv1d_scan_combined(
            zxbcdt, weight, bias, dt_bias, a, d, CHUNK, headdim=DIM, ngroups=GROUPS,
            seq_idx=torch.zeros(BATCH, SEQ),
        )  # fmt: skip
    with pytest.raises(ProgramError, match="carried states of causal_conv1d"):
        conv.causal_conv1d_fn(
            torch.empty(1, 8, 8), torch.empty(8, 4), initial_states=torch.empty(1, 8, 3)
        )
