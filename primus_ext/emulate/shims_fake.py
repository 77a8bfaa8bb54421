"""Replacements in torch for tensors without storage (group ``no_storage``)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

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
