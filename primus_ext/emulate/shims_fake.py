"""Replacements in torch for tensors without storage (group ``no_storage``)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.emulate.registry import patch

_TORCH = "torch 2.4 to 2.14"


@patch("torch.nn", "Module._apply", group="no_storage", versions=_TORCH,
       reason="torch swaps fake parameters on conversion, which fails while they are referenced")
def _convert_in_place(module: ModuleType) -> None:
    def apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if recurse:
            for child in self.children():
                child._apply(fn)
        for parameter in self._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    parameter.data = fn(parameter.data)
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad.data)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    module.Module._apply = apply


@patch("torch._subclasses.fake_tensor", "FakeTensor.__torch_dispatch__", group="no_storage",
       versions=_TORCH,
       reason="Transformer Engine's tensors hand an op on their data over with their own types, "
              "which plain tensors ignore and fake ones refuse")
def _foreign_types_are_ignored(module: ModuleType) -> None:
    fake = module.FakeTensor
    original = fake.__torch_dispatch__.__func__

    def dispatch(
        cls: Any, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = original(cls, func, types, args, kwargs)
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if out is NotImplemented and all(type(t) in (torch.Tensor, fake) for t in tensors):
            return func(*args, **(kwargs or {}))
        return out

    fake.__torch_dispatch__ = classmethod(dispatch)


@patch("torch.autograd.profiler", "record_function.__enter__", "record_function.__exit__",
       group="no_storage", versions=_TORCH,
       reason="labels for a profiler, which does not run; FSDP2 puts thousands, each an operator")
def _no_labels(module: ModuleType) -> None:
    module.record_function.__enter__ = lambda self: self
    module.record_function.__exit__ = lambda self, *_error: None
