"""Device memory that is no tensor of the program: context, communicators, library workspaces."""

from __future__ import annotations

import re
from collections.abc import Mapping

from primus_ext.cluster import Accelerator, Cluster
from primus_ext.cost.exchange import is_exchange
from primus_ext.trace import CollectiveKind, Family, RankTrace

KIB = 1024


def by_source(trace: RankTrace, cluster: Cluster) -> dict[str, int]:
    """Bytes outside torch's allocator: the driver context, and one entry a communicator.

    Every process group in use has a communicator of its own, also one of the same ranks as
    another (torch's ``ProcessGroupNCCL``; NVIDIA/nccl issues 864 and 964 count them).

    Args:
        trace: Of the rank.
        cluster: The target.
    """
    found = {"context": int(cluster.accelerator.context_bytes.value)}
    exchanged = {
        op.collective.group
        for op in trace.ops
        if op.collective is not None
        and op.collective.kind is CollectiveKind.ALL_TO_ALL
        and not is_exchange(op)  # DeepEP and HybridEP bring buffers of their own
    }
    used = {op.collective.group for op in trace.ops if op.collective is not None}
    used |= {bucket.group for bucket in trace.buckets} | {"pp"}
    for name in sorted(used & trace.groups.keys()):
        ranks = trace.groups[name]
        if len(ranks) > 1:
            size = communicator_bytes(ranks, name in exchanged, trace.rank, cluster)
            found[f"communicator {name}"] = size
    libraries = getattr(trace.static, "libraries", 0)  # DeepEP's buffers
    return {**found, "communication libraries": libraries} if libraries else found


def communicator_bytes(
    ranks: tuple[int, ...], all_to_all: bool, rank: int, cluster: Cluster
) -> int:
    """What the collective library takes for a process group.

    Rings and trees connect to few peers, however large the group; an all-to-all connects to
    every peer of the scale-up domain besides.

    Args:
        ranks: Global ranks of the group.
        all_to_all: Whether all-to-alls run in it.
        rank: The member whose device it is.
        cluster: The target.
    """
    accelerator = cluster.accelerator
    pair = len(ranks) == 2
    base = (accelerator.communicator_pair_bytes if pair else accelerator.communicator_bytes).value
    if not all_to_all:
        return int(base)
    domain = cluster.scale_up_domain
    near = sum(other // domain == rank // domain for other in ranks) - 1
    return int(base + near * accelerator.all_to_all_peer_bytes.value)


def blas_workspaces(
    trace: RankTrace, accelerator: Accelerator, environment: Mapping[str, str]
) -> tuple[int, int]:
    """Workspaces of torch's own cuBLAS (hipBLAS) handles, which lie in torch's allocator.

    Torch makes one for each thread and stream that runs a matrix product of its own
    (``aten/src/ATen/cuda/CublasHandlePool.cpp``, torch 2.14): the forward runs in the main thread,
    the backward in autograd's.

    Args:
        trace: Of the rank.
        accelerator: The target's.
        environment: Variables of the user's command.

    Returns:
        Bytes of the one that the forward needs, and of the backward's; 0 for none.
    """
    products = {
        index
        for index, op in enumerate(trace.ops)
        if op.family is Family.GEMM and op.name.startswith("aten.")
    }
    segments = [segment for chunk in trace.chunks for segment in chunk.segments]
    size = workspace_bytes(accelerator, environment)
    forward = any(call.op in products for s in segments for call in s.forward)
    backward = any(call.op in products for s in segments for call in s.backward)
    return size * forward, size * backward


def workspace_bytes(accelerator: Accelerator, environment: Mapping[str, str]) -> int:
    """Bytes of one workspace (``getChosenWorkspaceSize``)."""
    if accelerator.vendor == "cpu":
        return 0
    names = ["CUBLAS_WORKSPACE_CONFIG"]
    if accelerator.vendor == "amd":
        names += ["HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"]
    chosen = next((environment[name] for name in names if name in environment), "")
    pairs = re.findall(r":([0-9]+):([0-9]+)", chosen)
    if pairs:
        return sum(int(size) * int(count) * KIB for size, count in pairs)
    if accelerator.vendor == "amd":
        large = accelerator.arch.startswith(("gfx94", "gfx95"))
        return (128 if large else 32) * KIB * KIB
    if accelerator.compute_capability[0] in (9, 10, 12):
        return 32 * KIB * KIB
    return (2 * 4096 + 8 * 16) * KIB
