"""Time the parts of a model, forward and backward, without touching the modules.

The hooks are those of :mod:`primus_ext.observe.scopes`: forward hooks, and a hook on the gradient
of a part's output, which fires when its backward is about to start.  Full backward hooks are not
used: they wrap outputs in views and break some of Megatron's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from primus_ext.observe.scopes import OUTPUT, Part
from primus_ext.observe.stopwatch import Stopwatch
from primus_ext.trace import ScopeKind


class PartKey(NamedTuple):
    """One direction of one part of a model chunk."""

    chunk: int
    direction: str
    """forward or backward."""
    kind: ScopeKind
    name: str


class PartTimer:
    """Hooks on the parts of one model chunk that tell a stopwatch what runs."""

    def __init__(self, watch: Stopwatch, chunk: int, parts: Iterable[Part]) -> None:
        """Install the hooks.

        Args:
            watch: It is told.
            chunk: Number of the chunk on its rank.
            parts: Kind, name and module of every part; parts don't contain each other.
        """
        self._watch, self._chunk = watch, chunk
        self._direction = "forward"
        self.order: list[tuple[ScopeKind, str]] = []
        """Kind and name of every part, final norm, output layer and loss being one."""
        for kind, name, module in parts:
            self._hook(kind, OUTPUT if kind is ScopeKind.OUTPUT else name, module)

    def begin(self, direction: str) -> None:
        """A forward or backward of the chunk starts."""
        self._direction = direction
        first_back = direction == "backward" and (ScopeKind.OUTPUT, OUTPUT) in self.order
        kind, name = (ScopeKind.OUTPUT, OUTPUT) if first_back else (ScopeKind.OTHER, "")
        self._watch.switch(PartKey(self._chunk, direction, kind, name))

    def _hook(self, kind: ScopeKind, name: str, module: nn.Module) -> None:
        if (kind, name) not in self.order:
            self.order.append((kind, name))
        watch = self._watch

        def enter(*_: Any) -> None:  # inside a backward: the part is computed again
            if watch.running:
                watch.switch(PartKey(self._chunk, self._direction, kind, name))

        def backward_starts(_: torch.Tensor) -> None:
            if watch.running:
                watch.switch(PartKey(self._chunk, "backward", kind, name))

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if not watch.running:
                return
            if self._direction == "forward" and kind is not ScopeKind.OUTPUT:
                watch.switch(PartKey(self._chunk, "forward", ScopeKind.OTHER, ""))
            for tensor in tree_iter(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(backward_starts)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
