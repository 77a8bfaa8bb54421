"""Know which part of the model is running, forward and backward, without touching the modules.

Forward hooks say where the forward is.  A hook on the gradient of a part's output fires when its
backward is about to start; full backward hooks are not used, as they wrap outputs in views and
break some of Megatron's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from primus_ext.observe.recorder import Recorder
from primus_ext.trace import Call, ScopeKind, Segment

OUTPUT = "output"
"""Name of the one segment that final norm, output layer and loss make together."""

Part = tuple[ScopeKind, str, nn.Module]


def named(kind: ScopeKind, name: str) -> str:
    """What a part is called: final norm, output layer and loss are one."""
    return OUTPUT if kind is ScopeKind.OUTPUT else name


def watch_part(
    module: nn.Module, enter: Callable[[], None], leave: Callable[[], None],
    backward_starts: Callable[[], None], before_others: bool = False,
) -> None:  # fmt: skip
    """Call back where a part of a model begins and ends, and where its backward begins.

    Args:
        module: The part.
        enter: Its forward begins, also where it is computed again inside a backward.
        leave: Its forward has ended.
        backward_starts: The gradient of its output is there.
        before_others: Hooks that the part has already run inside.
    """
    def entered(*_: Any) -> None:
        enter()

    def gradient_came(_: torch.Tensor) -> None:
        backward_starts()

    def left(_module: nn.Module, _args: Any, output: Any) -> None:
        leave()
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(gradient_came)

    module.register_forward_pre_hook(entered, prepend=before_others)
    module.register_forward_hook(left, prepend=before_others)


class Scopes:
    """Hooks on the parts of one model chunk that keep ``recorder.scope`` and ``phase`` right."""

    def __init__(
        self, recorder: Recorder, parts: Iterable[Part], before_others: bool = False
    ) -> None:
        """Install the hooks.

        Args:
            recorder: The recorder to keep informed.
            parts: Kind, name and module of every part; parts don't contain each other.
            before_others: Hooks that the parts have already (those of sharded data parallelism,
                which gather the parameters) run inside the part.
        """
        self._recorder = recorder
        self._before_others = before_others
        self.in_backward = False
        self._again: int | None = None
        """Modules that were running when the backward went into one of them again."""
        for kind, name, module in parts:
            self._hook_part(kind, name, module)
            for inner_name, inner in module.named_modules():
                full = f"{name}.{inner_name}" if inner_name else name
                inner.register_forward_pre_hook(self._pusher(full))
                inner.register_forward_hook(self._popper, always_call=True)

    def _hook_part(self, kind: ScopeKind, name: str, module: nn.Module) -> None:
        scope = (kind, named(kind, name))

        def enter() -> None:
            self._recorder.scope = scope
            self._recorder.phase = "recompute" if self.in_backward else "forward"

        def leave() -> None:
            if not self.in_backward and kind is not ScopeKind.OUTPUT:
                self._recorder.scope = (ScopeKind.OTHER, "")

        def backward_starts() -> None:
            self._recorder.scope = scope
            self._recorder.phase = "backward"

        watch_part(module, enter, leave, backward_starts, self._before_others)

    def _pusher(self, full: str) -> Any:
        def push(*_: Any) -> None:
            if self.in_backward and self._recorder.phase == "backward":
                self._again, self._recorder.phase = len(self._recorder.modules), "recompute"
            self._recorder.modules.append(full)

        return push

    def _popper(self, *_: Any) -> None:
        if self._recorder.modules:
            self._recorder.modules.pop()
        if self._again is not None and len(self._recorder.modules) <= self._again:
            self._again, self._recorder.phase = None, "backward"


def segments(
    forward: list[tuple[ScopeKind, str, Call]], backward: list[tuple[ScopeKind, str, Call]]
) -> tuple[Segment, ...]:
    """Group calls by part of the model; equal parts (same calls in the same order) are merged."""
    order: dict[tuple[ScopeKind, str], tuple[list[Call], list[Call]]] = {}
    for kind, name, call in forward:
        order.setdefault((kind, name), ([], []))[0].append(call)
    for kind, name, call in backward:
        order.setdefault((kind, name), ([], []))[1].append(call)
    merged: dict[tuple, tuple[str, list[int]]] = {}
    for place, ((kind, name), (ahead, back)) in enumerate(order.items()):
        key = (kind, tuple(ahead), tuple(back))
        merged.setdefault(key, (name, []))[1].append(place)
    return tuple(
        Segment(kind=kind, name=name, count=len(places), forward=ahead, backward=back,
                places=tuple(places))
        for (kind, ahead, back), (name, places) in merged.items()
    )  # fmt: skip
