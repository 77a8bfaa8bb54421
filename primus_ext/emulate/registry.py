"""The one registry of everything that this package replaces in other people's modules.

A patch is declared where its replacement is written, with the decorator :func:`patch`, and is
applied from here by group.  A module that is already imported is patched at once; one that is not
is patched right after its import, before anybody can bind a name from it.  A name that a patch
replaces and that is missing (another release) is an error that names patch, module and the
releases it was written for: a silently missing patch would change numbers.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class PatchError(RuntimeError):
    """A patch does not fit the installed release."""


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """One replacement in a module that is not ours."""

    name: str
    """Unique short name."""
    group: str
    """Patches are applied by group: ``accelerator``, ``cpu_training``, ..."""
    module: str
    """The module that is patched; ``apply`` gets it."""
    attributes: tuple[str, ...]
    """Dotted names below ``module`` that are replaced; each must exist beforehand."""
    versions: str
    """Releases that the patch was written for, e.g. ``megatron-core 0.19``."""
    reason: str
    """Why it is needed, in one sentence."""
    apply: Callable[[Any], None]


_patches: dict[str, Patch] = {}
_applied: set[str] = set()
_waiting: dict[str, list[Patch]] = {}
_inspect: Callable[[Patch, ModuleType], bool] | None = None


def patch(
    module: str, *attributes: str, group: str, versions: str, reason: str, name: str = ""
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Declare the decorated function as the ``apply`` of a :class:`Patch`.

    Args:
        module: Module that the function changes.
        attributes: Names in it that the function replaces.
        group: Group to apply it with.
        versions: Releases it was written for.
        reason: Why it is needed.
        name: Unique name; by default the function's own name without leading underscores.
    """

    def register(apply: Callable[[Any], None]) -> Callable[[Any], None]:
        label = name or f"{apply.__module__.rpartition('.')[2]}.{apply.__name__.strip('_')}"
        if label in _patches:
            raise ValueError(f"two patches are named {label!r}")
        _patches[label] = Patch(label, group, module, attributes, versions, reason, apply)
        return apply

    return register


def registered(group: str | None = None) -> tuple[Patch, ...]:
    """All declared patches, or those of one group, in the order of their declaration."""
    return tuple(p for p in _patches.values() if group in (None, p.group))


def is_applied(name: str) -> bool:
    """Whether the patch of that name was applied in this process."""
    return name in _applied


def inspect_with(inspector: Callable[[Patch, ModuleType], bool]) -> None:
    """Show every patch and its module to ``inspector`` first; where it says no, leave it out."""
    global _inspect
    _inspect = inspector


def apply_all(group: str) -> None:
    """Apply every patch of ``group`` now, or as soon as its module is imported.  Idempotent.

    Raises:
        PatchError: If a module lacks a name that a patch replaces.
        ValueError: If no patch of that group is declared.
    """
    patches = registered(group)
    if not patches:
        raise ValueError(f"no patch belongs to group {group!r}")
    for item in patches:
        module = sys.modules.get(item.module)
        if module is not None and not _is_loading(module):
            _apply(item, module)
        elif item not in _waiting.setdefault(item.module, []):
            _waiting[item.module].append(item)
    if _waiting and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def verify(item: Patch, module: ModuleType) -> None:
    """Raise :class:`PatchError` unless ``module`` has every name that ``item`` replaces."""
    for path in item.attributes:
        owner: object = module
        for part in path.split("."):
            if not hasattr(owner, part):
                raise PatchError(
                    f"patch {item.name!r} replaces {item.module}.{path}, which this release does "
                    f"not have (written for {item.versions})"
                )
            owner = getattr(owner, part)


def _apply(item: Patch, module: ModuleType) -> None:
    if item.name in _applied:
        return
    if _inspect is not None and not _inspect(item, module):
        return
    verify(item, module)
    item.apply(module)
    _applied.add(item.name)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _PatchingLoader(importlib.abc.Loader):
    """Runs the real loader, then the patches that wait for the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for item in _waiting.pop(module.__name__, []):
            _apply(item, module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Puts :class:`_PatchingLoader` around the loader of every module that a patch waits for."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec
