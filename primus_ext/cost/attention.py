"""Fused attention, forward and backward."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.formats import peak_flops
from primus_ext.cost.memory_bound import traffic_seconds
from primus_ext.cost.priced import MODEL, CostError, Priced
from primus_ext.trace import Op

ROWS = {"forward": 128, "backward": 64}
"""Rows of one work item: query rows forward (FlashAttention-2, arXiv 2307.08691, section 3.3: 128),
half of that backward, where the SimuMax rows from 4 to 128 heads show a third to a half of the
forward's waiting time on A100 and B200."""

_PRICED = ("bf16", "fp16")


def tail_flops(
    accelerator: Accelerator, seq_kv: int, dim_qk: int, dim_v: int, direction: str
) -> float:
    """FLOPs that the device could do while the last, longest work items finish.

    One row block against all keys, on every multiprocessor: with few heads most of them have
    nothing left to do.  It takes the spread of measured over modelled from 0.085 to 0.042 on A100
    and from 0.15 to 0.10 on B200 (standard deviation of the logarithm; prefill tables of
    aiconfigurator-core 0.12.0, SGLang), and explains the rates of the SimuMax A100 rows from 4 to
    128 heads.
    """
    dims = 3 * dim_qk + 2 * dim_v if direction == "backward" else dim_qk + dim_v
    return 2.0 * ROWS[direction] * seq_kv * dims * accelerator.multi_processors


def price(accelerator: Accelerator, op: Op) -> Priced:
    """Seconds of one fused attention kernel.

    Raises:
        CostError: The element type has no published efficiency.
    """
    attrs = dict(op.attrs)
    if attrs.get("dtype", "bf16") not in _PRICED:
        raise CostError(
            f"dtype={attrs['dtype']} of fused attention has no price: {', '.join(_PRICED)} have"
        )
    direction = attrs["direction"]
    share = accelerator.attention_efficiency[direction].value
    rate = peak_flops(accelerator, "bf16") * share
    left, right = attrs.get("window") or (-1, -1)
    reach = attrs["seq_kv"]
    if left >= 0:
        reach = min(reach, left + 1 + max(right, 0) + ROWS[direction])
    tail = tail_flops(accelerator, reach, attrs["dim_qk"], attrs["dim_v"], direction)
    compute = op.flops / rate
    waiting = tail / rate
    memory = traffic_seconds(accelerator, op.bytes)
    launch = accelerator.kernel_launch_s.value
    return Priced(
        max(compute + waiting, memory) + launch,
        MODEL,
        {"compute": compute, "tail": waiting, "memory": memory, "launch": launch},
    )
