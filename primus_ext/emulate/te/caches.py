"""Transformer Engine's process-wide caches, emptied between emulations.

It keeps workspaces, cumulative sequence lengths, Hadamard matrices and the like for the life of the
process.  Tensors of one fake-tensor mode can't be used under the next, and what the first visit of
a shape allocates would be missing from the second.
"""

from __future__ import annotations

import sys

_ROOT = "transformer_engine.pytorch"
_FUNCTIONS = {
    "cpp_extensions.gemm": (
        "get_cublas_workspace",
        "_get_fp32_ones_tensor",
        "_get_fp32_zeros_tensor",
        "_get_grouped_gemm_setup_workspace",
        "_get_grouped_cublas_workspace",
    ),
    "tensor.nvfp4_tensor": ("get_rht_matrix",),
    "tensor.storage.nvfp4_tensor_storage": ("_fp4_e2m1_vals",),
    "utils": ("get_cached_ones_tensor", "_empty_tensor"),
    "distributed": ("get_distributed_world_size", "get_distributed_rank"),
}
_CONTAINERS = {
    "attention.dot_product_attention.utils": ("_cu_seqlens_cache",),
    "attention.dot_product_attention.context_parallel": (
        "_cu_seqlens_info_with_cp_cache",
        "_seq_chunk_ids_cache_for_reordering_before_attn",
        "_seq_chunk_ids_cache_for_reordering_after_attn",
        "_softmax_offset_chunk_ids_cache",
    ),
    "module.base": ("_dummy_wgrads",),
}
_BY_SIZE = _CONTAINERS["attention.dot_product_attention.context_parallel"] + (
    _CONTAINERS["attention.dot_product_attention.utils"]
)
"""Tensors by sequences, lengths and number of ranks: another job's are the same."""


def by_size() -> list[dict]:
    """Caches whose tensors serve any job of the process, as long as its fake-tensor mode stays."""
    return [
        getattr(module, member)
        for name, members in _CONTAINERS.items()
        for member in members
        if member in _BY_SIZE and (module := sys.modules.get(f"{_ROOT}.{name}")) is not None
    ]


def reset_quantization() -> None:
    """Empty the global state of quantization."""
    quantization = sys.modules.get(f"{_ROOT}.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()


def reset() -> None:
    """Empty the caches and the global state of quantization.  Harmless if nothing is cached.

    Raises:
        AttributeError: If a cache is not where Transformer Engine 2.20 has it.
    """
    for table, clear in ((_FUNCTIONS, "cache_clear"), (_CONTAINERS, "clear")):
        for name, members in table.items():
            module = sys.modules.get(f"{_ROOT}.{name}")
            for member in members if module is not None else ():
                getattr(getattr(module, member), clear)()
    permutation = sys.modules.get(f"{_ROOT}.permutation")
    if permutation is not None:
        setattr(permutation, "_moe_permute_index_map_workspace", None)
    reset_quantization()
