"""Live bytes of the device as PyTorch's own CPU allocator reports them to the profiler.

Independent of :mod:`primus_ext.observe.recorder`: no dispatch mode is active and no tensor is
looked at.  The events are the allocator's (address, bytes, time) and the operators' (name, start,
end), of ``torch.profiler`` with ``profile_memory=True``.

What a CPU allocates and a device would not is left out, by four rules:

* Scratch: made inside an operator (as the dispatcher runs it below autograd, so ``aten::linear``
  is its parts) or inside a function that the device runs as one kernel (:data:`FUSED`), and freed
  before that ends.
* Host: made inside :data:`HOST`, such as token counts that the host reads.
* Numbers: a Python number in an operation becomes a tensor of at most 16 bytes, made by no
  operator (``c10::scalar_to_tensor``); kernels on a device take it as an argument.
* Random states: a copy of a generator's state, made by no operator; it is a tensor of the host for
  generators of a device as well.

What the backend of a collective makes for itself (inside :data:`COLLECTIVE`, or on a thread of
gloo's, which names its regions ``gloo:...``) can be counted or left out: NCCL's is no tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast

FUSED = "primus_ext::fused"
"""Name of the region of a function that is one kernel on the device."""
HOST = "primus_ext::host"
"""Name of the region whose tensors the host holds."""
COLLECTIVE = "primus_ext::collective"
"""Name of the region of a blocking collective; what is made inside it is the backend's."""
BACKEND = "gloo:"
"""Start of the names of what gloo's own threads run."""
MARK = "primus_ext::mark"
"""Name of the region that ends where a peak is to be measured from."""
NUMBER_BYTES = 16
"""The largest Python number: complex, two doubles."""


def region(name: str) -> contextlib.AbstractContextManager[Any]:
    """A named region for the meter; outside of a profile it costs next to nothing."""
    return _RecordFunctionFast(name)


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One allocation (bytes above 0) or release (below 0)."""

    time_ns: int
    address: int
    size: int
    owner: str
    """Operator or region that it happened in; "" for none."""
    owner_end_ns: int
    in_host: bool
    backend_end_ns: int = -1
    """End of the collective whose backend made it; -1: the program made it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Memory of one tensor storage."""

    size: int
    """Bytes as they were asked for: the CPU allocator does not round what it reports."""
    start_ns: int
    end_ns: int | None
    """None: still live when the profile ended."""
    owner: str
    of_backend: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Metered:
    """Outcome of :meth:`AllocatorMeter.stop`; sizes in bytes."""

    live_bytes: int
    """At the mark."""
    peak_bytes: int
    """Highest since the mark."""
    at_peak: tuple[Block, ...]
    """What makes up the peak, in the order in which it was allocated."""


class AllocatorMeter:
    """Profiles from :meth:`start` on; what other threads allocate is not seen."""

    def __init__(self) -> None:
        config = _ExperimentalConfig(capture_overload_names=True)
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            experimental_config=config,
        )

    def start(self) -> None:
        """Start; what is allocated before is never counted."""
        self._profile.start()

    def mark(self) -> None:
        """Measure the peak from here on; the last mark counts."""
        with region(MARK):
            pass

    def stop(self) -> Metered:
        """End the profile and evaluate it.

        Raises:
            RuntimeError: nothing was marked.
        """
        return evaluate(*self.events())

    def events(self) -> tuple[list[Event], int]:
        """End the profile; see :func:`events`."""
        self._profile.stop()
        profiler: Any = self._profile.profiler
        return events(profiler.kineto_results.experimental_event_tree())


def events(tree: Iterable[Any]) -> tuple[list[Event], int]:
    """Allocator events in order of time, and when the last mark ended.

    Args:
        tree: Roots of the profiler's event tree.

    Raises:
        RuntimeError: nothing was marked.
    """
    found: list[Event] = []
    marked = -1
    stack = [(event, None, False, -1) for event in reversed(list(tree))]
    while stack:
        event, owner, host, backend = stack.pop()
        kind = event.tag.name
        if kind == "Allocation":
            fields = event.extra_fields
            found.append(
                Event(
                    event.start_time_ns, fields.ptr, fields.alloc_size,
                    owner.name if owner is not None else "",
                    owner.end_time_ns if owner is not None else -1, host, backend,
                )
            )  # fmt: skip
            continue
        if event.name == MARK:
            marked = event.end_time_ns
        host = host or event.name == HOST
        if event.name == COLLECTIVE or event.name.startswith(BACKEND):
            backend = max(backend, event.end_time_ns)
        if owner is None and _owns(event):
            owner = event
        stack += [(child, owner, host, backend) for child in reversed(event.children)]
    if marked < 0:
        raise RuntimeError("the profile has no mark to measure a peak from")
    found.sort(key=lambda e: e.time_ns)
    return found, marked


def _owns(event: Any) -> bool:
    if event.name in (FUSED, HOST) or event.name.startswith(BACKEND):
        return True
    return event.tag.name == "TorchOp" and _is_kernel(event.name, event.overload_name)


@functools.cache
def _is_kernel(name: str, overload: str) -> bool:
    """Whether this is an operator that the dispatcher does not split into others."""
    if "::" not in name or name.startswith(("autograd::", "profiler::", "primus_ext::")):
        return False
    full = f"{name}.{overload}" if overload else name
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return not has(full, "CompositeImplicitAutograd")
    except RuntimeError:  # a region that somebody named like an operator
        return False


def blocks(found: Iterable[Event], backend: bool = True) -> Iterator[Block]:
    """Memory that a device would hold, from allocator events in order of time.

    Args:
        found: Allocator events.
        backend: Count also what backends of collectives made.
    """
    live: dict[int, Event] = {}
    for event in found:
        made = live.pop(event.address, None)  # one that is live was freed by a thread out of sight
        if made is not None:
            yield from _block(made, event.time_ns, backend)
        if event.size > 0:
            live[event.address] = event
    for made in live.values():
        yield from _block(made, None, backend)


def _block(made: Event, freed_ns: int | None, backend: bool) -> Iterator[Block]:
    """The block of an allocation, if it counts; a backend's ends with its collective."""
    if made.backend_end_ns >= 0:
        end = made.backend_end_ns
        if backend and not made.in_host:
            yield Block(
                made.size, made.time_ns, min(end, freed_ns or end), made.owner, of_backend=True
            )
    elif _on_device(made, freed_ns):
        yield Block(made.size, made.time_ns, freed_ns, made.owner)


@functools.cache
def _random_state_bytes() -> int:
    return torch.default_generator.get_state().untyped_storage().nbytes()


def _on_device(made: Event, freed_ns: int | None) -> bool:
    if made.in_host:
        return False
    if not made.owner and (made.size <= NUMBER_BYTES or made.size == _random_state_bytes()):
        return False
    return freed_ns is None or freed_ns > made.owner_end_ns


def evaluate(found: list[Event], marked_ns: int, backend: bool = True) -> Metered:
    """The peak since the mark.

    Args:
        found: Allocator events in order of time.
        marked_ns: Time of the mark.
        backend: Count also what backends of collectives made.
    """
    held = sorted(blocks(found, backend), key=lambda b: b.start_ns)
    steps = [(b.start_ns, 1, b.size) for b in held]
    steps += [(b.end_ns, 0, -b.size) for b in held if b.end_ns is not None]
    live, at_mark, peak, peak_ns = 0, 0, -1, marked_ns
    for time_ns, _, change in sorted(steps):
        if time_ns > marked_ns and peak < 0:
            at_mark = peak = live
        live += change
        if time_ns > marked_ns and live > peak:
            peak, peak_ns = live, time_ns
    if peak < 0:
        at_mark = peak = live
    return Metered(
        live_bytes=at_mark,
        peak_bytes=peak,
        at_peak=tuple(
            b for b in held
            if b.start_ns <= peak_ns and (b.end_ns is None or b.end_ns > peak_ns)
        ),
    )  # fmt: skip
