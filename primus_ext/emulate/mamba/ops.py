"""Opaque operators of the stand-ins of ``mamba_ssm`` and ``causal_conv1d`` (``primus_mamba``).

Every operator writes into tensors that its caller allocated, in the order in which the real
package allocates them.  ``workspace`` are intermediates that the real kernels write and read; the
CPU kernels leave them as they are.  ``flops`` is the operator's work, computed by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "primus_mamba"

_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the decorated function as the CPU kernel of a new operator and return the operator.

    Args:
        schema: ``name(arguments) -> ()`` in the syntax of ``torch.library``.
    """
    name = schema.partition("(")[0].strip()

    def register(cpu: Callable[..., None]) -> Callable[..., None]:
        _library.define(schema)
        _library.impl(name, cpu, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _nothing, lib=_library)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return register


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Nothing is allocated inside."""


def gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor | None], grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """Gradients of ``function(*inputs)`` in single precision, from inside a CPU kernel.

    Args:
        function: Differentiable; gets the inputs in fp32.
        inputs: Tensors, or None where an argument is absent.
        grad: Of the function's result.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)
    with (
        torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutogradCPU),
        torch._C._ForceDispatchKeyGuard(
            torch._C._dispatch_tls_local_include_set() | keys,
            torch._C._dispatch_tls_local_exclude_set() - keys
            - torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView),
        ),
        torch.enable_grad(),
    ):
        leaves = [None if t is None else t.detach().float().requires_grad_() for t in inputs]
        result = function(*leaves)
        present = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(result, present, grad.float(), allow_unused=True))
    return [None if t is None else next(found) for t in leaves]
