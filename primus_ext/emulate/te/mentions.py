"""Names that Transformer Engine's Python code takes from its compiled extension."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

from primus_ext.emulate.te.module import MODULE_NAME

_PARTS = ("pytorch", "common", "debug")


def mentioned() -> frozenset[str]:
    """Dotted names below ``transformer_engine_torch`` that the installed release mentions.

    Raises:
        ModuleNotFoundError: Transformer Engine is not installed.
    """
    return frozenset(n for path in _files() for n in _mentions(ast.parse(path.read_text())))


def _files() -> list[Path]:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("transformer_engine is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    return [path for part in _PARTS for path in sorted((root / part).rglob("*.py"))]


def lacking(stand_in: object) -> frozenset[str]:
    """Mentioned names that ``stand_in`` does not have."""
    return frozenset(name for name in mentioned() if not _has(stand_in, name))


def misfits(stand_in: object) -> frozenset[str]:
    """Calls of the installed release that a function of ``stand_in`` can't take as they are."""
    found = set()
    for path in _files():
        tree = ast.parse(path.read_text())
        aliases = _aliases(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            root, chain = _attribute(node.func)
            if root in aliases and len(chain) == 1 and not _takes(stand_in, chain[0], node):
                found.add(f"{path.name}:{node.lineno} {chain[0]}")
    return frozenset(found)


def _takes(stand_in: object, name: str, call: ast.Call) -> bool:
    """Whether the arguments of ``call`` fit; unpacked ones, and classes, are not looked at."""
    function = getattr(stand_in, name, None)
    unpacked = [a for a in call.args if isinstance(a, ast.Starred)]
    if unpacked or not inspect.isfunction(function) or any(k.arg is None for k in call.keywords):
        return True
    try:
        inspect.signature(function).bind(*call.args, **{str(k.arg): k for k in call.keywords})
    except TypeError:
        return False
    return True


def _has(value: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def _aliases(tree: ast.AST) -> set[str]:
    """Names by which one file knows the extension."""
    return {
        item.asname or item.name
        for node in ast.walk(tree) if isinstance(node, ast.Import)
        for item in node.names if item.name == MODULE_NAME
    }  # fmt: skip


def _mentions(tree: ast.AST) -> Iterator[str]:
    """Dotted names that one file takes from the extension."""
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(MODULE_NAME):
            inside = (node.module or "").removeprefix(MODULE_NAME).lstrip(".")
            yield from (f"{inside}.{i.name}".lstrip(".") for i in node.names if i.name != "*")
        root, chain = _attribute(node)
        if chain and root in aliases:
            yield ".".join(chain)


def _attribute(node: ast.AST) -> tuple[str, list[str]]:
    """The name at the root of a chain of attributes, and the attributes."""
    chain: list[str] = []
    while isinstance(node, ast.Attribute):
        chain.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), chain
