"""Small functions of the extension: versions, sizes, layout helpers."""

from __future__ import annotations

import torch

from primus_ext.emulate.te import target
from primus_ext.emulate.te.bindings import binding


@binding()
def get_cudnn_version() -> int:
    """As ``cudnnGetVersion()``."""
    return target.CUDNN_VERSION


@binding()
def get_cublasLt_version() -> int:
    """As ``cublasLtGetVersion()``."""
    return target.CUBLASLT_VERSION


@binding()
def get_num_cublas_streams() -> int:
    """Streams of the multi-stream grouped GEMM."""
    return target.NUM_CUBLAS_STREAMS


@binding()
def device_supports_multicast(device_id: int = -1) -> bool:
    """NVLink multicast: Hopper and later."""
    return target.target().sm_arch >= 90


@binding()
def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Least and greatest stream priority of NVIDIA devices."""
    return (0, -5)


@binding()
def ubuf_built_with_mpi() -> bool:
    """Whether userbuffers bootstrap over MPI (the published wheels do not)."""
    return False


@binding()
def nvte_built_with_cublasmp() -> bool:
    """Whether cuBLASMp is built in (the published wheels do not)."""
    return False


@binding()
def swap_first_dims(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy with the first two dimensions swapped."""
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)
