"""What Transformer Engine's Python code expects of its compiled extension, and gets."""

from __future__ import annotations

from typing import Any

import pytest

from primus_ext.emulate.te import mentions, module, names
from tests import te_world

NEVER_THERE = {"LayerNorm"}
"""``onnx_extensions.py`` names it; the real extension does not have it either."""


@pytest.fixture(scope="module")
def mentioned() -> frozenset[str]:
    return mentions.mentioned()


def test_every_name_that_transformer_engine_mentions_exists(mentioned: frozenset[str]) -> None:
    assert len(mentioned) > 150
    assert mentions.lacking(module.build()) == NEVER_THERE


def test_every_call_of_transformer_engine_fits_the_function_that_stands_for_it() -> None:
    stand_in = module.build()
    assert mentions.misfits(stand_in) == set()
    setattr(stand_in, "thd_out_correction", lambda out, step, lse, cu: None)
    assert {line.split()[1] for line in mentions.misfits(stand_in)} == {"thd_out_correction"}


WITHOUT_BODY = {
    # userbuffers communication overlap, NVSHMEM, cuSOLVERMp
    "bulk_overlap_ag_with_external_gemm", "create_nvshmem_tensor", "init_nvshmem_backend",
    "nvshmem_finalize", "nvshmem_send_on_current_stream", "nvshmem_wait_on_current_stream",
    "cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "newton_schulz",
    # expert parallelism over NCCL
    "ep_combine", "ep_combine_bwd", "ep_dispatch", "ep_dispatch_bwd", "ep_finalize",
    "ep_get_zero_copy", "ep_handle_mem_size", "ep_initialize", "ep_prepare",
    "ep_prepare_and_dispatch", "ep_zero_copy_supported",
    # grouped tensors (cuBLASLt 13.3), te.ops
    "bgrad_group_quantize", "group_dequantize", "group_quantize", "group_requantize_inplace",
    "grouped_swizzle_for_gemm", "splits_to_offsets", "splits_to_offsets_multi",
    "te_general_grouped_gemm_for_discrete_in", "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_grouped_tensor", "get_grouped_gemm_setup_workspace_size",
    "copy_data_ptrs_to_device", "scaled_clamped_dswiglu", "scaled_clamped_swiglu",
    "scaled_dsituglu", "scaled_dsrelu", "scaled_dswiglu", "scaled_situglu", "scaled_srelu",
    "scaled_swiglu", "dropout_bwd", "dropout_fwd",
    # attention in FP8 or over paged caches
    "copy_to_kv_cache", "fa_prepare_bwd", "fa_prepare_fwd", "multi_tensor_transpose_to_bhsd",
    "multi_tensor_pad_last_dim",
    # sharded NVFP4 parameters, other routers
    "nvfp4_2d_compute_partial_amax", "nvfp4_2d_multi_tensor_transpose", "nvfp4_2d_partial_cast",
    "nvfp4_2d_scale_transpose", "nvfp4_compute_global_scale", "nvfp4_compute_per_block_scale",
    "nvfp4_data_transpose", "nvfp4_expand_scale_to_fp8", "nvfp4_fused_scale",
    "nvfp4_group_quantize_with_amax", "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax", "nvfp4_multi_tensor_fused_scale",
    "nvfp4_quantize_with_amax", "multi_tensor_swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_", "fused_topk_with_score_function_qb_fwd",
}  # fmt: skip


def test_names_without_a_body_are_these() -> None:
    from primus_ext.emulate.te.bindings import BINDINGS

    module.build()
    assert set(names.FUNCTIONS) - set(BINDINGS) == WITHOUT_BODY


@pytest.mark.parametrize("name", sorted(WITHOUT_BODY))
def test_a_name_without_a_body_says_so_when_called(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"transformer_engine_torch.{name} is not"):
        getattr(module.build(), name)(1, two=2)


@pytest.mark.parametrize("name", names.CLASSES)
def test_communication_overlap_cannot_be_built(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(module.build(), name)()


@pytest.fixture(scope="module")
def surface() -> dict[str, Any]:
    return te_world.run("10.0", "surface")["surface"]


def test_enumerations_equal_their_mirrors_in_python(surface: dict[str, Any]) -> None:
    for name in ("dtype", "backend"):
        assert surface[name] and all(mine == theirs for mine, theirs in surface[name].values())


def test_scales_have_the_shapes_that_transformer_engine_states(surface: dict[str, Any]) -> None:
    shapes = surface["scale_shapes"]
    assert len(shapes) == 40 and all(ours == theirs for ours, theirs in shapes.values())


def test_transformer_engine_reads_the_stand_in(surface: dict[str, Any]) -> None:
    assert set(names.FUNCTIONS) <= set(surface["have"])


def test_a_process_has_one_target(surface: dict[str, Any]) -> None:
    assert "same" not in surface
    assert "(10, 0)" in surface["other_target"] and "(9, 0)" in surface["other_target"]


def test_installing_after_transformer_engine_is_refused(surface: dict[str, Any]) -> None:
    assert "before transformer_engine is imported" in surface["too_late"]
