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


WAITS = """
import torch, torch.distributed as dist
from primus_ext.emulate import virtual_cuda, virtual_world
virtual_cuda.install(virtual_cuda.DeviceProfile("h100", (9, 0), 2**36, 132, 8))
from primus_ext.observe import streams
from primus_ext.observe.recorder import Recorder
virtual_world.join(2, 8, 8)
group = dist.new_group([2, 3])
recorder = Recorder({group.group_name: "tp"})
cuda, side = torch.cuda, torch.cuda.Stream()
assert cuda.current_stream() == cuda.default_stream() != side

def show(run):
    recorder.streams = streams.Streams()  # nothing is left of the one before
    with recorder.collect("forward") as calls:
        run(torch.empty(16), torch.empty(32))
    assert cuda.current_stream() == cuda.default_stream()
    for _, _, call in calls:
        op = recorder.ops[call.op]
        print(op.name.partition(".")[2], call.stream or "main", dict(call.waits), end="; ")
    print()

def work(x, out):
    one = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
    two = dist.all_reduce(x, group=group, async_op=True)
    x.add_(1)
    one.wait()
    x.mul_(1)
    x.add_(1)
    two.wait()
    x.mul_(1)

def side_by_side(x, out):
    side.wait_stream(cuda.current_stream())  # nothing there yet
    x.add_(1)
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        assert cuda.current_stream() == side
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        x.mul_(1)
        done = side.record_event()
        x.sub_(1)
    x.add_(1)
    cuda.current_stream().wait_event(done)
    x.add_(1)
    x.add_(1)
    cuda.current_stream().wait_stream(side)
    x.mul_(1)

def by_the_host(x, out):
    with side:
        x.mul_(1)
    x.add_(1)
    side.synchronize()
    x.sub_(1)
    with cuda.stream(cuda.Stream()):
        x.add_(1)

def together(x, out):
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        dist.all_reduce(x, group=group)
        dist.all_reduce(out, group=group)
    with dist._coalescing_manager(group=group, device=x.device, async_ops=True) as other:
        dist.all_gather_into_tensor(out, x, group=group)
        dist.all_gather_into_tensor(out, x, group=group)
    x.add_(1)
    manager.wait()
    x.add_(1)
    other.wait()
    x.add_(1)

def ring(x, out):
    send, receive = dist.P2POp(dist.isend, x, 3, group), dist.P2POp(dist.irecv, out, 3, group)
    works = dist.batch_isend_irecv([send, receive])
    x.add_(1)
    for work in works:
        work.wait()
    x.mul_(1)

with virtual_world.no_storage(), recorder:
    for run in (work, side_by_side, by_the_host, together, ring):
        show(run)
print([(o.collective.kind.value, o.collective.bytes) for o in recorder.ops if o.collective])
print([o.collective.peer for o in recorder.ops if o.collective])
"""


def test_the_stream_of_every_call_and_what_it_waits_for() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WAITS], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    work, side, host, together, ring, kinds, peers = run.stdout.splitlines()
    assert work == (
        "_allgather_base_ main {}; allreduce_ main {}; add_ main {}; mul_ main {'tp': 1}; "
        "add_ main {}; mul_ main {'tp': 0}; "
    )
    assert side == (
        "add_ main {}; allreduce_ side1 {'': 0}; mul_ side1 {'': 0, 'tp': 0}; sub_ side1 {}; "
        "add_ main {}; add_ main {'side1': 1}; add_ main {}; mul_ main {'side1': 0}; "
    )
    assert host == (
        "mul_ side1 {}; add_ main {}; sub_ main {'side1': 0}; add_ side2 {'side1': 0}; "
    )
    assert together == (
        "allreduce_coalesced_ main {}; allgather_into_tensor_coalesced_ main {}; add_ main {}; "
        "add_ main {'tp': 1}; add_ main {'tp': 0}; "
    )
    assert ring == "send main {}; recv_ main {}; add_ main {}; mul_ main {'tp': 0}; "
    assert peers == "[0, 0, 0, 0, 1, 1]"  # rank 3 stands after rank 2
    assert kinds == str(
        [
            ("all_gather", 128), ("all_reduce", 64), ("all_reduce", 64 + 128),
            ("all_gather", 2 * 128), ("send_recv", 64), ("send_recv", 128),
        ]
    )  # fmt: skip
