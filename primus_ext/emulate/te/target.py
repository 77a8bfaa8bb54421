"""The accelerator that the stand-in answers for: what the real extension would ask the driver."""

from __future__ import annotations

import dataclasses

CUDNN_VERSION = 92600
"""cuDNN version the stand-in reports, as ``cudnnGetVersion()`` encodes it (9.26.0).

Above 9.25, the newest version that a support rule of Transformer Engine 2.20 names (D=256 with
THD layouts), so that no rule for old releases applies."""

CUBLASLT_VERSION = 130200
"""cuBLASLt version the stand-in reports (13.2.0); Transformer Engine 2.20 asks for >= 12.1.3."""

NUM_CUBLAS_STREAMS = 4
"""Streams (and workspaces) of the multi-stream grouped GEMM on every architecture
(``nvte_get_num_compute_streams`` of Transformer Engine 2.20: ``compute_num_streams = 4``)."""


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
    def non_tn_fp8_gemm(self) -> bool:
        """Whether FP8 GEMMs exist in every layout, so that no transposed copy is kept.

        ``nvte_is_non_tn_fp8_gemm_supported``: architectures 10.x and from 13.0 on."""
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
