"""The stand-in's NVFP4 arithmetic against the reference that Transformer Engine ships."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from primus_ext.emulate.te import nvfp4_kernels as kernels
from tests import te_world

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Bytes, scales and maxima of both copies of one matrix, by Transformer Engine's Python."""
    return te_world.run("10.0", "nvfp4_reference")["nvfp4_reference"]


def test_copies_are_those_of_the_reference(reference: dict[str, Any]) -> None:
    x = torch.tensor(reference["x"])
    amax, col_amax = torch.empty(1), torch.empty(1)
    kernels.take_maxima(x, [amax, col_amax], hadamard=True)
    row, col = (torch.empty(n, m // 2, dtype=torch.uint8) for n, m in (x.shape, x.t().shape))
    scales = [torch.full((128, 4), 7, dtype=torch.uint8) for _ in range(2)]
    kernels.store(x, row, scales[0], col, scales[1], col_amax, amax, hadamard=True)
    for ours, theirs in ((row, "row"), (col, "col")):
        assert (ours == torch.tensor(reference[theirs])).float().mean() > 0.999
    assert amax.item() == reference["row_amax"]
    assert col_amax.item() == pytest.approx(reference["col_amax"], rel=1e-6)
    for ours, theirs in zip(scales, ("row_scales", "col_scales"), strict=True):
        expected = torch.tensor(reference[theirs])
        rows, cols = expected.shape
        assert (ours[:rows, :cols] == expected).float().mean() > 0.99
        assert not ours[rows:].any() and not ours[:, cols:].any()


def test_ties_go_to_the_even_code() -> None:
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    assert kernels.encode(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert kernels.encode(-middles).tolist() == [8, 10, 10, 12, 12, 14, 14]
    codes = torch.arange(16, dtype=torch.uint8)
    assert kernels.encode(kernels.decode(codes)).tolist() == codes.tolist()


def test_values_survive_within_half_a_step() -> None:
    """Of a block whose largest value is 6 times its scale; the first code is in the low bits."""
    x = torch.cat((VALUES, -VALUES)).repeat(2, 2)
    data, scale = torch.empty(2, 16, dtype=torch.uint8), torch.empty(128, 4, dtype=torch.uint8)
    kernels.store_rows(x, data, scale, torch.tensor([6.0]))
    assert data[0, 0] == 0x10 and data[0, 4] == 0x98
    assert torch.equal(kernels.decode_rows(data, scale, torch.tensor([6.0])), x)


def test_transformed_operands_have_the_product_of_the_plain_ones() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(48, 5), torch.randn(48, 7)
    product = kernels.transform(a) @ kernels.transform(b).t()
    assert torch.allclose(product, a.t() @ b, atol=1e-5)
