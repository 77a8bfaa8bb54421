"""The other ranks, virtual: a process group of the target's size in which nobody else exists."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _meta_registrations
from torch.utils._python_dispatch import TorchDispatchMode

from primus_ext.emulate import (  # noqa: F401  (some only declare)
    registry,
    selection,
    shape_cache,
    shims_fake,
    shims_work,
)

_library: torch.library.Library | None = None
_member: int | None = None
_replaced: dict[str, Any] = {}
_ANSWERED = ("new_group", "all_gather_object", "broadcast_object_list")
NOT_A_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
"""What ``new_group`` returns for a group that does not hold this rank."""


def join(rank: int, world_size: int, gpus_per_node: int) -> None:
    """Become ``rank`` of ``world_size`` in torch.distributed's fake backend.

    Only groups that hold this rank are created, as the others would never be used; the result of
    ``new_group`` for the rest is what torch returns there as well.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    global _member
    _member = rank
    _register_meta_collectives()
    registry.apply_all("peers")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank % gpus_per_node)
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    _replaced.update({name: getattr(dist, name) for name in _ANSWERED})
    dist.new_group = _own_groups_only(dist.new_group, rank)
    dist.all_gather_object = _same_object_everywhere
    dist.broadcast_object_list = lambda *args, **kwargs: None


def leave() -> None:
    """Be no rank any more, so that the process can :func:`join` as another one."""
    global _member
    _member = None
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, original in _replaced.items():
        setattr(dist, name, original)
    _replaced.clear()


def is_joined() -> bool:
    """Whether this process is a rank of a virtual world."""
    return _member is not None


def is_stranger_to(ranks: Sequence[int]) -> bool:
    """Whether this process is a rank of a virtual world, and not one of ``ranks``."""
    return _member is not None and _member not in ranks


def _own_groups_only(new_group: Callable[..., Any], rank: int) -> Callable[..., Any]:
    def create(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return NOT_A_MEMBER
        kwargs["backend"] = "fake"
        kwargs.pop("pg_options", None)
        return new_group(ranks, *args, **kwargs)

    return create


def _same_object_everywhere(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
    """``all_gather_object``: the virtual ranks hold what this one holds."""
    object_list[:] = [obj] * len(object_list)


def _register_meta_collectives() -> None:
    """Coalesced collectives have no shape function in torch: nothing is computed, so none needed.

    The others have one.
    """
    global _library
    if _library is not None:
        return
    from torch._C._distributed_c10d import FakeWork

    _library = torch.library.Library("c10d", "IMPL")
    done = lambda *args, **kwargs: FakeWork().boxed()  # noqa: E731
    _library.impl("reduce_scatter_tensor_coalesced_", done, "Meta")
    _library.impl("allgather_into_tensor_coalesced_", done, "Meta")
    _library.impl("allreduce_coalesced_", done, "Meta")


class HostReads(TorchDispatchMode):
    """Values that the host reads from the virtual device: real ones 1, others 0 or False.

    What is gathered from the virtual ranks, as far as the host needs it, equals what this rank
    sends.  So a gradient norm is 1 (clipping runs, as at the start of training), an optimizer's
    step counter is past zero, and no flag (NaN found, overflow) is up.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; torch's guard against it costs at every operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer scalar reads of fake tensors; pass everything else on."""
        known = selection.shaped(func, args)
        if known is not None:
            return known
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].constant is not None:  # made from a Python number: it has a value
                return args[0].constant.item()
            dtype = args[0].dtype
            if dtype is torch.bool:
                return False
            return 1.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        if func is torch.ops.c10d._allgather_base_.default and not isinstance(args[0], FakeTensor):
            # the fake backend leaves the output as it was; the virtual ranks hold what we hold
            args[0].view(-1, args[1].numel()).copy_(args[1].reshape(1, -1))
        if func.namespace == "c10d" and not kwargs and _are_fake(args[0]):
            done = _COLLECTIVES.get(func._schema.name.removeprefix("c10d::"))
            if done is not None:
                return done(*args)
        return _remembered(func, args, kwargs or {})


_COLLECTIVES: dict[str, Callable[..., Any]] = getattr(_meta_registrations, "_META_FUNCTIONS", {})
"""What collectives give where nothing is computed, by torch; its way to them takes a millisecond
for each.  In another release that has no such table it is taken all the same."""


def _are_fake(value: Any) -> bool:
    """Whether a value is a tensor without storage, or a list of such."""
    if type(value) is list and value:
        return all(map(_are_fake, value))
    return type(value) is FakeTensor


def _remembered(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an operator, from memory if it is the same for these shapes."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    known = None if mode is None else shape_cache.key(mode, func, args, kwargs)
    if mode is None or known is None:
        return func(*args, **kwargs)
    out = shape_cache.recall(mode, known, args)
    if out is shape_cache.UNKNOWN:
        out = func(*args, **kwargs)
        shape_cache.learn(mode, known, func, args, kwargs, out)
    return out


_aten = torch.ops.aten
_ANSWERED_HERE = frozenset({_aten._local_scalar_dense.default, _aten.equal.default})
"""Operators of which :class:`HostReads` knows more than their shapes."""


def recalled(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What :class:`HostReads` would answer from memory; NotImplemented for any other operator.

    For a mode that is entered right after it, and need not dispatch once more to be told.
    """
    if func in _ANSWERED_HERE or func.namespace == "c10d" or selection.expected():
        return NotImplemented
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    known = None if mode is None else shape_cache.key(mode, func, args, kwargs)
    if mode is None or known is None:
        return NotImplemented
    out = shape_cache.recall(mode, known, args)
    return NotImplemented if out is shape_cache.UNKNOWN else out


@contextlib.contextmanager
def no_storage() -> Iterator[FakeTensorMode]:
    """Tensors have shapes but no storage, so that a stage of any size fits on this machine."""
    global _mode
    registry.apply_all("no_storage")
    if _mode is None:
        _mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _mode, HostReads():
        yield _mode


_mode: FakeTensorMode | None = None
"""One for the life of the process: frameworks keep tensors, which only their own mode takes."""
