"""From the rate of short runs to that of training: heat, power, and a neighbour's traffic.

Peaks and efficiencies come from kernels that were run alone for milliseconds, at boost clocks and
with warm caches.  A training step runs for seconds: the board meets its power limit, kernels find
caches cold, collectives and copies take memory bandwidth.  By how much, measured step times say:
``hydra_conf/sustained`` holds the factor of each kind of work for a generation of accelerators.

What computes is held back by the power limit, so that its factor depends on the product's board
power.  Dynamic power is proportional to f V^2, and in the range near the top V falls with f: the
clock that a limit leaves goes with the power to something between 1/3 (V ~ f) and 1 (V constant).
"""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.formats import format_of
from primus_ext.cost.priced import Priced
from primus_ext.trace import Family, Op

POWER_EXPONENT = 0.5
"""Between the limits of 1/3 and 1: of 0, 0.33, 0.5, 0.75 and 1 the one in the flat minimum (0.5 to
0.75) of the error of step times left out of the fit, boards of 500 to 1,400 W."""
REFERENCE = "board_power_w"
"""Entry of the table: the board power that its factors hold at."""
HOST = "host_call_s"
"""Entry of the table: seconds of the host for each call that it issues."""
KINDS = (
    "gemm/bf16", "gemm/fp8", "gemm/fp8_block", "gemm/mxfp8", "gemm/nvfp4", "grouped_gemm",
    "attention", "memory", "quantize", "scale_up", "scale_out", "exchange",
)  # fmt: skip
"""Kinds of work that a table may have a factor for; ``grouped_gemm`` is on top of its format's."""
_LIKE = {"fp16": "bf16", "tf32": "bf16", "fp32": "bf16"}


def factor(accelerator: Accelerator, kind: str) -> float:
    """Seconds in training over those alone, of one of :data:`KINDS` on a product."""
    computes = kind.startswith("gemm/") or kind == "attention"
    return (_computing if computes else _factor)(accelerator, kind)


def of_format(number_format: str) -> str:
    """The kind of matrix products in a number format."""
    return f"gemm/{_LIKE.get(number_format, number_format)}"


def _factor(accelerator: Accelerator, kind: str) -> float:
    figure = accelerator.sustained.get(kind)
    return figure.value if figure else 1.0


def _computing(accelerator: Accelerator, kind: str) -> float:
    """The factor of a kind of work that the power limit slows down."""
    factor = _factor(accelerator, kind)
    reference = accelerator.sustained.get(REFERENCE)
    if reference is None:
        return factor
    ratio = reference.value / accelerator.board_power_w.value
    return max(min(1.0, factor), factor * ratio**POWER_EXPONENT)


def slowdown(accelerator: Accelerator, op: Op) -> float:
    """Seconds of an op in training over those alone, on an idle device at boost clock."""
    if op.family in (Family.GEMM, Family.GROUPED_GEMM):
        number_format = format_of(op.attr("dtype"))
        own = _computing(accelerator, of_format(number_format))
        grouped = op.family is Family.GROUPED_GEMM
        return own * (_factor(accelerator, "grouped_gemm") if grouped else 1.0)
    if op.family is Family.ATTENTION:
        return _computing(accelerator, "attention")
    return _factor(accelerator, "quantize" if op.family is Family.QUANTIZE else "memory")


def slowed(priced: Priced, factor: float) -> Priced:
    """A price, ``factor`` times as long."""
    if factor == 1.0:
        return priced
    terms = {name: seconds * factor for name, seconds in priced.terms.items()}
    low, high = priced.interval or (0.0, 0.0)
    interval = (low * factor, high * factor) if priced.interval else None
    return Priced(priced.seconds * factor, priced.evidence, terms, interval, priced.basis)


def communication(accelerator: Accelerator, domains: int, *, exchange: bool = False) -> float:
    """The same of a collective.

    Args:
        accelerator: The target.
        domains: Scale-up domains that the group spans.
        exchange: Whether it is an expert dispatch or combine of DeepEP's kind.
    """
    if exchange:
        return _factor(accelerator, "exchange")
    return _factor(accelerator, "scale_up" if domains == 1 else "scale_out")
