"""The table of functions that the stand-in extension implements.

Every family module declares its functions with :func:`binding` under the name and with the
positional order of the real binding (``transformer_engine/pytorch/csrc/extensions/pybind.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

BINDINGS: dict[str, Callable[..., Any]] = {}
"""Implemented functions by name."""


def binding(*names: str) -> Callable[[_Function], _Function]:
    """Declare the decorated function as the body of ``tex.<name>`` (default: its own name)."""

    def register(function: _Function) -> _Function:
        for name in names or (function.__name__,):
            if name in BINDINGS:
                raise ValueError(f"transformer_engine_torch.{name} has two bodies")
            BINDINGS[name] = function
        return function

    return register


def unimplemented(name: str) -> Callable[..., Any]:
    """A function that says that the stand-in has no body for ``name``."""

    def missing(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine_torch.{name} is not emulated: the stand-in of Transformer "
            "Engine's compiled extension has no body for it"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
