"""Multi-tensor optimizer kernels of the stand-in against torch's optimizers."""

from __future__ import annotations

import pytest
import torch

from primus_ext.emulate.te import enums, multi_tensor, recipe

NOOP = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_equals_torch(decoupled: bool) -> None:
    shapes = [(3, 4), (7,)]
    parameters = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind(parameters, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.05)
    ours = [p.detach().clone() for p in parameters]
    m, v = [torch.zeros_like(p) for p in ours], [torch.zeros_like(p) for p in ours]
    for step in (1, 2, 3):
        grads = [torch.randn_like(p) for p in ours]
        for p, g in zip(parameters, grads, strict=True):
            p.grad = g.clone()
        reference.step()
        multi_tensor.multi_tensor_adam(
            2048, NOOP, [grads, ours, m, v], 0.1, 0.8, 0.9, 1e-6, step, int(decoupled), 1, 0.05)
    for p, want in zip(ours, parameters, strict=True):
        torch.testing.assert_close(p, want.detach(), rtol=1e-5, atol=1e-6)


def test_masters_and_remainders_hold_the_same_fp32_weights() -> None:
    start = torch.randn(257)
    param, low = torch.empty(257).bfloat16(), torch.empty(257, dtype=torch.int16)
    multi_tensor._split(start, param, low)
    assert torch.equal(multi_tensor._join(param, low), start)
    master, m, v = start.clone(), torch.zeros(257), torch.zeros(257)
    m2, v2 = torch.zeros(257), torch.zeros(257)
    whole = start.bfloat16()
    for step in (1, 2):
        grad = torch.randn(257)
        multi_tensor.multi_tensor_adam(
            2048, NOOP, [[grad], [whole], [m], [v], [master]], 0.01, 0.9, 0.95, 1e-8, step, 1, 1,
            0.1)
        multi_tensor.multi_tensor_adam_param_remainder(
            2048, NOOP, [[grad], [param], [m2], [v2], [low]], 0.01, 0.9, 0.95, 1e-8, step, 1, 1,
            0.1)
    assert torch.equal(multi_tensor._join(param, low), master)
    assert (param.float() - whole.float()).abs().max() <= 2**-8 * master.abs().max()


def test_capturable_adam_unscales_and_skips() -> None:
    p, m, v = torch.ones(4), torch.zeros(4), torch.zeros(4)
    grad, half = torch.full((4,), 6.0), torch.tensor([0.5])
    arguments = (0.9, 0.99, 1e-8, torch.tensor([1]), 1, 1, 0.0, half)
    multi_tensor.multi_tensor_adam_capturable(
        2048, torch.ones(1, dtype=torch.int32), [[grad], [p], [m], [v]], torch.tensor(0.1),
        *arguments)
    assert torch.equal(p, torch.ones(4))
    multi_tensor.multi_tensor_adam_capturable(
        2048, NOOP, [[grad], [p], [m], [v]], torch.tensor(0.1), *arguments)
    assert torch.allclose(p, torch.full((4,), 0.9)) and torch.equal(grad, torch.full((4,), 3.0))


def test_sgd_equals_torch() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    reference = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    ours, momentum = parameter.detach().clone(), torch.zeros(5)
    for step in range(3):
        grad = torch.randn(5)
        parameter.grad = grad.clone()
        reference.step()
        multi_tensor.multi_tensor_sgd(
            2048, NOOP, [[grad], [ours], [momentum]], 0.01, 0.9, 0.0, 0.1, True, step == 0, False,
            1.0)
    torch.testing.assert_close(ours, parameter.detach())


def test_norms_and_scaling() -> None:
    tensors = [torch.randn(3, 4), torch.randn(5).bfloat16()]
    total, each = multi_tensor.multi_tensor_l2norm(2048, NOOP, [tensors], True)
    norms = torch.stack([t.float().norm() for t in tensors])
    torch.testing.assert_close(each, norms)
    torch.testing.assert_close(total[0], norms.norm())
    half = torch.tensor([0.5])
    scaled, none = multi_tensor.multi_tensor_unscale_l2norm(2048, NOOP, [tensors], half)
    torch.testing.assert_close(scaled, total / 2)
    assert none.numel() == 0
    out = [torch.empty(3, 4), torch.empty(5)]
    flag = torch.zeros(1, dtype=torch.int32)
    multi_tensor.multi_tensor_scale(2048, flag, [tensors, out], 3.0)
    torch.testing.assert_close(out[0], 3 * tensors[0])
    assert int(flag) == 0
    tensors[0][0, 0] = float("inf")
    multi_tensor.multi_tensor_scale_tensor(2048, flag, [tensors, out], torch.tensor(2.0))
    assert int(flag) == 1


def test_delayed_scaling_rolls_its_history() -> None:
    history = torch.tensor([[4.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    scale = torch.tensor([1.0, 5.0])
    reduced = torch.tensor([8.0, 0.0])
    recipe.fused_amax_and_scale_update_after_reduction(
        reduced, [history], [scale], "max", enums.DType.kFloat8E4M3, 0)
    # 8 is appended and the oldest dropped; the largest of 1, 2, 8 sets the scale
    assert history[:, 0].tolist() == [0.0, 2.0, 8.0]
    assert scale.tolist() == [448.0 / 8.0, 5.0]
    recipe.fused_amax_and_scale_update_after_reduction(
        torch.tensor([2.0, 0.0]), [history], [scale], "most_recent", enums.DType.kFloat8E5M2, 1)
    assert scale[0] == 57344.0 / 2 / 2.0
