"""The whole rank with real tensors on this CPU, metered by PyTorch's own allocator events.

The other ranks stay virtual, unless the request has a ``rendezvous``: then they are real processes
(gloo) that run the same.  Routing is forced to be balanced, as in the virtual run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from primus_ext.emulate import device_kernels, session, virtual_peers
from primus_ext.emulate.host_tensor import host_values
from primus_ext.frameworks.megatron import expert_load, rank, routing, whole_rank
from primus_ext.observe.allocator_meter import AllocatorMeter, Block, Metered, evaluate
from primus_ext.observe.recorder import LiveBytes

LARGEST = 40
"""Blocks of the peak that are reported, the largest first."""


class Observer:
    """Stands where the recorder stands in the whole-rank run, and only marks and meters."""

    def __init__(self) -> None:
        self.group_names: dict[str, str] = {}
        self.memory = self
        self.host = LiveBytes(lambda _size, _op: 0)  # offloading with storage is not metered
        self.metered: Metered | None = None
        self.program: Metered | None = None
        self._meter = AllocatorMeter()

    def __enter__(self) -> Observer:
        self._meter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The process of a rank ends with its run; nothing is left to undo."""

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self._meter.mark()

    @property
    def live(self) -> int:
        """Known only when the profile is evaluated; :func:`peak` fills it in."""
        return 0

    @property
    def peak(self) -> int:
        """Bytes; ends the profile."""
        if self.metered is None:
            found, marked = self._meter.events()
            self.metered = evaluate(found, marked)
            self.program = evaluate(found, marked, backend=False)
        return self.metered.peak_bytes


def peak(
    original: Callable[..., Any], call: inspect.BoundArguments, member: int
) -> dict[str, Any]:
    """As :func:`whole_rank.peak`, with real tensors; meant to run in a fork.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        member: Global rank.

    Returns:
        ``rank``, ``peak_bytes``, ``live_bytes`` and ``largest``: size, count and operator of the
        largest blocks of the peak.  ``program_peak_bytes`` is the peak without what the backend
        of collectives made for itself, and ``backend`` what of that is in ``peak_bytes``.
    """
    observer = Observer()
    force_balance()
    let_any_value_pass()
    if "rendezvous" not in session.current().request:
        virtual_peers.answer()
    device_kernels.write_random_values()
    found = rank.run(original, call, member, whole_rank.two_steps, observer)
    assert observer.metered is not None and observer.program is not None
    at_peak = observer.metered.at_peak
    return {
        **found,
        "live_bytes": observer.metered.live_bytes,
        "largest": _counted(b for b in at_peak if not b.of_backend)[:LARGEST],
        "program_peak_bytes": observer.program.peak_bytes,
        "backend": _counted(b for b in at_peak if b.of_backend),
    }


def _counted(blocks: Iterable[Block]) -> list[list[Any]]:
    """Size, number and operator of blocks, those that come to most bytes first."""
    number = Counter((block.size, block.owner) for block in blocks)
    ordered = sorted(number.items(), key=lambda item: -item[0][0] * item[1])
    return [[size, count, owner] for (size, owner), count in ordered]


def force_balance() -> None:
    """Routers choose what the virtual run assumes."""
    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def balanced(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = forward(self, *args, **kwargs)
        tokens, experts = chosen.shape
        counts = expert_load.balanced(tokens, experts, self.config.moe_router_topk)
        with host_values():
            chosen.copy_(routing.map_of(counts, tokens))
        return probs, chosen

    TopKRouter.forward = balanced


def let_any_value_pass() -> None:
    """Checks of losses and gradients run and cost what they cost, but nothing comes of them.

    What virtual ranks and device kernels write are no results; sums of them may well be NaN.
    """
    from megatron.core.rerun_state_machine import RerunStateMachine

    validate = RerunStateMachine.validate_result

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):
            validate(self, *args, **kwargs)

    RerunStateMachine.validate_result = checked
