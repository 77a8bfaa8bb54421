"""Host memory on a virtual device whose own tensors are CPU tensors (offloading).

A program asks for host memory with ``device="cpu"``, ``pin_memory=True``, ``.cpu()`` or
``.to("cpu")``.  A ``torch.device("cpu")`` object says nothing, as the virtual device's own tensors
answer with it too; offloading code pins what it makes with one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from primus_ext.observe import host_memory, recorder


def asked_for(kwargs: dict[str, Any]) -> bool | None:
    """Whether the keyword arguments of a factory function ask for host memory; None: for neither.

    Args:
        kwargs: As the program gave them.
    """
    device = kwargs.get("device")
    if kwargs.get("pin_memory"):
        return True
    if isinstance(device, str):
        return device.partition(":")[0] == "cpu"
    is_device = type(device) is int or (device is not None and device.type == "cuda")
    return False if is_device or device is torch.cuda.current_device() else None


def placed(kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Where the results of a factory function with these keyword arguments lie."""
    if not kwargs or recorder.current() is None:
        return contextlib.nullcontext()
    on_host = asked_for(kwargs)
    return contextlib.nullcontext() if on_host is None else host_memory.placed(on_host)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the observed program put this tensor into host memory."""
    active = recorder.current()
    return active is not None and host_memory.holds(active, tensor)


def to_device(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: a copy of what lies in host memory, else the tensor itself."""
    return host_memory.copied_to_device(tensor) if is_on_host(tensor) else tensor


def to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.cpu``: a copy of what lies in device memory, else what torch does."""
    apart = recorder.current() is not None and not host_memory.one_memory
    if not apart or is_on_host(tensor) or not tensor.is_cuda:
        return _cpu(tensor, *args, **kwargs)
    return host_memory.copied_to_host(tensor)


_cpu = torch.Tensor.cpu


def pinned(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``Tensor.pin_memory``: host memory again, of the same size."""
    return host_memory.copied_to_host(tensor) if is_on_host(tensor) else tensor


def moved(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
) -> Any:
    """``Tensor.to`` between host and device.

    Args:
        func: ``Tensor.to`` itself, which still changes the dtype.
        args: Its arguments with the device replaced.
        kwargs: Its keyword arguments with the device replaced.
        target: The device asked for: a string or ``torch.device``.
    """
    tensor = args[0]
    name = target if isinstance(target, str) else None
    if name is not None and name.partition(":")[0] == "cpu":
        tensor = to_host(tensor)
    elif is_on_host(tensor):
        tensor = to_device(tensor)
    return func(tensor, *args[1:], **kwargs)
