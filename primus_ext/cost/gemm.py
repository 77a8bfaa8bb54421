"""Matrix products, dense and grouped: tiles against traffic, and a launch."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.formats import format_of, peak_flops
from primus_ext.cost.kernel_constants import constant
from primus_ext.cost.memory_bound import traffic_seconds
from primus_ext.cost.priced import MODEL, CostError, Priced
from primus_ext.cost.tiles import Part, busy_flops
from primus_ext.trace import Family, Op

OVERLAP = 3.0
"""How sharply the slower of compute and traffic decides in a dense product: the exponent p of
(compute^p + traffic^p)^(1/p); 1 adds them, infinity takes the larger.  Of 1.5, 2, 3 and 5 it leaves
the smallest median error on A100, H100, H200 and B200 tables of aiconfigurator-core 0.12.0
(e.g. H100 0.075, 0.059, 0.049, 0.049) and is within 0.006 of the best on MI355X."""

GROUPED_OVERLAP = 1.25
"""The same in a grouped product: each group's operands are fetched when its turn comes and its few
tiles hide little of that.  Of 1, 1.25, 1.5, 2 and 3 it leaves the smallest middle error of
forward, input gradient and weight gradient: on A100 0.02, 0.06 and 0.21 (1: 0.09, 0.13, 0.35), on
MI355X 0.07, 0.11 and 0.03 (1: 0.12, 0.06, 0.09) (SimuMax 4dcaae5, Primus-Turbo PR 284)."""

_LAYOUTS = {"tn": None, "nn": "gemm_layout_nn", "nt": "gemm_layout_nt", "tt": "gemm_layout_nt"}


def efficiency(accelerator: Accelerator, number_format: str) -> float:
    """Share of the dense peak that the largest tiles reach.

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


def rate(accelerator: Accelerator, number_format: str, layout: str) -> float:
    """FLOP/s of the largest tiles.

    Args:
        accelerator: The target.
        number_format: E.g. ``bf16``, ``fp8_block``.
        layout: ``tn`` (forward), ``nn`` (input gradient) or ``nt`` (weight gradient).

    Raises:
        CostError: No published efficiency, or an unknown layout.
        ClusterError: The accelerator does not compute in the format.
    """
    if layout not in _LAYOUTS:
        raise CostError(f"layout={layout} of a product has no price: {', '.join(_LAYOUTS)} have")
    name = _LAYOUTS[layout]
    found = peak_flops(accelerator, number_format) * efficiency(accelerator, number_format)
    return found * (constant(accelerator, name) if name else 1.0)


def parts_of(op: Op) -> list[Part]:
    """The products of an op; groups that differ are told apart where the op names their rows."""
    attrs = dict(op.attrs)
    m, n, k = attrs["m"], attrs["n"], attrs["k"]
    groups = int(attrs.get("groups", 1))
    if op.family is not Family.GROUPED_GEMM:
        return [(m, n, k, groups * int(attrs.get("batch", 1)))]
    gradient = attrs.get("layout") == "nt"  # its groups differ in the contraction
    each = attrs.get("rows")
    if not each:
        return [(m, n, k, groups) if gradient else (-(-m // groups), n, k, groups)]
    return [(m, n, own, 1) if gradient else (own, n, k, 1) for own in each if own]


def price(accelerator: Accelerator, op: Op) -> Priced:
    """Seconds of a dense or grouped product.

    Raises:
        CostError: The format or the layout has no published efficiency.
        ClusterError: The accelerator does not compute in the format.
    """
    attrs = dict(op.attrs)
    grouped = op.family is Family.GROUPED_GEMM
    speed = rate(accelerator, format_of(attrs["dtype"]), attrs.get("layout", "tn"))
    launch = constant(accelerator, "gemm_overhead_s")
    if not op.flops:
        return Priced(launch, MODEL, {"launch": launch})
    busy = busy_flops(accelerator, parts_of(op))
    compute = busy / speed
    memory = traffic_seconds(accelerator, op.bytes)
    power = GROUPED_OVERLAP if grouped else OVERLAP
    seconds = (compute**power + memory**power) ** (1 / power) + launch
    return Priced(seconds, MODEL, {"compute": compute, "memory": memory, "launch": launch})
