"""Opaque custom operators, one per kernel of the real extension, in namespace ``primus_te``.

A dispatch mode (fake tensors, recorder) sees each kernel as one call with its tensors and its
scalar attributes as arguments; what happens inside is not seen.  Every operator has a CPU kernel
that computes real numbers and a fake kernel that only states the outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "primus_te"

_library = torch.library.Library(NAMESPACE, "DEF")


@dataclasses.dataclass(frozen=True, slots=True)
class OpDef:
    """One registered operator."""

    name: str
    """Without namespace, with overload: ``gemm`` or ``gemm.out``."""
    schema: str
    cpu: Callable[..., Any]
    fake: Callable[..., Any]


OPS: dict[str, OpDef] = {}
"""Every operator by name (with overload)."""


def define(
    schema: str, *, fake: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as the CPU kernel of a new operator and return the operator.

    Args:
        schema: ``name[.overload](arguments) -> results`` in the syntax of ``torch.library``.
        fake: Kernel for fake tensors: same signature, returns empty tensors of the right sizes,
            never touches data and allocates nothing that the real kernel does not return.

    Returns:
        A decorator whose result is the callable overload, e.g. ``torch.ops.primus_te.gemm.out``.
    """
    qualified = schema.partition("(")[0].strip()
    base, _, overload = qualified.partition(".")

    def register(cpu: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(qualified, _without_views(cpu), "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{qualified}", fake, lib=_library)
        OPS[qualified] = OpDef(qualified, schema, cpu, fake)
        packet = getattr(getattr(torch.ops, NAMESPACE), base)
        return getattr(packet, overload or "default")

    return register


def _without_views(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, below autograd: a view in its result would keep alive what it is a view of."""

    @functools.wraps(cpu)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return cpu(*args, **kwargs)

    return run


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Fake kernel of an operator that only writes into its arguments."""
