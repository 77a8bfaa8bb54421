"""Know which part of the model is running, forward and backward, without touching the modules.

Forward hooks say where the forward is.  A hook on the gradient of a part's output fires when its
backward is about to start; full backward hooks are not used, as they wrap outputs in views and
break some of Megatron's layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from primus_ext.observe.recorder import Recorder
from primus_ext.trace import Call, ScopeKind, Segment

OUTPUT = "output"
"""Name of the one segment that final norm, output layer and loss make together."""

Part = tuple[ScopeKind, str, nn.Module]


class Scopes:
    """Hooks on the parts of one model chunk that keep ``recorder.scope`` and ``phase`` right."""

    def __init__(self, recorder: Recorder, parts: Iterable[Part]) -> None:
        """Install the hooks.

        Args:
            recorder: The recorder to keep informed.
            parts: Kind, name and module of every part; parts don't contain each other.
        """
        self._recorder = recorder
        self.in_backward = False
        for kind, name, module in parts:
            self._hook_part(kind, name, module)
            for inner_name, inner in module.named_modules():
                full = f"{name}.{inner_name}" if inner_name else name
                inner.register_forward_pre_hook(self._pusher(full))
                inner.register_forward_hook(self._popper, always_call=True)

    def _hook_part(self, kind: ScopeKind, name: str, module: nn.Module) -> None:
        scope = (kind, OUTPUT if kind is ScopeKind.OUTPUT else name)

        def enter(*_: Any) -> None:
            self._recorder.scope = scope
            self._recorder.phase = "recompute" if self.in_backward else "forward"

        def backward_starts(_: torch.Tensor) -> None:
            self._recorder.scope = scope
            self._recorder.phase = "backward"

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self.in_backward and kind is not ScopeKind.OUTPUT:
                self._recorder.scope = (ScopeKind.OTHER, "")
            for tensor in tree_iter(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(backward_starts)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _pusher(self, full: str) -> Any:
        def push(*_: Any) -> None:
            self._recorder.modules.append(full)

        return push

    def _popper(self, *_: Any) -> None:
        if self._recorder.modules:
            self._recorder.modules.pop()


def segments(
    forward: list[tuple[ScopeKind, str, Call]], backward: list[tuple[ScopeKind, str, Call]]
) -> tuple[Segment, ...]:
    """Group calls by part of the model; equal parts (same calls in the same order) are merged."""
    order: dict[tuple[ScopeKind, str], tuple[list[Call], list[Call]]] = {}
    for side, recorded in enumerate((forward, backward)):
        places: list[tuple[list[Call], int]] = []
        for kind, name, call in recorded:
            part = order.setdefault((kind, name), ([], []))[side]
            places.append((part, len(part)))
            part.append(_within(call, places))
    merged: dict[tuple, tuple[str, int]] = {}
    for (kind, name), (ahead, back) in order.items():
        key = (kind, tuple(ahead), tuple(back))
        first, count = merged.get(key, (name, 0))
        merged[key] = (first, count + 1)
    return tuple(
        Segment(kind=kind, name=name, count=count, forward=ahead, backward=back)
        for (kind, ahead, back), (name, count) in merged.items()
    )


def _within(call: Call, places: list[tuple[list[Call], int]]) -> Call:
    """The call with what it waits for counted in its part; other parts are over before."""
    if not call.after:
        return call
    part, here = places[-1]
    others = (places[len(places) - 1 - back] for back in call.after)
    after = tuple(here - there for other, there in others if other is part)
    return dataclasses.replace(call, after=after)
