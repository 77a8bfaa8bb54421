"""The one canary: does every name that this package replaces or mimics exist in these releases?

``python -m primus_ext.frameworks.canary OUT.json`` installs the virtual world, imports what the
patches of :mod:`primus_ext.emulate.registry` are for, and writes what it found.  Run over two sets
of releases, the two files tell which names vanished and which changed (``scripts/newest``).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from primus_ext.emulate import bootstrap, registry, releases

NO_MODULE, NO_NAME = "module is missing", "name is missing"
_ROOMS = ("primus_ext.emulate", "primus_ext.frameworks")
_REQUEST: dict[str, Any] = {
    "world_size": 8, "gpus_per_node": 8, "frameworks": ["primus_ext.frameworks.megatron.entry"],
    "device": {
        "name": "h100", "compute_capability": [9, 0], "total_memory": 80 * 2**30,
        "multi_processor_count": 132, "warp_size": 32,
    },
}  # fmt: skip


def main(path: str) -> None:
    """Write what is found as JSON.

    Args:
        path: The file: ``releases`` by package; ``names``, by patch and dotted name what it
            ``takes`` and a hash of its ``body``, or what is ``missing``; ``unknown``, what
            Transformer Engine takes from its extension and the stand-in lacks, or can't be called
            with.
    """
    names: dict[str, dict[str, str]] = {}

    def inspector(item: registry.Patch, module: ModuleType) -> bool:
        found = {f"{item.name}|{item.module}.{a}": _look(module, a) for a in item.attributes}
        for key, value in found.items():
            names.setdefault(key, value)
        return not any("missing" in value for value in found.values())

    registry.inspect_with(inspector)
    bootstrap.install(_REQUEST)
    unfit = _declare()
    for item in registry.registered():
        try:
            module = importlib.import_module(item.module)
        except Exception as error:  # whatever another release raises, its names are not there
            told = {"missing": f"{NO_MODULE} ({type(error).__name__})"}
            for attribute in item.attributes:
                names.setdefault(f"{item.name}|{item.module}.{attribute}", told)
            continue
        inspector(item, module)
    found = {r.package: releases.found(r) or "absent" for r in releases.NEEDED}
    answer = {"releases": found, "names": names, "unknown": _unknown(), "unfit": unfit}
    Path(path).write_text(json.dumps(answer, indent=1))


def differences(pinned: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What is different in other releases: the name, the patch, what happened to it.

    Args:
        pinned: What :func:`main` wrote with the releases that are tested.
        other: What it wrote with others.
    """
    rows = []
    for key, before in pinned["names"].items():
        patch, _, name = key.partition("|")
        after = other["names"].get(key, {"missing": NO_NAME})
        if "missing" in before:
            continue
        if "missing" in after:
            rows.append((name, patch, f"vanished: {after['missing']}"))
        elif before["takes"] != after["takes"]:
            rows.append((name, patch, _change(before["takes"], after["takes"])))
        elif before["body"] != after["body"]:
            rows.append((name, patch, "its body changed"))
    for name in sorted(set(other["unknown"]) - set(pinned["unknown"])):
        rows.append((f"transformer_engine_torch: {name}", "te", "does not fit the stand-in"))
    for name in sorted(set(other["unfit"]) - set(pinned["unfit"])):
        rows.append((name, "", f"can't be imported: {other['unfit'][name]}"))
    return rows


def _declare() -> dict[str, str]:
    """Import every module of the two rooms, so that all patches are declared; what fails to."""
    unfit: dict[str, str] = {}
    for room in _ROOMS:
        package = importlib.import_module(room)
        for found in pkgutil.walk_packages(package.__path__, f"{room}."):
            if found.name == __name__:
                continue
            try:
                importlib.import_module(found.name)
            except Exception as error:  # another release may raise anything
                unfit[found.name] = f"{type(error).__name__}: {error}"
    return unfit


def _look(module: ModuleType, path: str) -> dict[str, str]:
    """Parameters and hash of one name, or what is missing."""
    value: Any = module
    for part in path.split("."):
        if not hasattr(value, part):
            return {"missing": NO_NAME}
        value = getattr(value, part)
    value = inspect.unwrap(value) if callable(value) else value
    return {"takes": _parameters(value), "body": _body(value)}


def _parameters(value: Any) -> str:
    """Names of its parameters in their order, a mark at those with a default; or its type."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return type(value).__name__
    return ", ".join(p.name + ("=" if p.default is not p.empty else "") for p in parameters)


def _change(before: str, after: str) -> str:
    """What is different between two lists of parameters."""
    old, new = ([n for n in names.split(", ") if n] for names in (before, after))
    lost, gained = [n for n in old if n not in new], [n for n in new if n not in old]
    if not lost and not gained:
        return "takes its parameters in another order"
    words = [f"no longer takes {', '.join(lost)}"] if lost else []
    return "; ".join(words + ([f"also takes {', '.join(gained)}"] if gained else []))


def _body(value: Any) -> str:
    """A hash of the statements of a function or class, without its comments and layout."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (TypeError, OSError, SyntaxError):
        return ""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _unknown() -> list[str]:
    from primus_ext.emulate.te import mentions, module

    try:
        stand_in = sys.modules[module.MODULE_NAME]
        return sorted(mentions.lacking(stand_in) | mentions.misfits(stand_in))
    except ModuleNotFoundError:
        return []


if __name__ == "__main__":
    main(sys.argv[1])
