"""Experiment trackers that accept everything and do nothing.

A program starts its tracker long before it reaches its training entry point.  Here the tracker's
module is replaced by a stand-in before the program can import it: no run is started, no file
written, no server called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

MODULES = frozenset(
    {
        "aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "tensorboardX",
        "torch.utils.tensorboard", "trackio", "wandb",
    }
)  # fmt: skip


class Silent:
    """Any object of a tracker: callable, subscriptable, a context manager, with any attribute."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __call__(self, *_args: Any, **_kwargs: Any) -> Silent:  # noqa: D102
        return Silent()

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy, pickle and numpy ask for protocols that it has not
            raise AttributeError(name)
        return Silent()

    def __getitem__(self, _key: object) -> Silent:
        return Silent()

    def __setitem__(self, _key: object, _value: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __bool__(self) -> bool:
        return True

    def __fspath__(self) -> str:
        """Return a folder that exists: programs join the run's folder with file names."""
        return tempfile.gettempdir()


class _SilentModule(ModuleType):
    """Names with a capital are classes, so that ``isinstance`` and subclassing work."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Silent,), {}) if name[:1].isupper() else Silent()
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    """Makes a stand-in instead of running the module."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _SilentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    """Finds stand-ins for the modules that are installed, and for all that lies below them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        below = any(fullname.startswith(f"{name}.") for name in MODULES)
        if fullname not in MODULES and not below:
            return None
        if not below and importlib.machinery.PathFinder.find_spec(fullname, path) is None:
            return None  # not installed: the program must see that
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


def silence() -> None:
    """Replace every tracker that is not imported yet.  Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
