"""The state of modules as it was: what a fork of the process would not have changed.

Frameworks keep global variables, caches of tensors and counters for the life of a process.  A
process that is one rank after another puts them back in between, so that each finds what a fresh
process has, while code, torch's own caches and whatever was imported stay warm.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOTS = ("megatron", "transformer_engine", "__main__")
_INSTALLED = tuple({sys.prefix, sys.base_prefix, str(Path(os.__file__).resolve().parent)})
_CONTAINERS = frozenset(
    {dict, list, set, collections.OrderedDict, collections.defaultdict, collections.deque}
)
_MISSING = object()


def _is_kept(name: str, module: Any) -> bool:
    """Whether a module is one of the frameworks' or of the user's program."""
    root = name.partition(".")[0]
    if not isinstance(module, ModuleType) or root == "primus_ext":
        return False
    file = getattr(module, "__file__", None) or ""
    return root in _ROOTS or (bool(file) and not file.startswith(_INSTALLED))


class State:
    """Global variables, attributes of classes, and caches at one moment."""

    def __init__(self, growing: Iterable[Any] = ()) -> None:
        """Note the present.

        Args:
            growing: Containers whose contents stay as they will be.
        """
        self._owners: dict[str, list[_Attributes]] = {}
        self._growing = frozenset(map(id, growing))
        self._environment = dict(os.environ)
        self._note_imports()

    def restore(self) -> None:
        """Put everything back.

        Of a module that was imported since nothing is known but that its caches were empty; what
        else it holds now counts from here on.
        """
        for owners in self._owners.values():
            for owner in owners:
                owner.restore()
        for owner in self._note_imports():
            owner.clear_caches()
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)

    def _note_imports(self) -> list[_Attributes]:
        found = []
        for name, module in list(sys.modules.items()):
            if name not in self._owners and _is_kept(name, module):
                parts = [module, *_classes(name, module)]
                owners = [_Attributes(part, self._growing) for part in parts]
                self._owners[name] = owners
                found += owners
        return found


class _Attributes:
    """Those of one module or class."""

    def __init__(self, owner: Any, growing: frozenset[int]) -> None:
        self._owner = owner
        self._size = len(vars(owner))
        self._values = dict(_data(vars(owner)))
        values = self._values.values()
        self._contents = [
            (v, v.copy()) for v in values if type(v) in _CONTAINERS and id(v) not in growing
        ]
        self._caches = [v for v in values if isinstance(v, functools._lru_cache_wrapper)]
        self._cached = [cache.cache_info().currsize for cache in self._caches]

    def restore(self) -> None:
        now = vars(self._owner)
        for name, value in self._values.items():
            if now.get(name, _MISSING) is not value:
                setattr(self._owner, name, value)
        if len(now) != self._size:
            for name, value in list(_data(now)):
                if name not in self._values and not isinstance(value, ModuleType):
                    delattr(self._owner, name)
            self._size = len(now)
        for container, content in self._contents:
            _refill(container, content)
        for cache, before in zip(self._caches, self._cached, strict=True):
            if cache.cache_info().currsize != before:
                cache.cache_clear()

    def clear_caches(self) -> None:
        for cache in self._caches:
            cache.cache_clear()


def _data(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(namespace.items()):
        if not (name.startswith("__") and name.endswith("__")):
            yield name, value


def _classes(name: str, module: ModuleType) -> Iterator[type]:
    """The classes that a module defines."""
    for _, value in _data(vars(module)):
        if isinstance(value, type) and value.__module__ == name:
            yield value


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, (list, collections.deque)):
        if len(container) != len(content) or any(
            a is not b for a, b in zip(container, content, strict=True)
        ):
            container.clear()
            container.extend(content)
    else:
        container.clear()
        container.update(content)
