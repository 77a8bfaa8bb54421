"""Small tensors with real values in a world of tensors without storage.

What the host needs to know (token counts, split sizes) must survive views and arithmetic, while
fake-tensor mode would turn the result of any operation into a fake one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map_only

from primus_ext.observe import recorder
from primus_ext.observe.allocator_meter import HOST, region


@contextlib.contextmanager
def host_values() -> Iterator[None]:
    """Real tensors inside; nothing of it is device work, so nothing is recorded."""
    active = recorder.current()
    with active.silent() if active else region(HOST), unset_fake_temporarily():
        yield


class HostTensor(torch.Tensor):
    """A real tensor whose operations stay real."""

    memory: torch.Tensor | None = None
    """Without values: what it takes of the device, for as long as it or a view of it lives.  What
    is computed from a tensor that has it takes memory as well."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compute on the host, unless a tensor of the device takes part."""
        if any(_on_device(t) for t in tree_iter((args, kwargs))):
            args, named = tree_map_only(HostTensor, _plain, (args, dict(kwargs or {})))
            return func(*args, **named)
        with host_values():
            result = super().__torch_function__(func, types, args, kwargs or {})
        sources = [t for t in tree_iter(args) if isinstance(t, HostTensor) and t.memory is not None]
        for made in tree_iter(result) if sources else ():
            if isinstance(made, HostTensor) and made.memory is None:
                made.memory = _memory_of(made, sources)
        return result


def _on_device(value: Any) -> bool:
    """Without storage or, where all tensors are real, not marked as the host's."""
    if isinstance(value, FakeTensor):
        return True
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is None and isinstance(value, torch.Tensor) and not isinstance(value, HostTensor)


def _plain(value: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def _memory_of(made: HostTensor, sources: list[HostTensor]) -> torch.Tensor | None:
    """That of the tensor of which ``made`` is a view, else as much as ``made`` takes."""
    with torch._C.DisableTorchFunctionSubclass():
        place = made.untyped_storage().data_ptr()
        for source in sources:
            if source.untyped_storage().data_ptr() == place:
                return source.memory
    return torch.empty(made.shape, dtype=made.dtype)


def keep(value: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
    """The same tensor, with operations that stay real.

    Args:
        value: A real tensor.
        memory: A tensor without values that is kept as long as it: what it takes of the device.
    """
    kept = value.as_subclass(HostTensor)
    kept.memory = memory
    return kept


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with values: what it makes lies in host memory."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with host_values():
            return function(*args, **kwargs)

    return run
