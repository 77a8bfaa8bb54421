"""Record the ops, collectives and live tensor bytes of one rank, with real or fake tensors.

The recorder is a :class:`TorchDispatchMode`: it sees every op of forward, backward and optimizer
below autograd, so nothing depends on how a framework organises its modules.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from primus_ext.observe import classify, classify_c10d, host_memory, known_ops, streams
from primus_ext.observe.allocations import Kinds, Log, Logs
from primus_ext.trace import Call, Op, ScopeKind

_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_current: list[Recorder] = []
_MADE = (torch.ops.aten.lift_fresh.default,)
"""Views by their schema that are all a mode sees of a new tensor: ``torch.tensor(value)``."""


@functools.cache
def _op_name(func: Any) -> str:
    """E.g. ``aten.mm``."""
    return str(func._schema.name).replace("::", ".")


def current() -> Recorder | None:
    """The recorder that is active in this process, if any."""
    return _current[-1] if _current else None


class LiveBytes:
    """Bytes of live tensor storages, exact, with the highest point since :meth:`reset_peak`.

    Beside all storages those that were made since :meth:`mark` are counted on their own.
    """

    def __init__(self, kind_of: Callable[[int, str], int]) -> None:
        """Nothing is live.

        Args:
            kind_of: Size in bytes and op of a new storage to its kind in the logs.
        """
        self.logs = Logs()
        self._kind_of = kind_of
        self.live = 0
        self.peak = 0
        self.fresh = 0
        """Of ``live``, what was made since :meth:`mark`."""
        self.fresh_peak = 0
        self._epoch = 0
        self._storages: dict[int, tuple[weakref.ref, int, int]] = {}

    def track(self, tensor: torch.Tensor, op: str = "") -> None:
        """Count the storage of ``tensor``, which ``op`` made, from now until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()

        def freed(ref: Any, key: int = key) -> None:
            entry = self._storages.get(key)
            if entry is not None and entry[0] is ref:  # not untracked, its address used again
                self._forget(key)

        self._storages[key] = (weakref.ref(storage, freed), size, self._epoch)
        self.live += size
        self.fresh += size
        self.peak = max(self.peak, self.live)
        self.fresh_peak = max(self.fresh_peak, self.fresh)
        if size:
            self.logs.allocated(key, self._kind_of(size, op))

    def _forget(self, key: int) -> None:
        _, size, epoch = self._storages.pop(key, (None, 0, -1))
        self.live -= size
        if epoch == self._epoch:
            self.fresh -= size
        if size:
            self.logs.freed(key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage with the size that it has now; no operator tells of that."""
        key = storage._cdata
        if key not in self._storages:
            return
        ref, before, epoch = self._storages[key]
        size = storage.nbytes()
        self._storages[key] = (ref, size, epoch)
        self.live += size - before
        if epoch == self._epoch:
            self.fresh += size - before
        self.peak = max(self.peak, self.live)
        self.fresh_peak = max(self.fresh_peak, self.fresh)
        if before:
            self.logs.freed(key)
        if size:
            self.logs.allocated(key, self._kind_of(size, "resize_"))

    def mark(self) -> None:
        """From now on storages are fresh; those that live already no longer are."""
        self._epoch += 1
        self.fresh = 0
        self.reset_peak()

    def untrack(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of ``tensors`` no longer, though they may live on."""
        for tensor in tensors:
            self._forget(tensor.untyped_storage()._cdata)

    def size_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the distinct storages of ``tensors`` that are counted as live."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(self._storages[key][1] for key in keys if key in self._storages)

    def number(self, tensor: torch.Tensor | None, log: Log) -> int:
        """The number of a tensor's allocation in a log; -1 if it was not allocated there."""
        return -1 if tensor is None else log.number(tensor.untyped_storage()._cdata)

    @property
    def tracked(self) -> int:
        """How many storages are live."""
        return len(self._storages)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of ``tensor`` is counted here."""
        return tensor.untyped_storage()._cdata in self._storages

    def reset_peak(self) -> None:
        """Start new peaks at what is live now."""
        self.peak = self.live
        self.fresh_peak = self.fresh


class Recorder(TorchDispatchMode):
    """Ops are interned by signature; calls are listed in order under scope, phase and module."""

    def __init__(self, group_names: dict[str, str]) -> None:
        """Start with an empty record.

        Args:
            group_names: torch's unique process-group name to the short name (tp, dp, ...).
        """
        super().__init__()
        self.group_names = group_names
        self.groups_seen: dict[str, tuple[int, ...]] = {}
        self.kinds = Kinds()
        self.memory = LiveBytes(self._kind)
        self.host = LiveBytes(lambda _size, _op: 0)  # nobody replays it: one kind does
        """Tensors that the program keeps in host memory."""
        self.ops: list[Op] = []
        self._index: dict[Op, int] = {}
        self._places: dict[int, tuple[Op, int]] = {}
        """As ``_index``, by identity: to hash an op takes longer than to find one."""
        self._known = known_ops.KnownOps()
        self.calls: list[tuple[ScopeKind, str, Call]] = []
        self.scope: tuple[ScopeKind, str] = (ScopeKind.OTHER, "")
        self.phase = "forward"
        self.modules: list[str] = []
        self.recording = False
        self.streams = streams.Streams()
        self._talks_quietly = False
        self.continuous = False
        """Whether what is recorded in one list may be waited for in the next, as where the
        microbatches of a step overlap."""
        self.recalled: Callable[[Any, tuple, dict], Any] = lambda *_: NotImplemented
        """What the mode below would answer at once; NotImplemented where it has to be asked."""
        self._fused_depth = 0
        self._fused_made: list[weakref.ref] = []

    def __enter__(self) -> Recorder:
        _current.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _current.remove(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; torch's guard against it costs at every operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two of three dispatches
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # a sharded tensor: its own dispatch comes back with the shard
        kwargs = kwargs or {}
        out = self.recalled(func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if func.namespace == "prim" or (getattr(func, "is_view", False) and func not in _MADE):
            return out
        with torch._C.DisableTorchFunction():  # other modes needn't see what is looked at here
            self._see(func, args, kwargs, out)
        return out

    def _see(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Note an operator that ran: what it made, and that it did."""
        produced = known_ops.tensors(out)
        if self._talks_quietly and func.namespace == "c10d":
            self._note(func, args, kwargs, produced, out)
        if self._fused_depth:
            self._fused_made += [weakref.ref(t) for t in produced]
            return
        on_host = host_memory.made_on_host(self, args, kwargs)
        for tensor in produced:
            if on_host or not host_memory.holds(self, tensor):
                (self.host if on_host else self.memory).track(tensor, _op_name(func))
        if self.recording:
            found = self._op(func, args, kwargs, produced)
            if found is not None:
                self._append(host_memory.by_host(found) if on_host else found, out)

    def _op(self, func: Any, args: tuple, kwargs: dict, produced: list) -> Op | None:
        """What :mod:`classify` makes of a call."""
        if classify.is_idle(func):
            return None
        transfer = host_memory.transfer(self, func, args)
        if transfer is not None:
            return transfer
        key = known_ops.key(func, args, kwargs, produced)
        found = self._known.get(key)
        if found is known_ops.ABSENT:
            found = classify.classify(func, args, kwargs, produced, self)
            self._known.put(key, found)
        return found

    def _note(self, func: Any, args: tuple, kwargs: dict, produced: list, out: Any) -> None:
        found = classify.classify(func, args, kwargs, produced, self)
        if found is not None:
            self._append(found, out)

    def forget(self) -> None:
        """Empty the op table (what is live stays counted)."""
        self.ops.clear()
        self._index.clear()
        self._places.clear()
        self.streams.forget_works()

    def _append(self, op: Op, out: Any = None) -> None:
        index = self._place(op)
        kind, name = self.scope
        module = self.modules[-1] if self.modules else ""
        prefix = f"{name}."
        module = "" if module == name else module.removeprefix(prefix)
        work, group = classify_c10d.handle(op, out)
        stream, waits = self.streams.issue(streams.current(), group)
        if group is not None:
            self.streams.works(work, group)
        call = Call(op=index, phase=self.phase, module=module, stream=stream, waits=waits)
        self.calls.append((kind, name, call))

    def _place(self, op: Op) -> int:
        """Where an op stands in the table."""
        known = self._places.get(id(op))
        if known is not None:
            return known[1]
        index = self._index.get(op)
        if index is None:
            index = self._index[op] = len(self.ops)
            self.ops.append(op)
        self._places[id(op)] = (op, index)  # it lives on, so no other op gets its identity
        return index

    def _kind(self, size: int, op: str) -> int:
        """Kind of a new storage, by where the program is."""
        kind, name = self.scope
        module = self.modules[-1] if self.modules else ""
        if not module or (name and module.startswith(name)):
            module = f"{kind}{module[len(name) :]}"
        stream = self.streams.number(streams.current()) if self.continuous else 0
        return self.kinds.of(size, op, module, self.phase, stream)

    def kernel(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Record a kernel that torch does not dispatch; its tensors exist already."""
        if self.recording and not self._fused_depth:
            with torch._C.DisableTorchFunction():
                self._append(classify.memory_op(name, inputs, outputs))

    @contextlib.contextmanager
    def fused(self, name: str, inputs: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Everything inside is one device kernel: inputs read once, outputs written once.

        Yields a list that the caller fills with the outputs.  Intermediate tensors never exist on
        the device; those that survive (saved for backward) are counted at the end.
        """
        outputs: list[torch.Tensor] = []
        self._fused_depth += 1
        try:
            yield outputs
        finally:
            self._fused_depth -= 1
        if not self._fused_depth:
            with torch._C.DisableTorchFunction():
                self._see_fused(f"fused.{name}", inputs, outputs)

    def _see_fused(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Note a kernel that several operators stand for."""
        for ref in self._fused_made:
            tensor = ref()
            if tensor is not None:
                self.memory.track(tensor, name)
        self._fused_made.clear()
        for tensor in outputs:
            self.memory.track(tensor, name)
        if self.recording:
            self._append(classify.memory_op(name, inputs, outputs))

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Host-side work: neither ops nor bytes are recorded, but what is asked of other ranks."""
        before = self.recording, self._talks_quietly
        self._talks_quietly, self.recording = self.recording or self._talks_quietly, False
        self._fused_depth += 1
        try:
            yield
        finally:
            self._fused_depth -= 1
            self._fused_made.clear()
            self.recording, self._talks_quietly = before

    @contextlib.contextmanager
    def collect(self, phase: str) -> Iterator[list[tuple[ScopeKind, str, Call]]]:
        """Record calls of ``phase`` into the yielded list."""
        previous = self.calls, self.phase, self.recording, self.scope
        self.calls, self.phase, self.recording = [], phase, True
        self.scope = (ScopeKind.OTHER, "")
        if phase != "backward" and not self.continuous:  # it goes on where its forward ended
            self.streams.settle()
        mine = self.calls
        try:
            yield mine
        finally:
            self.calls, self.phase, self.recording, self.scope = previous
