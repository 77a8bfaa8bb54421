"""Time the parts of a model, forward and backward, without touching the modules.

The hooks are those of :mod:`primus_ext.observe.scopes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from primus_ext.observe.scopes import OUTPUT, Part, named, watch_part
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
            self._hook(kind, named(kind, name), module)

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

        def switch(direction: str, kind: ScopeKind, name: str) -> None:
            if watch.running:
                watch.switch(PartKey(self._chunk, direction, kind, name))

        def enter() -> None:  # inside a backward: the part is computed again
            switch(self._direction, kind, name)

        def leave() -> None:
            if self._direction == "forward" and kind is not ScopeKind.OUTPUT:
                switch("forward", ScopeKind.OTHER, "")

        watch_part(module, enter, leave, lambda: switch("backward", kind, name))
