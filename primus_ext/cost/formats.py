"""Number formats: from what a trace calls them to what an accelerator has rates for."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cluster_data import ClusterError
from primus_ext.cost.priced import CostError
from primus_ext.plan import Precision

_SCALED = {"tensor": "fp8", "block1d": "fp8_block", "block2d": "fp8_block", "mxfp8": "mxfp8",
           "nvfp4": "nvfp4"}  # fmt: skip
_PLAIN = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "tf32": "tf32",
          "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}  # fmt: skip


def format_of(dtype: str) -> str:
    """The rate that applies to matrix products on operands of ``dtype``.

    Args:
        dtype: As in a trace: ``bf16``, or element type and scaling, e.g. ``fp8_e4m3/block1d``.

    Raises:
        CostError: The dtype is not known.
    """
    _, slash, scaling = dtype.partition("/")
    found = _SCALED.get(scaling) if slash else _PLAIN.get(dtype)
    if found is None:
        raise CostError(
            f"dtype={dtype} of a matrix product has no price: known are {', '.join(_PLAIN)} and "
            f"an element type with one of the scalings {', '.join(_SCALED)}"
        )
    return found


def peak_flops(accelerator: Accelerator, number_format: str) -> float:
    """Dense peak in FLOP/s.

    Raises:
        ClusterError: The accelerator does not compute in this format.
    """
    figure = accelerator.peak_flops.get(number_format)
    if figure is None:
        raise ClusterError(
            f"precision={number_format} is not available on {accelerator.name} "
            f"({accelerator.arch}): it computes in {', '.join(accelerator.peak_flops)}"
        )
    return figure.value


def require_precision(accelerator: Accelerator, precision: Precision) -> None:
    """Refuse a job whose precision the target lacks.

    Raises:
        ClusterError: It lacks it.
    """
    peak_flops(accelerator, precision.number_format)
