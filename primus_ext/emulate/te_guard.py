"""Transformer Engine's wheel without its library counts as absent, instead of stopping Megatron.

The wheel that pip installs without a CUDA extra holds Python code only and raises a
``RuntimeError`` where it is imported.  Megatron does without Transformer Engine, but only where
the import raises a ``ModuleNotFoundError``; so a script that imports Megatron at its top would be
stopped before Hydra, and with it a projection, could begin.  The import still fails, with the same
words: only the kind of error is another one.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # the name that type checkers know; importing typing would cost 8 ms
if TYPE_CHECKING:
    from typing import Any

_PACKAGE = "transformer_engine"
_EMPTY = "Found empty `transformer-engine` meta package installed"
"""How Transformer Engine's own message begins (``common/__init__.py``, 2.20)."""


class _Loader:
    """The real loader, with the kind of one error changed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if not str(error).startswith(_EMPTY):
                raise
            raise ModuleNotFoundError(str(error), name=_PACKAGE) from error


class _Finder:
    """Puts :class:`_Loader` around the loader that the other finders give."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _PACKAGE or self._searching:
            return None
        self._searching = True
        try:
            spec = _first(fullname, path, target)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _first(fullname: str, path: Any, target: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(fullname, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None


def install() -> None:
    """Guard imports of Transformer Engine from now on.  Idempotent; imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
