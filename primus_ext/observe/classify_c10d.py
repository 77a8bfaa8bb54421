"""Collectives, from the c10d ops that torch.distributed dispatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from primus_ext.observe.specs import dtype_name, spec
from primus_ext.trace import Collective, CollectiveKind, Family, Op

if TYPE_CHECKING:
    from primus_ext.observe.recorder import Recorder

# op -> (kind, index of the argument that is the whole buffer, index of the process group)
_OPS = {
    "c10d.allreduce_": (CollectiveKind.ALL_REDUCE, 0, 1),
    "c10d.allreduce_coalesced_": (CollectiveKind.ALL_REDUCE, 0, 1),
    "c10d.reduce_": (CollectiveKind.ALL_REDUCE, 0, 1),
    "c10d.broadcast_": (CollectiveKind.BROADCAST, 0, 1),
    # its source sends as much as one that broadcasts; the output is one rank's part
    "c10d.scatter_": (CollectiveKind.BROADCAST, 0, 2),
    "c10d.allgather_": (CollectiveKind.ALL_GATHER, 0, 2),
    "c10d._allgather_base_": (CollectiveKind.ALL_GATHER, 0, 2),
    "c10d.allgather_into_tensor_coalesced_": (CollectiveKind.ALL_GATHER, 0, 2),
    "c10d.reduce_scatter_": (CollectiveKind.REDUCE_SCATTER, 1, 2),
    "c10d._reduce_scatter_base_": (CollectiveKind.REDUCE_SCATTER, 1, 2),
    "c10d.reduce_scatter_tensor_coalesced_": (CollectiveKind.REDUCE_SCATTER, 1, 2),
    "c10d.alltoall_base_": (CollectiveKind.ALL_TO_ALL, 1, 2),
    "c10d.alltoall_": (CollectiveKind.ALL_TO_ALL, 1, 2),
    "c10d.send": (CollectiveKind.SEND_RECV, 0, 1),
    "c10d.recv_": (CollectiveKind.SEND_RECV, 0, 1),
    "c10d.barrier": (CollectiveKind.BARRIER, 0, 1),
}


class UnknownCollective(RuntimeError):
    """A collective that no price exists for; refused rather than dropped."""


def group_of(boxed: Any, recorder: Recorder) -> str:
    """Short name of a process group as an op holds it; notes its ranks."""
    return named_group(dist.ProcessGroup.unbox(boxed), recorder)


def named_group(group: Any, recorder: Recorder) -> str:
    """Short name of a process group; notes its ranks."""
    name = recorder.group_names.get(group.group_name) or group.group_desc.lower()
    if name not in recorder.groups_seen:
        recorder.groups_seen[name] = tuple(dist.get_process_group_ranks(group))
    return name


def classify(name: str, func: Any, args: tuple, kwargs: dict, recorder: Recorder) -> Op | None:
    """The collective behind one c10d dispatch; None for what costs nothing.

    Raises:
        UnknownCollective: the op is not in the table.
    """
    if name not in _OPS:
        raise UnknownCollective(f"collective {name} is not known to the recorder")
    kind, buffer_at, group_at = _OPS[name]
    group = group_of(args[group_at], recorder)
    if len(recorder.groups_seen[group]) == 1 or kind is CollectiveKind.BARRIER:
        return None
    buffers = [t for t in tree_iter(args[buffer_at]) if isinstance(t, torch.Tensor)]
    # a send or receive always has a handle; who waits for it at once is seen from the wait
    asynchronous = kind is CollectiveKind.SEND_RECV or _is_asynchronous(func, args, kwargs)
    size = sum(t.numel() * t.element_size() for t in buffers)
    if name == "c10d.scatter_":
        size *= len(recorder.groups_seen[group])
    dtype = dtype_name(buffers[0].dtype)
    family = Family.P2P if kind is CollectiveKind.SEND_RECV else Family.COLLECTIVE
    return Op(
        name=name, family=family, inputs=tuple(spec(t) for t in buffers), outputs=(), flops=0,
        bytes=0, attrs=_received(kind, args, size),
        collective=Collective(kind=kind, group=group, bytes=size, dtype=dtype,
                              asynchronous=asynchronous,
                              peer=_peer(kind, args, len(recorder.groups_seen[group]))),
    )  # fmt: skip


def _received(kind: CollectiveKind, args: tuple, size: int) -> tuple[tuple[str, int], ...]:
    """What a variable all-to-all receives, where that is not what it sends."""
    if kind is not CollectiveKind.ALL_TO_ALL:
        return ()
    buffers = [t for t in tree_iter(args[0]) if isinstance(t, torch.Tensor)]
    received = sum(t.numel() * t.element_size() for t in buffers)
    return (("received_bytes", received),) if received != size else ()


def _peer(kind: CollectiveKind, args: tuple, size: int) -> int:
    """Distance to the other side of a send or receive; their third argument is its group rank."""
    if kind is not CollectiveKind.SEND_RECV:
        return 0
    return (args[2] - dist.ProcessGroup.unbox(args[1]).rank()) % size


def handle(op: Op, out: Any) -> tuple[Any, str | None]:
    """The ``Work`` and the group of an asynchronous collective; twice None for other calls.

    Args:
        op: What :func:`classify` made of the dispatch.
        out: Its result.

    Raises:
        UnknownCollective: nothing in the result can be waited for.
    """
    if op.collective is None or not op.collective.asynchronous:
        return None, None
    for leaf in tree_iter(out):
        if isinstance(leaf, torch.ScriptObject):
            return dist.Work.unbox(leaf), op.collective.group
    raise UnknownCollective(f"{op.name} is asynchronous and gave nothing to wait for")


def _is_asynchronous(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the caller did not wait.  Dispatch drops arguments that equal their default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get("async_op", given))
    return False
