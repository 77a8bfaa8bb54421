"""The other ranks, real: one process each, over gloo, in the world that is otherwise virtual.

For the oracle of memory: the program, the stand-ins and the meter are those of the virtual run, so
that what differs is the backend's.

gloo's threads keep a reference to every tensor for an indefinite time after the collective, and
the backend's own buffers with it; no two runs would have the same peak.  So a collective is waited
for where it is issued, until gloo has let go, and gloo gets the program's memory without a share
in it (:func:`_borrowed`): tensors live as long as the program lets them.  Transfers between
two ranks stay asynchronous; their tensors are held until the program waits, as NCCL's are.
Nothing is copied.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from primus_ext.emulate import registry
from primus_ext.observe.allocator_meter import COLLECTIVE, region

GROUP = "real_peers"
TIMEOUT = datetime.timedelta(minutes=15)
"""Of a collective: the ranks share few cores."""
_BLOCKING = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "all_gather_single",
    "_allgather_base", "allgather_coalesced", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "all_to_all_single", "alltoall_base", "alltoall",
)  # fmt: skip
_TRANSFERS = ("send", "recv", "recv_anysource")


def join(rank: int, world_size: int, rendezvous: str) -> None:
    """Become ``rank`` of a group of processes; every group of it is gloo's.

    Args:
        rank: Global rank.
        world_size: Processes; each of them calls this.
        rendezvous: A file that all of them see and that does not exist before.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    registry.apply_all(GROUP)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size,
        timeout=TIMEOUT,
    )  # fmt: skip
    dist.new_group = _on_gloo(dist.new_group)


def _on_gloo(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def create(ranks: list[int] | None = None, *_args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("backend", "pg_options", "timeout")}
        return new_group(ranks, timeout=TIMEOUT, backend="gloo", **kwargs)

    return create


@registry.patch("torch._C._distributed_c10d",
                *(f"ProcessGroup.{name}" for name in (*_BLOCKING, *_TRANSFERS)),
                group=GROUP, versions="torch 2.14",
                reason="gloo's threads keep tensors alive for an indefinite time")
def _process_groups(module: Any) -> None:
    for names, lent in ((_BLOCKING, _waited_for), (_TRANSFERS, _held)):
        for name in names:
            setattr(module.ProcessGroup, name, lent(getattr(module.ProcessGroup, name)))


@registry.patch("torch._C._distributed_c10d", "ProcessGroup._start_coalescing",
                "ProcessGroup._end_coalescing", group=GROUP, versions="torch 2.14",
                reason="gloo has no coalescing; what is issued together is waited for one by one, "
                       "so at the end nothing is under way")
def _coalescing(module: Any) -> None:
    module.ProcessGroup._start_coalescing = lambda self, device: None
    module.ProcessGroup._end_coalescing = lambda self, device: module.FakeWork()


def _waited_for(call: Callable[..., Any]) -> Callable[..., Any]:
    """The collective ``call``; when it returns, it is done and gloo holds nothing of it."""

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._C._distributed_c10d import FakeWork

        lent = _Lent()
        with region(COLLECTIVE), torch.no_grad():
            _issue_and_wait(call, self, *lent.borrow(args), **lent.borrow(kwargs))
            lent.wait()
        return FakeWork()

    return run


def _issue_and_wait(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """A function of its own, so that nothing of it is referenced from here afterwards."""
    call(*args, **kwargs).wait()


def _held(call: Callable[..., Any]) -> Callable[..., Any]:
    """The transfer ``call``; its tensors live until somebody waits for it."""

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            work = call(self, *_Lent().borrow(args), **kwargs)
        return Transfer(work, args)

    return run


class Transfer:
    """What stands for ``Work`` of a transfer that is under way."""

    def __init__(self, work: Any, held: Any) -> None:
        """Take over ``work``; ``held`` is what lives as long as it."""
        self._work, self._held = work, held

    def wait(self, *args: Any) -> bool:
        """Wait for the end and let go of the tensors.

        A second time it returns, as NCCL's does and gloo's never would; Transformer Engine's ring
        of context parallelism waits twice.
        """
        done = self._work.wait(*args) if self._work is not None else True
        self._work = self._held = None
        return done

    def is_completed(self) -> bool:
        """Whether it is at its end."""
        return self._work is None or self._work.is_completed()

    def __del__(self) -> None:
        self.wait()


class _Lent:
    """Memory that gloo may use as long as it wants, and whether it still does."""

    def __init__(self) -> None:
        self._out = 0
        self._back = threading.Semaphore(0)

    def borrow(self, arguments: Any) -> Any:
        """The same arguments with tensors that share memory with the original, and nothing else."""
        return tree_map_only(torch.Tensor, self._borrowed, arguments)

    def _borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if not size or not tensor.is_contiguous():  # gloo refuses the latter by name
            return tensor
        memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
        weakref.finalize(memory, self._back.release).atexit = False
        self._out += 1
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(tensor.dtype).view(tensor.shape)

    def wait(self) -> None:
        """Wait until gloo has let go of everything."""
        for _ in range(self._out):
            if not self._back.acquire(timeout=TIMEOUT.total_seconds()):
                raise RuntimeError("gloo did not let go of the tensors of a collective")
