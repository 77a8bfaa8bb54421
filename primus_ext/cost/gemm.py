"""Matrix products: a roofline with a published share of the peak."""

from __future__ import annotations

import math

from primus_ext.cluster import Accelerator
from primus_ext.cost.formats import format_of, peak_flops
from primus_ext.cost.memory_bound import traffic_seconds
from primus_ext.cost.priced import MODEL, CostError, Priced
from primus_ext.trace import Family, Op

TILE = 128
"""Edge of the output tile that one multiprocessor computes at a time (elements).  Kernels of the
vendor libraries use 128x128 to 256x256 (NVIDIA, Matrix Multiplication Background User's Guide,
section on tile quantization; hipBLASLt macro tiles)."""

PROLOGUE_K = 128
"""Columns of the contraction whose time filling and draining the pipeline costs in each tile.
Of 0, 64 and 128 it leaves the smallest spread of measured over modelled on all nine NVIDIA tables
of aiconfigurator-core 0.12.0 that were tried (e.g. H100 with vLLM: standard deviation of the
logarithm 0.147, 0.126, 0.116) and on the SimuMax A100 rows (0.088, 0.080, 0.078)."""

GROUPED_SHARE = {"tn": 0.88, "nn": 0.83, "nt": 0.76}
"""Rate of grouped products with at least 512 rows a group over that of large dense ones, by layout
(forward, input gradient, weight gradient): median over B200, A100 PCIe (SimuMax 4dcaae5) and MI355X
(Primus-Turbo PR 284) of each one's median; ``scripts/fit/efficiencies.py``."""


def fill(accelerator: Accelerator, m: int, n: int, count: int) -> float:
    """Share of the multiprocessors that a product of ``count`` [m, n] outputs keeps busy.

    Counted on AMD only: there it takes the spread of the MI355X rows from 0.45 to 0.33 (logarithm,
    products of 2^33 FLOPs and more).  cuBLAS splits the contraction when tiles are few; counting
    tiles there widens the spread (H100: from 0.13 to 0.21).
    """
    if accelerator.vendor != "amd":
        return 1.0
    tiles = count * math.ceil(m / TILE) * math.ceil(n / TILE)
    return min(1.0, tiles / accelerator.multi_processors)


def compute_flops(accelerator: Accelerator, flops: float, m: int, n: int, k: int, count: int = 1
                  ) -> float:  # fmt: skip
    """FLOPs that the device is busy for at its sustained rate: useful ones, prologue and idle ones.

    Args:
        accelerator: The target.
        flops: Useful FLOPs of all ``count`` products.
        m: Rows of one output.
        n: Columns of one output.
        k: Length of the contraction.
        count: Products that run in one kernel.
    """
    return flops * (1 + PROLOGUE_K / k) / fill(accelerator, m, n, count)


def efficiency(accelerator: Accelerator, number_format: str) -> float:
    """Share of the dense peak that large products reach.

    Raises:
        CostError: There is a peak but no published efficiency for this format.
    """
    figure = accelerator.gemm_efficiency.get(number_format)
    if figure is None:
        raise CostError(
            f"precision={number_format} on {accelerator.name} has no published matrix-product "
            f"efficiency: there is one for {', '.join(accelerator.gemm_efficiency)}"
        )
    return figure.value


def _grouped_share(layout: str) -> float:
    share = GROUPED_SHARE.get(layout)
    if share is None:
        raise CostError(
            f"layout={layout} of a grouped product has no price: {', '.join(GROUPED_SHARE)} have"
        )
    return share


def price(accelerator: Accelerator, op: Op) -> Priced:
    """Seconds of a dense or grouped product: the slower of compute and traffic, and the launch.

    Raises:
        CostError: The format or the layout has no published efficiency.
        ClusterError: The accelerator does not compute in the format.
    """
    attrs = dict(op.attrs)
    number_format = format_of(attrs["dtype"])
    groups = int(attrs.get("groups", 1))
    count = groups * int(attrs.get("batch", 1))
    # in a grouped product m is the total over the groups; in a weight gradient it is not split
    rows = attrs["m"] if attrs.get("layout") == "nt" else math.ceil(attrs["m"] / groups)
    rate = peak_flops(accelerator, number_format) * efficiency(accelerator, number_format)
    if op.family is Family.GROUPED_GEMM:
        rate *= _grouped_share(attrs["layout"])
    if not op.flops:
        return Priced(accelerator.kernel_launch_s.value, MODEL, {})
    compute = compute_flops(accelerator, op.flops, rows, attrs["n"], attrs["k"], count) / rate
    memory = traffic_seconds(accelerator, op.bytes)
    launch = accelerator.kernel_launch_s.value
    return Priced(
        max(compute, memory) + launch,
        MODEL,
        {"compute": compute, "memory": memory, "launch": launch},
    )
