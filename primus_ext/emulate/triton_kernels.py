"""Triton kernels on a device that is not there: nothing runs, what they move is recorded.

Which pointers a kernel reads and which it writes is taken from its source: a pointer argument is
read if it, or a name computed from it, is the address of a ``tl.load`` or an atomic, and written
if it is the address of a ``tl.store`` or an atomic.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.host_tensor import HostTensor
from primus_ext.emulate.registry import patch
from primus_ext.observe import recorder

GROUP = "triton"
_TRITON = "triton 3.x"
on_real_tensors: Callable[[Any, dict[str, torch.Tensor]], None] | None = None
"""Runs in place of a kernel whose tensors have data; by default that is refused."""
_LOADS, _STORES = ("load",), ("store",)


@functools.cache
def pointer_uses(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Arguments of a kernel that are read, and those that are written.

    Args:
        source: Source of the kernel function.
    """
    tree = ast.parse(textwrap.dedent(source))
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    origin = {a.arg: {a.arg} for a in function.args.args}
    assignments = [n for n in ast.walk(function) if isinstance(n, (ast.Assign, ast.AugAssign))]
    for _ in range(2):  # a second pass for names that loops carry
        for node in assignments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and _is_address(node.value):
                        origin.setdefault(name.id, set()).update(_sources(node.value, origin))
    read: set[str] = set()
    written: set[str] = set()
    for call in (n for n in ast.walk(function) if isinstance(n, ast.Call) and n.args):
        kind = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        sources = _sources(call.args[0], origin)
        if kind in _LOADS or kind.startswith("atomic"):
            read |= sources
        if kind in _STORES or kind.startswith("atomic"):
            written |= sources
    return frozenset(read), frozenset(written)


def _is_address(value: ast.expr) -> bool:
    """Loaded values are data, not addresses."""
    return not any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _LOADS
        for n in ast.walk(value)
    )


def _sources(value: ast.expr, origin: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    for name in ast.walk(value):
        if isinstance(name, ast.Name):
            found |= origin.get(name.id, set())
    return found


def _launch(kernel: Any, args: tuple, kwargs: dict) -> None:
    """Record one launch of a JIT function."""
    bound = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    tensors = {k: v for k, v in bound.items() if isinstance(v, torch.Tensor)}
    if any(not isinstance(t, (FakeTensor, HostTensor)) for t in tensors.values()):
        if on_real_tensors is not None:
            return on_real_tensors(kernel, tensors)
        raise NotImplementedError(
            f"the Triton kernel {kernel.fn.__name__} needs a device; without one only its "
            "memory traffic is known"
        )
    active = recorder.current()
    if active is None:
        return
    read, written = pointer_uses(kernel.src)
    active.kernel(
        f"triton.{kernel.fn.__name__}",
        [t for k, t in tensors.items() if k in read],
        [t for k, t in tensors.items() if k in written],
    )


def _innermost(kernel: Any) -> Any:
    """The JIT function below autotuners and heuristics."""
    while not hasattr(kernel, "src"):
        kernel = kernel.fn
    return kernel


def _run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
    _launch(_innermost(self), args, kwargs)


@patch("triton.runtime.jit", "JITFunction.run", group=GROUP, versions=_TRITON,
       reason="a launch compiles for, and runs on, a device")
def _jit(module: ModuleType) -> None:
    module.JITFunction.run = _run


@patch("triton.runtime.autotuner", "Autotuner.run", "Heuristics.run", group=GROUP,
       versions=_TRITON, reason="an autotuner measures on a device")
def _autotuner(module: ModuleType) -> None:
    module.Autotuner.run = _run
    module.Heuristics.run = _run
