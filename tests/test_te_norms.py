"""RMSNorm and LayerNorm of the Transformer Engine stand-in against torch autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from primus_ext.emulate.te.enums import DType
from primus_ext.emulate.te.norms import (
    layernorm_bwd,
    layernorm_fwd,
    rmsnorm_bwd,
    rmsnorm_bwd_add,
    rmsnorm_fwd,
)

EPS = 1e-5


def reference(x: Any, gamma: Any, beta: Any, centered: bool) -> torch.Tensor:
    scale = gamma + 1 if centered else gamma
    shape = (x.shape[-1],)
    if beta is None:
        return torch.nn.functional.rms_norm(x, shape, scale, EPS)
    return torch.nn.functional.layer_norm(x, shape, scale, beta, EPS)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_forward_and_backward(layer_norm: bool, centered: bool) -> None:
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    gamma = torch.randn(16, dtype=torch.float64, requires_grad=True)
    beta = torch.randn(16, dtype=torch.float64, requires_grad=True) if layer_norm else None
    upstream = torch.randn(3, 5, 16)
    expected = reference(x, gamma, beta, centered)
    expected.backward(upstream.double())
    x32, gamma32 = x.detach().float(), gamma.detach().float()
    if beta is not None:
        y, mu, rsigma = layernorm_fwd(
            x32, gamma32, beta.detach().float(), EPS, None, None, DType.kFloat32, 0, centered)
        gradients = layernorm_bwd(upstream, x32, mu, rsigma, gamma32, 0, centered)
        assert mu.shape == (15,)
    else:
        y, mu, rsigma = rmsnorm_fwd(x32, gamma32, EPS, None, None, DType.kFloat32, 0, centered)
        gradients = rmsnorm_bwd(upstream, x32, rsigma, gamma32, 0, centered)
        assert mu is None
    assert rsigma.shape == (15,) and rsigma.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    leaves = [t for t in (x, gamma, beta) if t is not None]
    for value, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(value.double(), leaf.grad, rtol=2e-5, atol=2e-5)


def test_output_type_and_given_output() -> None:
    x, gamma = torch.randn(4, 8).bfloat16(), torch.ones(8).bfloat16()
    y, _, rsigma = rmsnorm_fwd(x, gamma, EPS, None, None, DType.kFloat32, 0, False)
    assert y.dtype == torch.float32
    into = torch.empty(4, 8)
    z, _, again = rmsnorm_fwd(x, gamma, EPS, into, None, DType.kFloat32, 0, False)
    assert z is into and torch.equal(z, y) and torch.equal(rsigma, again)


def test_residual_gradient_is_added() -> None:
    x, gamma, dz, add = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8), torch.randn(4, 8)
    rsigma = rmsnorm_fwd(x, gamma, EPS, None, None, DType.kFloat32, 0, False)[2]
    dx, dgamma = rmsnorm_bwd(dz, x, rsigma, gamma, 0, False)
    fused, dgamma2 = rmsnorm_bwd_add(dz, x, add, rsigma, gamma, 0, False)
    torch.testing.assert_close(fused, dx + add)
    assert torch.equal(dgamma, dgamma2)
