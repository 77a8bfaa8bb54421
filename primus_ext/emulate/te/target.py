"""The accelerator that the stand-in answers for: what the real extension would ask the driver."""

from __future__ import annotations

import dataclasses

CUDNN_VERSION = 92400
"""cuDNN version the stand-in reports, as ``cudnnGetVersion()`` encodes it: 9.24.0, the one that
torch 2.14.1 requires (``nvidia-cudnn-cu13==9.24.0.43``)."""

CUBLASLT_VERSION = 130101
"""cuBLASLt version the stand-in reports, as ``cublasLtGetVersion()`` encodes it: 13.1.1, the one
that torch 2.14.1 requires (``nvidia-cublas==13.1.1.3``).  Below 13.3 Transformer Engine 2.20 runs
grouped linear layers through its multi-stream GEMMs, as it does in such an installation."""

NUM_CUBLAS_STREAMS = 4
"""Streams (and workspaces) of the multi-stream grouped GEMM on every architecture
(``get_num_compute_streams`` in ``common/util/multi_stream.cpp`` of Transformer Engine 2.20)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Facts of the target accelerator."""

    compute_capability: tuple[int, int]

    @property
    def sm_arch(self) -> int:
        """Compute capability as one number, e.g. 90."""
        major, minor = self.compute_capability
        return 10 * major + minor

    @property
    def amd(self) -> bool:
        """Whether it is one of AMD's: ROCm reports gfx942 as 9.4 and gfx950 as 9.5."""
        return self.compute_capability in ((9, 4), (9, 5))

    @property
    def non_tn_fp8_gemm(self) -> bool:
        """Whether FP8 GEMMs exist in every layout, so that no transposed copy is kept.

        ``nvte_is_non_tn_fp8_gemm_supported``: architectures 10.x and from 13.0 on.
        """
        return 100 <= self.sm_arch < 120 or self.sm_arch >= 130


_target: Target | None = None


def set_target(compute_capability: tuple[int, int]) -> None:
    """Fix the target of this process."""
    global _target
    _target = Target(compute_capability)


def target() -> Target:
    """The target of this process.

    Raises:
        RuntimeError: If the stand-in was not installed.
    """
    if _target is None:
        raise RuntimeError("install the Transformer Engine stand-in before using it")
    return _target
