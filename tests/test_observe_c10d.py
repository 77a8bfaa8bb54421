"""Collectives as dispatch shows them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch, torch.distributed as dist
from primus_ext.emulate import virtual_world
from primus_ext.observe.recorder import Recorder
virtual_world.join(2, 8, 8)
group = dist.new_group([2, 3])
recorder = Recorder({group.group_name: "tp"})
with virtual_world.no_storage(), recorder, recorder.collect("forward") as calls:
    x = torch.empty(16, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(torch.empty(32, dtype=torch.bfloat16), x, group=group)
    dist.all_gather_into_tensor(
        torch.empty(32, dtype=torch.bfloat16), x, group=group, async_op=True
    ).wait()
    dist.reduce_scatter_tensor(torch.empty(8, dtype=torch.bfloat16), x, group=group)
    dist.all_reduce(x, group=group)
    dist.all_to_all_single(torch.empty_like(x), x, group=group)
for _, _, call in calls:
    c = recorder.ops[call.op].collective
    if c:
        print(c.kind, c.group, c.bytes, c.dtype, c.asynchronous)
print(recorder.groups_seen)
"""


def test_kind_group_bytes_and_whether_the_caller_waits() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert run.stdout.splitlines() == [
        "all_gather tp 64 bf16 False",
        "all_gather tp 64 bf16 True",
        "reduce_scatter tp 32 bf16 False",
        "all_reduce tp 32 bf16 False",
        "all_to_all tp 32 bf16 False",
        "{'tp': (2, 3)}",
    ], run.stderr[-2000:]
