"""Helpers for packed sequences: splitting over ranks, and merging of partial attention."""

from __future__ import annotations

import pytest
import torch

from primus_ext.emulate.te import moe, thd

CU = torch.tensor([0, 8, 24], dtype=torch.int32)


def test_partition_gives_each_rank_two_chunks_of_every_sequence() -> None:
    world = 2
    everything = torch.arange(24)
    for rank in range(world):
        expected = []
        for start, end in ((0, 8), (8, 24)):
            chunks = everything[start:end].chunk(2 * world)
            expected += [chunks[rank], chunks[2 * world - 1 - rank]]
        indices = thd.thd_get_partitioned_indices(CU, 24, world, rank)
        assert indices.tolist() == torch.cat(expected).tolist()


def test_reordering_to_ranks_and_back() -> None:
    x = torch.randn(24, 2, 4)
    by_rank = thd.thd_sequence_order_to_cp_rank_order(x, CU, 2, 24)
    indices = thd.thd_get_partitioned_indices(CU, 24, 2, 1).long()
    assert torch.equal(by_rank[12:], x[indices])
    assert torch.equal(thd.thd_cp_rank_order_to_sequence_order(by_rank, CU, 2, 24), x)


@pytest.mark.parametrize("half", [0, 1])
def test_halves(half: int) -> None:
    x = torch.randn(2, 24, 2, 4)
    expected = torch.cat([x[:, 0:4], x[:, 8:16]] if half == 0 else [x[:, 4:8], x[:, 16:24]], 1)
    assert torch.equal(thd.thd_read_half_tensor(x, CU, half), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_partial_attention_merges_to_the_whole(packed: bool) -> None:
    """Split the keys in two; merge outputs and log-sum-exps; compare with one softmax."""
    heads, dim = 2, 4
    scores = torch.randn(24, heads, 10)
    values = torch.randn(heads, 10, dim)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[..., keys]
        out = torch.einsum("thk,hkd->thd", torch.softmax(part, -1), values[:, keys])
        return out, part.logsumexp(-1).t()  # [h, t]

    (out_a, lse_a), (out_b, lse_b) = attend(slice(0, 4)), attend(slice(4, 10))
    whole, lse = attend(slice(0, 10))

    def shaped(value: torch.Tensor) -> torch.Tensor:
        if packed:
            return value.contiguous()
        out = torch.zeros(2, heads, 16)
        out[0, :, :8], out[1] = value[:, :8], value[:, 8:]
        return out

    merged = out_a.clone()
    thd.thd_out_correction(
        merged, out_b, shaped(lse_a), shaped(lse), shaped(lse_b), CU, False, packed
    )
    torch.testing.assert_close(merged, whole)


@pytest.mark.parametrize("packed", [False, True])
def test_log_sum_exp_of_second_halves(packed: bool) -> None:
    cu = torch.tensor([0, 8, 16], dtype=torch.int32)
    lse = torch.randn(2, 16) if packed else torch.randn(2, 2, 8)
    step = torch.randn(2, 8) if packed else torch.randn(2, 2, 4)
    second = torch.cat([lse[:, 4:8], lse[:, 12:16]], 1) if packed else lse[:, :, 4:]
    read = thd.thd_read_second_half_lse(lse, cu, packed, step.shape[-1])
    assert torch.equal(read, second)
    expected = torch.logaddexp(second, step)
    untouched = lse[:, :4].clone() if packed else lse[:, :, :4].clone()
    thd.thd_second_half_lse_correction(lse, step, cu, packed)
    now = torch.cat([lse[:, 4:8], lse[:, 12:16]], 1) if packed else lse[:, :, 4:]
    torch.testing.assert_close(now, expected)
    assert torch.equal(lse[:, :4] if packed else lse[:, :, :4], untouched)


@pytest.mark.parametrize(
    ("first", "second", "half"),
    [("add", "none", 0), ("none", "copy", 1), ("copy", "add", None), ("zero", "copy", 1)],
)
def test_gradients_of_halves(first: str, second: str, half: int | None) -> None:
    grad = torch.randn(24, 2, 4)
    before = grad.clone()
    step = torch.randn(24 if half is None else 12, 2, 4)
    thd.thd_grad_correction(grad, step, CU, first, second)
    rows = [[*range(0, 4), *range(8, 16)], [*range(4, 8), *range(16, 24)]]
    for index, action in enumerate((first, second)):
        source = step[rows[index]] if half is None else step
        want = {"none": before[rows[index]], "zero": torch.zeros(12, 2, 4), "copy": source,
                "add": before[rows[index]] + source}[action]  # fmt: skip
        torch.testing.assert_close(grad[rows[index]], want)


def test_conversion_between_packed_and_padded() -> None:
    x = torch.randn(24, 2, 4)
    padded = thd.convert_thd_to_bshd(x, CU, 2, 20)
    assert padded.shape == (2, 20, 2, 4)
    assert torch.equal(padded[0, :8], x[:8]) and not padded[0, 8:].any()
    assert torch.equal(thd.convert_bshd_to_thd(padded, CU, 24), x)


def test_tokens_are_permuted_to_their_experts_and_back() -> None:
    x, topk = torch.randn(5, 4), 2
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [1, 0]])
    rows, row_map, _ = moe.moe_permute_fwd(x, None, experts, 0, [], 10)
    order = torch.argsort(experts.flatten(), stable=True) // topk
    assert torch.equal(rows, x[order])
    prob = torch.rand(5, 2)
    back = moe.moe_unpermute_fwd(rows, None, row_map, prob, 5, topk)
    torch.testing.assert_close(back, x * prob.sum(1, keepdim=True))
    dy = torch.randn(5, 4)
    dx, dprob = moe.moe_unpermute_bwd(dy, rows, None, row_map, prob)
    leaf, weights = rows.clone().requires_grad_(), prob.clone().requires_grad_()
    inverse = row_map.view(topk, 5).t().long()
    (leaf[inverse] * weights[..., None]).sum(1).backward(dy)
    torch.testing.assert_close(dx, leaf.grad)
    torch.testing.assert_close(dprob, weights.grad)


def test_expert_inputs_are_padded_and_unpadded() -> None:
    x, rows, padded = torch.randn(5, 3), [2, 0, 3], [4, 0, 8]
    out = torch.full((12, 3), float("nan"))
    moe.fused_multi_row_padding(x, out, rows, padded)
    assert torch.equal(out[:2], x[:2]) and torch.equal(out[4:7], x[2:])
    assert not out[2:4].any() and not out[7:].any()
    back = torch.empty(5, 3)
    moe.fused_multi_row_unpadding(out, back, padded, rows)
    assert torch.equal(back, x)
