"""What operators make of tensors without storage, remembered by operator and shapes.

Torch's fake-tensor mode has such a cache, but spends most of an emulation's time on it: its keys
and results allow for symbolic and sparse tensors and what else there is.  Here the usual case is
short.  What may be remembered is still torch's judgement, but for opaque operators and for views
that come as a list, of which it knows too little.

Where in its storage an argument begins is no part of a key: weights and gradients are views of one
buffer, each at another place.  A view begins as far behind its argument whatever that place is.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from primus_ext.emulate import session

_torch: Any = fake_tensor
"""Its cache has no public interface: the names are those of torch 2.14."""
_OPAQUE = frozenset({"primus_te", "primus_flash", "primus_apex", "primus_mamba", "te_moe"})
"""Namespaces of operators, ours and Transformer Engine's, whose results are new tensors, given by
the shapes of the arguments, whatever their values."""
_aten = torch.ops.aten
_SLICE = _aten.slice.Tensor
_ABSOLUTE = frozenset({_aten.as_strided.default, _aten.view.dtype})
"""Views that say themselves where in the storage they begin, or count it in other elements."""
_VIEWS = frozenset(
    {_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten.chunk.default}
)
"""Operators whose results are views of their first argument."""
_FSDP = {"fsdp::split_with_sizes_copy": -1, "fsdp::chunk_cat": -1, "fsdp::all_gather_copy_in": 1}
"""Operators of torch's FSDP2, which are there once it is imported, by the argument that their
results are views of; -1: they have none, and write into what they are given."""
_LIMIT = 1 << 18
"""Operators with shapes; they and torch's own take about 500 MB.  Then both start anew."""
_PLAIN = frozenset(
    {int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_META, _CPU = torch.device("meta"), torch.device("cpu")

UNKNOWN = object()
"""Instead of a result: nothing is remembered."""


class _Made(NamedTuple):
    """One tensor of a result."""

    source: int
    """Position of the argument that it is (``same``) or is a view of; -1: its storage is new."""
    same: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Behind that of ``source``, of a slice behind its first element; 0 in a storage of its own."""
    dtype: torch.dtype
    requires_grad: bool


class _Result(NamedTuple):
    """All of a result: a tensor or None, or a tuple or list of them."""

    kind: type
    parts: tuple[_Made | None, ...]


_known: dict[tuple, _Result | None] = {}
"""None: it has to be derived every time."""


class _NoKey(Exception):
    """An argument that is neither plain nor an ordinary tensor of the mode."""


def clear() -> None:
    """Forget everything, and what torch remembers as well."""
    _known.clear()
    FakeTensorMode.cache_clear()


def size() -> int:
    """How many calls are remembered: where :func:`learned` starts from."""
    return len(_known)


def learned(since: int) -> bytes:
    """What was remembered after there were ``since`` calls, for another process of the program.

    Nothing if all was forgotten in between.
    """
    new = list(itertools.islice(_known.items(), since, None))
    operators: dict[Any, int] = {}
    calls = [(operators.setdefault(k[0], len(operators)), k[1:], result) for k, result in new]
    return pickle.dumps(([str(operator) for operator in operators], calls))


def absorb(content: bytes) -> None:
    """Remember what another process did (:func:`learned`), as far as there is room."""
    names, calls = pickle.loads(content)
    operators = [_operator(name) for name in names]
    if len(_known) + len(calls) < _LIMIT // 2:
        for number, rest, result in calls:
            if operators[number] is not None:
                _known.setdefault((operators[number], *rest), result)


def _operator(name: str) -> Any:
    """An operator by its name, None where this process does not have it."""
    namespace, operator, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator, None), overload, None)


def key(mode: FakeTensorMode, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """What a call is remembered under; None if it can't be.

    Args:
        mode: The fake-tensor mode that is active.
        func: Operator.
        args: Its arguments.
        kwargs: By name.
    """
    if type(func) is not torch._ops.OpOverload or torch.is_inference_mode_enabled():
        return None
    found: list[Any] = [func, torch.get_default_dtype()]
    try:
        if func is _SLICE:
            args = (args[0], *_span(*args)[:2])
        elif func in _ABSOLUTE:
            found.append(args[0].storage_offset())
        if func.namespace in _OPAQUE:
            _describe_shapes(mode, args, found)
        else:
            _describe(mode, args, found)
        if kwargs:
            found.append(tuple(kwargs))
            _describe(mode, kwargs.values(), found)
    except (_NoKey, RuntimeError):  # sparse tensors have no strides
        return None
    return tuple(found)


def _describe(mode: FakeTensorMode, args: Iterable[Any], found: list[Any]) -> None:
    for arg in args:
        kind = type(arg)
        if kind is FakeTensor:
            if (
                arg.fake_mode is not mode
                or arg.constant is not None
                or arg.dispatch_keys is not None
                or arg.dtype.is_complex
            ):
                raise _NoKey
            found.append((arg.shape, arg.stride(), arg.dtype, arg.requires_grad))
        elif kind in _PLAIN:
            found.append(arg)
        elif kind is bool or kind is float:  # True, 1 and 1.0 are equal as keys
            found.append((kind, arg))
        elif kind is list or kind is tuple:
            inner: list[Any] = []
            _describe(mode, arg, inner)
            found.append(tuple(inner))
        else:
            raise _NoKey


def _describe_shapes(mode: FakeTensorMode, args: Iterable[Any], found: list[Any]) -> None:
    """As :func:`_describe`, for operators that look at no values: tensors may have some."""
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor or (kind is FakeTensor and arg.constant is not None):
            if arg.dtype.is_complex or (kind is FakeTensor and arg.fake_mode is not mode):
                raise _NoKey
            found.append((kind, arg.shape, arg.stride(), arg.dtype, arg.requires_grad))
        elif kind is list or kind is tuple:
            inner: list[Any] = []
            _describe_shapes(mode, arg, inner)
            found.append(tuple(inner))
        else:
            _describe(mode, (arg,), found)


def _span(
    tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> tuple[int, int, int]:
    """Dimension, elements and first element of a slice; its arguments as they were given.

    Raises:
        _NoKey: It has other steps than one, or bounds that are no numbers.
    """
    if step != 1 or not {type(dim), type(start), type(end)} <= {int, type(None)}:
        raise _NoKey
    dim += tensor.dim() if dim < 0 else 0
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return dim, max(last - first, 0), first


def _ahead(func: Any, args: tuple) -> int:
    """How far behind its argument a slice begins, in elements; 0 for other operators."""
    if func is not _SLICE:
        return 0
    dim, _, first = _span(*args)
    return first * args[0].stride(dim)


def recall(mode: FakeTensorMode, known: tuple, args: tuple) -> Any:
    """The result of a call, or :data:`UNKNOWN`.

    Args:
        mode: The active mode.
        known: The call's :func:`key`.
        args: Its arguments.
    """
    result = _known.get(known)
    if result is None:
        return UNKNOWN
    kind, parts = result
    if not _blank:
        _fill_blank(mode)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        ahead = _ahead(known[0], args)
        if kind is FakeTensor:
            return _make(mode, parts[0], args, ahead)
        return kind([_make(mode, part, args, ahead) for part in parts])


def _make(mode: FakeTensorMode, made: _Made | None, args: tuple, ahead: int) -> Any:
    if made is None:
        return None
    source, same, shape, stride, offset, dtype, requires_grad = made
    if same:
        return args[source]
    bare = torch.empty_strided(
        shape, stride, dtype=dtype, device=_META, requires_grad=requires_grad
    )
    if source >= 0:
        behind = args[source].storage_offset() + ahead
        bare.set_(args[source].untyped_storage(), behind + offset, shape, stride)
    fake = torch.Tensor._make_subclass(
        FakeTensor, bare, requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    attributes = vars(fake)
    attributes.update(_blank)
    attributes["fake_mode"] = mode
    return fake


_blank: dict[str, Any] = {}
"""Attributes of a new tensor without storage, but for its mode."""


def _fill_blank(mode: FakeTensorMode) -> None:
    with torch._C._DisableTorchDispatch():
        _blank.update(vars(FakeTensor(mode, torch.empty(0, device=_META), _CPU)))
    del _blank["fake_mode"]


def learn(
    mode: FakeTensorMode, known: tuple, func: Any, args: tuple, kwargs: dict[str, Any], out: Any
) -> None:
    """Remember the result of a call, if it follows from what the call is remembered under.

    Args:
        mode: The active mode.
        known: The call's :func:`key`.
        func: Operator.
        args: Its arguments.
        kwargs: By name.
        out: What it returned.
    """
    if known in _known:
        return
    if len(_known) >= _LIMIT:
        clear()
    _known[known] = None
    if func in _VIEWS:
        source = 0
    elif func.namespace in _OPAQUE:
        source = -1
    elif func.namespace == "fsdp" and func._schema.name in _FSDP:
        source = _FSDP[func._schema.name]
    elif _is_kept_by_torch(mode, func, args, kwargs):
        tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        source = tensors[0] if func.is_view else -1
    else:
        return
    kind = type(out) if type(out) in (tuple, list) else FakeTensor
    outputs = (out,) if kind is FakeTensor else out
    if all(t is None or _is_ordinary(t, mode) for t in outputs):
        ahead = _ahead(func, args)
        parts = [None if t is None else _made(t, args, source, ahead) for t in outputs]
        if all(_is_whole(t, part) for t, part in zip(outputs, parts, strict=True)):
            _known[known] = _Result(kind, tuple(parts))


def _is_kept_by_torch(
    mode: FakeTensorMode, func: Any, args: tuple, kwargs: dict[str, Any]
) -> bool:
    if not hasattr(_torch, "_CacheKeyState"):  # another release: slower, not wrong
        return False
    try:
        theirs = mode._cache_key(_torch._CacheKeyState(None), func, args, kwargs)
    except _torch._BypassDispatchCache:
        return False
    return isinstance(mode.cache.get(theirs), _torch._DispatchCacheValidEntry)


def _is_ordinary(tensor: Any, mode: FakeTensorMode) -> bool:
    return (
        type(tensor) is FakeTensor
        and tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.dispatch_keys is None
        and tensor.fake_device == _CPU
        and not tensor.dtype.is_complex
    )


def _made(tensor: torch.Tensor, args: tuple, source: int, ahead: int) -> _Made:
    same = [i for i, arg in enumerate(args) if arg is tensor]
    begin = args[source].storage_offset() + ahead if source >= 0 else 0
    return _Made(
        source=same[0] if same else source,
        same=bool(same),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=0 if same else int(tensor.storage_offset()) - begin,
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
    )


def _is_whole(tensor: torch.Tensor | None, made: _Made | None) -> bool:
    """Whether a new tensor fills its storage, as the one that is made from memory will."""
    if tensor is None or made is None or made.source >= 0:
        return True
    last = sum((n - 1) * step for n, step in zip(made.shape, made.stride, strict=True))
    size = (last + 1) * tensor.element_size() if all(made.shape) else 0
    return made.offset == 0 and tensor.untyped_storage().nbytes() == size


session.memory = sys.modules[__name__]  # type: ignore[assignment]
