"""The recorder and its classifiers, on real tensors and against brute force."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primus_ext.observe import origins
from primus_ext.observe.recorder import Recorder
from primus_ext.observe.scopes import Scopes, segments
from primus_ext.observe.specs import computed_pairs
from primus_ext.trace import Family, ScopeKind


def recorded(function, *args):
    recorder = Recorder({})
    with recorder, recorder.collect("forward") as calls:
        function(*args)
    return [recorder.ops[call.op] for _, _, call in calls]


@pytest.mark.parametrize(
    ("a", "b", "layout"),
    [
        (torch.ones(3, 5), torch.ones(7, 5).t(), "tn"),
        (torch.ones(3, 5), torch.ones(5, 7), "nn"),
        (torch.ones(5, 3).t(), torch.ones(5, 7), "nt"),
    ],
)
def test_matrix_product(a: torch.Tensor, b: torch.Tensor, layout: str) -> None:
    (op,) = recorded(torch.mm, a, b)
    assert op.family is Family.GEMM
    assert (op.attr("m"), op.attr("n"), op.attr("k"), op.attr("layout")) == (3, 7, 5, layout)
    assert op.flops == 2 * 3 * 5 * 7
    assert op.bytes == 4 * (3 * 5 + 5 * 7 + 3 * 7)


def test_torch_attention_counts_the_causal_half() -> None:
    q = torch.ones(2, 4, 16, 8, requires_grad=True)
    ops = recorded(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        .sum()
        .backward()
    )
    forward, backward = [op for op in ops if op.family is Family.ATTENTION]
    pairs = 16 * 17 // 2
    assert forward.flops == 2 * 2 * 4 * pairs * (8 + 8)
    assert backward.flops == forward.flops * 5 // 2


def test_views_and_allocations_are_no_work() -> None:
    x = torch.ones(4, 6)
    assert recorded(lambda: torch.empty(9).new_empty(3)) == []
    assert recorded(lambda: x.view(6, 4).t()[1:].detach()) == []


def test_expanded_input_is_read_once() -> None:
    bias = torch.ones(6)
    (op,) = recorded(lambda: torch.ones(0) is None or torch.add(bias.expand(4, 6), 1.0))[-1:]
    assert op.bytes == 4 * (6 + 4 * 6)


def test_copy_only_writes_its_destination() -> None:
    a, b = torch.zeros(8), torch.ones(8)
    (op,) = recorded(a.copy_, b)
    assert op.bytes == 2 * 32
    (op,) = recorded(a.zero_)
    assert op.bytes == 32


def test_gather_moves_the_rows_not_the_table() -> None:
    table, index = torch.ones(1000, 16), torch.tensor([1, 5])
    (op,) = recorded(torch.nn.functional.embedding, index, table)
    assert op.bytes == 2 * (2 * 16 * 4) + 2 * 8


def test_live_bytes_are_exact_and_peak_is_remembered() -> None:
    recorder = Recorder({})
    with recorder:
        a = torch.ones(256)
        b = a.view(16, 16)
        assert recorder.memory.live == 1024
        c = torch.ones(512)
        assert recorder.memory.live == 1024 + 2048
        del c
        gc.collect()
        assert (recorder.memory.live, recorder.memory.peak) == (1024, 3072)
        recorder.memory.reset_peak()
        assert recorder.memory.peak == 1024
        del a
        assert recorder.memory.live == 1024  # the view holds the storage
        del b
        assert recorder.memory.live == 0


def test_what_no_operator_tells_of_counts() -> None:
    recorder = Recorder({})
    with recorder:
        made = torch.tensor([1.0, 2.0])  # a mode sees a view of it
        assert recorder.memory.live == 8
        a = torch.ones(256)
        a.untyped_storage().resize_(0)
        recorder.memory.resized(a.untyped_storage())
        assert (recorder.memory.live, recorder.memory.peak) == (8, 8 + 1024)
        a.untyped_storage().resize_(2048)
        recorder.memory.resized(a.untyped_storage())
        assert (recorder.memory.live, recorder.memory.peak) == (8 + 2048, 8 + 2048)
        del a
        assert recorder.memory.live == 8
        recorder.memory.resized(made.untyped_storage())
        assert recorder.memory.live == 8


def test_fused_function_is_one_kernel_and_its_temporaries_take_no_memory() -> None:
    recorder = Recorder({})
    x = torch.ones(100)
    with (
        recorder,
        recorder.collect("forward") as calls,
        recorder.fused("gelu_like", [x]) as outputs,
    ):
        outputs.append((x * 2).exp() + 1)
    (op,) = [recorder.ops[call.op] for _, _, call in calls]
    assert (op.name, op.bytes) == ("fused.gelu_like", 800)
    assert recorder.memory.peak == 400


def test_scopes_tell_forward_from_backward() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    recorder = Recorder({})
    scopes = Scopes(recorder, [(ScopeKind.DENSE_LAYER, f"l{i}", m) for i, m in enumerate(model)])
    x = torch.ones(4, 8, requires_grad=True)
    with recorder:
        with recorder.collect("forward") as forward:
            y = model(x)
        with recorder.collect("backward") as backward:
            scopes.in_backward = True
            y.backward(torch.ones_like(y))
            scopes.in_backward = False
    gemms = [(n, c.phase) for _, n, c in forward + backward if recorder.ops[c.op].flops]
    assert gemms == [(f"l{i}", "forward") for i in range(3)] + [
        (f"l{i}", "backward") for i in (2, 2, 1, 1, 0, 0)
    ]
    layers = [s for s in segments(forward, backward) if s.kind is ScopeKind.DENSE_LAYER]
    assert sum(s.count for s in layers) == 3


@given(st.integers(1, 24), st.integers(1, 24), st.booleans(), st.integers(-1, 8),
       st.integers(-1, 8))
def test_computed_pairs(q: int, kv: int, causal: bool, left: int, right: int) -> None:
    count = sum(
        (left < 0 or i + kv - q - j <= left)
        and (not (causal or right >= 0) or j - (i + kv - q) <= (0 if causal else right))
        for i in range(q)
        for j in range(kv)
    )
    assert computed_pairs(q, kv, causal, (left, right)) == count


@given(
    st.integers(1, 8),
    st.integers(1, 64).map(lambda n: 8 * n),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([1, 3, 7]),
)
def test_exponents_are_read_off(mbs: int, seq: int, a: int, b: int, factor: int) -> None:
    names = origins.Names(mbs=mbs, seq=seq, fixed={5: "five"}, shares={})

    def value(m: int, s: int) -> int:
        return factor * m**a * s**b

    name = origins.dimension(value(mbs, seq), value(2 * mbs, seq), value(mbs, 2 * seq), names)
    assert ("mbs" in name, "seq" in name) == (bool(a), bool(b))


def test_a_dimension_that_fits_nothing_is_unknown() -> None:
    names = origins.Names(mbs=2, seq=16, fixed={}, shares={})
    assert origins.dimension(3, 5, 3, names) == origins.UNKNOWN  # 1 + mbs
