"""Fused attention, forward and backward."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.formats import peak_flops
from primus_ext.cost.kernel_constants import constant
from primus_ext.cost.memory_bound import traffic_seconds
from primus_ext.cost.priced import MODEL, CostError, Priced
from primus_ext.trace import Op

ROWS = 128
"""Query rows of one work item (FlashAttention-2, arXiv 2307.08691, section 3.3)."""
STANDARD = 128
"""Head dimension that ``forward`` and ``backward`` of an accelerator's shares are for."""
OVERLAP = 3.0
"""As in :mod:`primus_ext.cost.gemm`: how sharply the slower of compute and traffic decides."""

_PRICED = ("bf16", "fp16")


def share(accelerator: Accelerator, direction: str, dim_qk: int) -> float:
    """Share of the bf16 peak at a head dimension, straight between the known ones.

    Where a backward has none for a dimension, the forward's drop against 128 is taken.
    """
    table = accelerator.attention_efficiency
    base = table[direction].value
    known = {STANDARD: base}
    for name, figure in table.items():
        kind, _, dim = name.partition("/")
        if dim and kind == direction:
            known[int(dim)] = figure.value
        elif dim and f"{direction}/{dim}" not in table:
            known[int(dim)] = figure.value * base / table[kind].value
    dims = sorted(known)
    if dim_qk <= dims[0] or dim_qk >= dims[-1]:
        return known[dims[0] if dim_qk <= dims[0] else dims[-1]]
    above = next(dim for dim in dims if dim >= dim_qk)
    below = max(dim for dim in dims if dim <= dim_qk)
    if above == below:
        return known[above]
    part = (dim_qk - below) / (above - below)
    return known[below] + part * (known[above] - known[below])


def busy_flops(accelerator: Accelerator, op: Op) -> tuple[float, float]:
    """FLOPs the device could do while the kernel computes, and while its last rows finish.

    Every block of :data:`ROWS` query rows costs some keys more than it has (twice, where a window
    cuts both ends), and when the work runs out most multiprocessors wait for the last blocks.
    """
    attrs = dict(op.attrs)
    direction = attrs["direction"]
    backward = direction == "backward"
    qk, v = attrs["dim_qk"], attrs["dim_v"]
    dims = 3 * qk + 2 * v if backward else qk + v
    left, right = attrs.get("window") or (-1, -1)
    reach, ends = attrs["seq_kv"], 1
    if 0 <= left < reach:
        reach, ends = min(reach, left + 1 + max(right, 0) + ROWS), 2
    extra = ends * constant(accelerator, f"attention_keys_{direction}")
    rows = attrs["batch"] * attrs["heads"] * attrs["seq_q"]
    tail = constant(accelerator, f"attention_tail_{direction}") * ROWS * reach
    return op.flops + 2.0 * rows * extra * dims, 2.0 * tail * dims * accelerator.multi_processors


def kernel_of(op: Op, kernel: str = "") -> str:
    """Which fused attention an op is: ``flash2``, ``triton``, or '' for the fastest of its time.

    Args:
        op: The op; those of flash-attn's own package are ``flash2``.
        kernel: What the job is known to run, where its ops don't say.
    """
    return kernel or ("flash2" if op.name.startswith("primus_flash") else "")


def price(accelerator: Accelerator, op: Op, kernel: str = "") -> Priced:
    """Seconds of one fused attention kernel.

    Args:
        accelerator: The target.
        op: The kernel.
        kernel: As :func:`kernel_of` gives it.

    Raises:
        CostError: The element type has no published efficiency.
    """
    attrs = dict(op.attrs)
    dtype = attrs.get("dtype", "bf16")
    plain = dtype == "fp32" and accelerator.vendor == "cpu"
    if dtype not in _PRICED and not plain:
        raise CostError(
            f"dtype={dtype} of fused attention has no price: {', '.join(_PRICED)} have"
        )
    direction = attrs["direction"]
    peak = peak_flops(accelerator, "fp32" if plain else "bf16")
    rate = peak * share(accelerator, direction, attrs["dim_qk"])
    if direction == "backward" and attrs["kv_heads"] < attrs["heads"]:
        rate *= constant(accelerator, "attention_gqa_backward")
    other = accelerator.attention_kernels.get(f"{kernel}/{direction}")
    rate *= other.value if other else 1.0
    busy, tail = busy_flops(accelerator, op)
    compute, waiting = busy / rate, tail / rate
    memory = traffic_seconds(accelerator, op.bytes)
    launch = accelerator.kernel_launch_s.value
    seconds = ((compute + waiting) ** OVERLAP + memory**OVERLAP) ** (1 / OVERLAP) + launch
    return Priced(
        seconds,
        MODEL,
        {"compute": compute, "tail": waiting, "memory": memory, "launch": launch},
    )
