"""What is remembered of operators on tensors without storage equals what torch derives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from primus_ext.emulate import shape_cache

aten = torch.ops.aten
CALLS: list[tuple[Any, tuple, dict[str, Any]]] = [
    (aten.mm.default, ("a", "b"), {}),
    (aten.add.Tensor, ("a", "a"), {"alpha": 2}),
    (aten.add_.Tensor, ("a", 1), {}),
    (aten.t.default, ("a",), {}),
    (aten.slice.Tensor, ("a", 0, 1, 3), {}),
    (aten.view.default, ("a", [8, 4]), {}),
    (aten.empty.memory_format, ([3, 5],), {"dtype": torch.int32}),
    (aten.split.Tensor, ("a", 3), {}),
    (aten.split_with_sizes.default, ("b", [2, 6]), {}),
    (aten.native_layer_norm.default, ("a", [8], None, None, 1e-5), {}),
    (aten.topk.default, ("a", 2), {}),
    (aten._to_copy.default, ("b",), {"dtype": torch.bfloat16}),
    (aten.new_empty_strided.default, ("a", [2, 2], [1, 2]), {}),
]


def described(tensor: Any, inputs: tuple) -> Any:
    """Everything but the identity of a result."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    assert type(tensor) is FakeTensor
    storage = tensor.untyped_storage()
    keys = [t.untyped_storage()._cdata for t in inputs if isinstance(t, torch.Tensor)]
    return (
        tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype,
        str(tensor.device), storage.nbytes(), storage._cdata in keys,
        [tensor is t for t in inputs], str(torch._C._dispatch_key_set(tensor)),
        sorted(vars(tensor)),
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_a_remembered_result_is_torchs(call: tuple[Any, tuple, dict[str, Any]]) -> None:
    func, names, kwargs = call
    with FakeTensorMode() as mode:
        inputs = {"a": torch.empty(4, 8), "b": torch.empty(8, 6).t().contiguous().t()}
        args = tuple(inputs.get(n, n) if isinstance(n, str) else n for n in names)
        known = shape_cache.key(mode, func, args, kwargs)
        assert known is not None
        out = func(*args, **kwargs)
        shape_cache.learn(mode, known, func, args, kwargs, out)
        again = shape_cache.recall(mode, known, args)
        fresh = func(*args, **kwargs)
    assert again is not shape_cache.UNKNOWN
    assert type(again) is type(fresh)
    one, two = ([r] if isinstance(r, torch.Tensor) else r for r in (again, fresh))
    assert [described(t, args) for t in one] == [described(t, args) for t in two]


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten.view.dtype, (torch.float32,)), (aten.view.default, ([2, 8],)),
        (aten.slice.Tensor, (0, 4, 12)), (aten.detach.default, ()),
        (aten.as_strided.default, ([4], [2], 8)),
    ],
)  # fmt: skip
def test_a_view_of_an_argument_that_begins_elsewhere_begins_where_torchs_does(
    func: Any, rest: tuple
) -> None:
    with FakeTensorMode() as mode:
        base = torch.empty(64, dtype=torch.uint8)
        for start in (32, 0, 16):  # a later one may begin before the one that was learned
            args = (base[start : start + 16], *rest)
            known = shape_cache.key(mode, func, args, {})
            fresh = func(*args)
            assert known is not None
            shape_cache.learn(mode, known, func, args, {}, fresh)
            again = shape_cache.recall(mode, known, args)
            assert described(again, args) == described(fresh, args)


def test_arguments_that_are_equal_but_not_the_same_are_told_apart() -> None:
    with FakeTensorMode() as mode:
        a = torch.empty(4)
        keys = {shape_cache.key(mode, aten.add.Tensor, (a, n), {}) for n in (1, 1.0, True)}
        assert len(keys) == 3
        other = torch.empty(4, dtype=torch.int64)
        assert shape_cache.key(mode, aten.add.Tensor, (other, 1), {}) not in keys


def test_values_and_other_peoples_tensors_are_not_remembered() -> None:
    with FakeTensorMode() as stranger:
        theirs = torch.empty(4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        constant = torch.tensor(3.0)  # torch knows its value
        assert shape_cache.key(mode, aten.add.Tensor, (constant, 1), {}) is None
    assert stranger is not mode
    assert shape_cache.key(mode, aten.add.Tensor, (theirs, 1), {}) is None
    assert shape_cache.key(mode, aten.add.Tensor, (torch.ones(2), 1), {}) is None


def test_what_torch_does_not_keep_is_derived_every_time() -> None:
    with FakeTensorMode() as mode:
        a = torch.empty(4, dtype=torch.int64)
        args = (a,)
        known = shape_cache.key(mode, aten._unsafe_view.default, (a, [2, 2]), {})
        assert known is not None
        out = aten._unsafe_view.default(a, [2, 2])
        shape_cache.learn(mode, known, aten._unsafe_view.default, (*args, [2, 2]), {}, out)
        assert shape_cache.recall(mode, known, (a, [2, 2])) is shape_cache.UNKNOWN
