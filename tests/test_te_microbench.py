"""Microbenchmarks of Transformer Engine's kernels, run through its own Python code."""

from __future__ import annotations

from tests import te_world

KERNELS = {"gemm", "fused_attn_fwd", "fused_attn_bwd", "fused_rope_fwd", "fused_rope_bwd",
           "multi_tensor_adam"}  # fmt: skip
NORMS = {"dense": "layernorm", "experts": "rmsnorm"}


def test_an_isolated_kernel_has_the_signature_of_the_layers() -> None:
    found = te_world.run("9.0", *(f"isolated:{kind}" for kind in NORMS))
    for kind, norm in NORMS.items():
        ran = found[f"isolated:{kind}"]
        expected = {*KERNELS, f"{norm}_fwd", f"{norm}_bwd"}
        expected |= {"grouped_gemm"} if kind == "experts" else set()
        assert {f"primus_te.{name}" for name in expected} <= ran.keys()
        for name, told in ran.items():
            assert told == [True] * len(told), (name, told)
