"""Which tensors lie in host memory, and what is copied between host and device.

On the virtual device every tensor is a CPU tensor.  Those that a program puts into host memory on
purpose (offloading) are known by their storage: the storage of a tensor made inside
:func:`placed`, or by an op whose tensor arguments all lie there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.observe.specs import spec
from primus_ext.trace import Family, Op

if TYPE_CHECKING:
    from primus_ext.observe.recorder import Recorder

one_memory = False
"""Whether the device is the host: then nothing lies apart from it."""
_asked: list[bool] = []
"""Where the enclosing calls asked for their results: True for host memory."""


@contextlib.contextmanager
def placed(on_host: bool) -> Iterator[None]:
    """Tensors that are made inside lie in host memory, or in device memory."""
    _asked.append(on_host and not one_memory)
    try:
        yield
    finally:
        _asked.pop()


def holds(recorder: Recorder, tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in host memory."""
    return bool(recorder.host.tracked) and recorder.host.holds(tensor)


def made_on_host(recorder: Recorder, args: tuple, kwargs: dict) -> bool:
    """Whether an op with these arguments makes its results in host memory.

    Scalars (0-dim tensors) don't decide where an op runs, as in torch itself.
    """
    if _asked:
        return _asked[-1]
    if not recorder.host.tracked:
        return False
    read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    deciding = [t for t in read if t.dim()] or read
    return bool(deciding) and all(recorder.host.holds(t) for t in deciding)


def transfer(recorder: Recorder, func: Any, args: tuple) -> Op | None:
    """The copy between host and device behind ``aten.copy_``; None if it is another op or copy."""
    if not recorder.host.tracked or func is not torch.ops.aten.copy_.default:
        return None
    into, source = args[0], args[1]
    to_host, from_host = recorder.host.holds(into), recorder.host.holds(source)
    if to_host == from_host:
        return None
    direction = "d2h" if to_host else "h2d"
    return Op(
        name=f"memcpy.{direction}",
        family=Family.TRANSFER,
        inputs=(spec(source),),
        outputs=(spec(into),),
        flops=0,
        bytes=into.numel() * into.element_size(),
        attrs=(("direction", direction),),
    )


def by_host(op: Op) -> Op:
    """The same work done by the host: no device work."""
    return dataclasses.replace(op, name=f"host.{op.name}", family=Family.HOST)


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, without gradient history."""
    with torch.no_grad():
        with placed(on_host=True):
            copy = torch.empty_like(tensor)
        return copy.copy_(tensor)


def copied_to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in device memory, without gradient history."""
    with torch.no_grad():
        with placed(on_host=False):
            copy = torch.empty_like(tensor)
        return copy.copy_(tensor)
