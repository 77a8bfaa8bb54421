"""Break named functions of the package in this process, as they are imported.

``NEVER_TRAIN_BREAK`` is a list of ``module:attribute[:does]``, separated by blanks; the attribute
raises, or with ``:does`` returns None at once.
"""

import importlib.abc
import importlib.machinery
import os
import sys

BREAKS: dict[str, list[tuple[str, str]]] = {}
for entry in os.environ.get("NEVER_TRAIN_BREAK", "").split():
    name, attribute, *how = entry.split(":")
    BREAKS.setdefault(name, []).append((attribute, how[0] if how else "raises"))


def broken(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("injected")


def skipped(*_args: object, **_kwargs: object) -> None:
    return None


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in BREAKS:
            return None
        if ("", "raises") in BREAKS[fullname]:
            raise ImportError(f"injected: {fullname}")
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            for attribute, how in BREAKS[fullname]:
                owner = module
                *parents, last = attribute.split(".")
                for parent in parents:
                    owner = getattr(owner, parent)
                getattr(owner, last)  # a name that does not exist would break nothing
                setattr(owner, last, skipped if how == "does" else broken)

        spec.loader.exec_module = exec_module
        return spec


if BREAKS:
    sys.meta_path.insert(0, Finder())
