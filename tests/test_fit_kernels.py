"""The fit of the kernel models: it finds what made the samples, and takes what is evidence only."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "fit"))

import kernel_evidence as evidence  # noqa: E402
import kernel_fit as fit  # noqa: E402
import kernel_world as world  # noqa: E402

from primus_ext.cluster import Figure  # noqa: E402
from primus_ext.cluster_data import load_accelerator  # noqa: E402
from primus_ext.cost import attention, gemm  # noqa: E402

GEMM = {"gemm_prologue_k": 64, "gemm_wave_share": 0.7, "gemm_tile_loss": 8,
        "gemm_overhead_s": 6e-6, "gemm_layout_nn": 0.95, "gemm_layout_nt": 0.9}  # fmt: skip


def products(source: str, count: int) -> list[evidence.Sample]:
    """Made by the formula itself with constants of our own, on H100."""
    figure = Figure(value=0.62, source="a test")
    accelerator = fit.replaced(load_accelerator("h100"), GEMM, gemm_efficiency={"bf16": figure})
    made = []
    for i in range(count):
        m, n, k = 512 * (1 + i % 13), 384 * (1 + i % 11), 512 * (1 + i % 7)
        for layout in ("tn", "nn", "nt") if i % 4 == 0 else ("tn",):
            op = evidence.matrix(m, n, 4 * k, "bf16", layout)
            seconds = gemm.price(accelerator, op).seconds
            made.append(evidence.Sample("h100", source, "gemm", "bf16", (op,), seconds))
    return made


def test_the_constants_that_made_the_samples_are_found_again() -> None:
    found = fit.fit_gemm([*products("a", 90), *products("b", 40)], "sm_90")
    assert found.error < 0.01
    assert found.shares[("h100", "bf16")] == pytest.approx(0.62, abs=0.015)
    assert found.constants["gemm_overhead_s"] == pytest.approx(6e-6, abs=1e-6)
    assert found.constants["gemm_wave_share"] == pytest.approx(0.7, abs=0.1)
    assert found.constants["gemm_layout_nt"] < found.constants["gemm_layout_nn"] < 1
    assert found.rows == {"a": 90, "b": 40}
    again = fit.fit_gemm([*products("a", 90), *products("b", 40)], "sm_90")
    assert again == found


def test_a_source_with_many_rows_does_not_decide_alone() -> None:
    weight = fit.weights(products("a", 90) + products("b", 40))
    assert weight.sum() == pytest.approx(1)
    assert weight[0] < weight[-1]


def test_attention_is_fitted_by_direction_and_dimension() -> None:
    constants = {"attention_keys_backward": 512, "attention_tail_backward": 0.6,
                 "attention_gqa_backward": 1.0}  # fmt: skip
    values = {"backward": 0.5, "backward/64": 0.4}
    shares = {key: Figure(value=value, source="a test") for key, value in values.items()}
    accelerator = fit.replaced(load_accelerator("h100"), constants, attention_efficiency=shares)
    samples = []
    for dim in (64, 128):
        for i in range(24):
            op = evidence.fused(1 + i % 3, 2048 * (1 + i % 5), 4 * (1 + i % 7), 4 * (1 + i % 7),
                                dim, dim, True, "backward")  # fmt: skip
            seconds = attention.price(accelerator, op).seconds
            samples.append(
                evidence.Sample("h100", "a", "attention_backward", "bf16", (op,), seconds)
            )
    found = fit.fit_attention(samples, ("h100",), "backward")
    assert found.error < 0.02
    assert found.shares[("h100", "backward")] == pytest.approx(0.5, abs=0.03)
    assert found.shares[("h100", "backward/64")] == pytest.approx(0.4, abs=0.03)


def test_what_a_product_lacks_comes_from_its_vendor_and_says_so() -> None:
    samples = products("a", 30)
    known = world.Fitter(samples).world()
    shares = world.gemm_shares(known, "h200")
    assert shares["bf16"][0] == known.gemm["sm_90"].shares[("h100", "bf16")]
    assert shares["bf16"][1].startswith("as h100: rows of a")
    assert shares["fp8"][1] == "no rows for this format: the share of bf16"
    left = world.Fitter(samples).world("a")  # nothing is left: no figure may look measured
    assert "no rows" in world.gemm_shares(left, "h200")["bf16"][1]


def test_rows_that_are_no_evidence_are_left_out_with_a_reason(tmp_path: Path) -> None:
    row = {"gpu": "MI355X", "op": "gemm", "shape": "m=8192,n=8192,k=8192", "dtype": "bf16",
           "dir": "fwd", "value": 1574.7, "unit": "TFLOP/s", "src": "lab",
           "conf": "measured"}  # fmt: skip
    points = [
        row,
        row | {"sw": "HipKittens"},
        row | {"dtype": "fp6"},
        row | {"src": "stas"},
        row | {"gpu": "an unnamed one"},
        row | {"conf": "threshold(lower bound)"},
        row | {"conf": "memory(unverified)"},
        row | {"shape": "m=64,n=64,k=64"},
    ]
    path = tmp_path / "points.yaml"
    path.write_text(yaml.safe_dump({"points": points}))
    samples, left = evidence.from_rows([path])
    assert [s.source for s in samples] == ["lab"]
    assert samples[0].seconds == pytest.approx(2 * 8192**3 / 1574.7e12)
    assert sum(left.values()) == 5 and all(math.isfinite(n) for n in left.values())
    assert any("number format" in reason for reason in left)


def test_a_weight_gradient_of_groups_contracts_over_their_rows(tmp_path: Path) -> None:
    row = {"gpu": "B200", "op": "grouped_gemm", "shape": "groups=40,m_per_group=616,n=3072,k=5120",
           "dtype": "bf16", "dir": "wgrad", "value": 580.26, "unit": "TFLOP/s",
           "src": "simumax_b200", "conf": "measured"}  # fmt: skip
    path = tmp_path / "points.yaml"
    path.write_text(yaml.safe_dump({"points": [row, row | {"value": 771.65}]}))
    samples, _ = evidence.from_rows([path])
    first, again = (s.ops[0] for s in samples)
    assert dict(first.attrs) | {} == {
        "m": 3072, "n": 5120, "k": 616, "groups": 40, "layout": "nt", "dtype": "bf16",
        "out_dtype": "fp32", "accumulate": True,
    }  # fmt: skip
    assert again.attr("out_dtype") == "bf16"
    assert first.bytes - again.bytes == 40 * 3072 * 5120 * 4  # read and written, two bytes less
    assert first.flops == 2 * 40 * 616 * 3072 * 5120
