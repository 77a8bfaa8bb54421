"""Isolated times: the op that runs is the op that was asked, and what can't run is named."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils import benchmark

from primus_ext.cost.latency_db import signature
from primus_ext.observe.microbench import build, serve, tensors, timing
from primus_ext.observe.microbench.tensors import CannotRun
from primus_ext.observe.recorder import Recorder
from primus_ext.runner import microbench
from primus_ext.runner.microbench import Microbench
from primus_ext.trace import Family, Op, TensorSpec
from tests.latency_rows import product

CPU = torch.device("cpu")


def recorded(run) -> list[Op]:
    """What a program does, as a trace holds it."""
    recorder = Recorder({})
    with recorder, recorder.collect("forward") as calls:
        run()
    return [recorder.ops[call.op] for _, _, call in calls]


def program() -> None:
    """Ops of a layer, its loss and its optimizer, as Megatron calls them."""
    x, w = torch.randn(24, 16), torch.randn(32, 16)
    torch.mm(x, w.t())
    torch.mm(torch.randn(24, 32), w)
    torch.mm(torch.randn(24, 32).t(), x)
    torch.addmm(torch.randn(24, 32), x, w.t())
    scores = torch.randn(4, 8, 8)
    torch.bmm(scores, torch.randn(4, 8, 16))
    torch.baddbmm(scores, torch.randn(4, 8, 16), torch.randn(4, 8, 16).transpose(1, 2))
    (x * x + x.exp() - x.rsqrt() / 3.0).pow(2)
    x + x[:1].expand(24, 16)
    x / x[:, :1].expand(24, 16)
    x.mul_(0.5).add_(x).clamp_max_(3.0)
    x.sum(), x.sum(-1), x.sum(0, keepdim=True), x.mean(-1, keepdim=True), x.max(-1)
    torch.linalg.vector_norm(x)
    torch.cat([x, x], -1), torch.stack([x, x])
    x.to(torch.bfloat16), x.clone(), torch.zeros(8), torch.ones(8), torch.arange(8)
    torch.zeros(24, 16).copy_(x)
    tokens = torch.randint(0, 24, (5,))
    F.embedding(tokens, x), x[tokens], x.index_select(0, tokens)
    x.index_put_((tokens, torch.arange(5)), torch.randn(5))
    x.masked_fill_(x > 0, 1.0), torch.where(x > 0, x, x)
    x.gather(0, torch.randint(0, 24, (5, 16))), torch.topk(x, 2), torch.triu(x, 1)
    F.softmax(x, -1), F.layer_norm(x, (16,), torch.randn(16), torch.randn(16), 1e-5)


PROGRAM = [op for op in recorded(program) if op.family in signature.MEASURABLE]


@pytest.mark.parametrize("op", PROGRAM, ids=lambda op: op.name)
def test_what_runs_has_the_signature_that_was_asked(op: Op) -> None:
    with torch.no_grad():
        run, kernel = build.build(op, CPU)
        ran = [one for one in recorded(run) if one.family in signature.MEASURABLE]
    assert signature.key(op) in {signature.key(one) for one in ran}, (kernel, op, ran)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_runs_forward_and_backward_as_asked(causal: bool, kv_heads: int) -> None:
    def attend() -> None:
        q, k, v = (torch.randn(2, h, 16, 8, requires_grad=True) for h in (4, kv_heads, kv_heads))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != 4)
        out.backward(torch.randn_like(out))

    found = [op for op in recorded(attend) if op.family is Family.ATTENTION]
    assert [op.attr("direction") for op in found] == ["forward", "backward"]
    for op in found:
        with torch.no_grad():
            run, _ = build.build(op, CPU)
            again = [one for one in recorded(run) if one.family is Family.ATTENTION]
        assert [signature.key(one) for one in again] == [signature.key(op)]


def test_a_products_time_is_that_of_torchs_own_benchmark() -> None:
    op = product(256, 512, 512)
    a, b = torch.randn(256, 512), torch.randn(512, 512)
    timer = benchmark.Timer("a @ b.t()", globals={"a": a, "b": b}, timer=time.process_time)
    ratios = []
    for _ in range(5):
        mine = serve.measure(op, CPU, {"repetitions": 3, "retries": 0})
        ratios.append(sorted(mine["samples"])[1] / timer.timeit(20).median)
    assert 0.5 < sorted(ratios)[2] < 2.0, ratios


def test_groups_have_the_rows_that_the_op_names() -> None:
    attrs = {"m": 12, "n": 6, "k": 5, "groups": 3, "layout": "tn", "dtype": "fp32",
             "out_dtype": "fp32", "accumulate": False, "rows": (2, 9, 1)}  # fmt: skip
    for layout, sizes in (("tn", [(2, 5), (9, 5), (1, 5)]), ("nt", [(12, 2), (12, 9), (12, 1)])):
        op = Op("g", Family.GROUPED_GEMM, (), (), 0, 0, tuple({**attrs, "layout": layout}.items()))
        run, _ = build.build(op, CPU)
        assert [one.inputs[0].shape for one in recorded(run)] == sizes


def test_data_are_random_and_of_the_sizes_that_bytes_tell() -> None:
    full, row = TensorSpec((64, 32), "fp32"), 4 * 32
    for stored in (row, 4 * 64, 4, 64 * row):
        op = Op("aten.add", Family.MEMORY, (full, full), (full,), 0, 2 * 64 * row + stored)
        made = tensors.inputs_of(op, CPU)
        assert sorted(t.untyped_storage().nbytes() for t in made) == [stored, 64 * row]
        assert all(t.shape == (64, 32) and float(t.std()) > 0 or stored == 4 for t in made)
    big = tensors.random((3 << 20,), torch.float32, CPU)
    assert abs(float(big.mean())) < 0.01 and abs(float(big.std()) - 1) < 0.01
    odd = Op("aten.add", Family.MEMORY, (full, full), (full,), 0, 2 * 64 * row + 20)
    with pytest.raises(CannotRun, match="aten.add"):
        tensors.inputs_of(odd, CPU)


@pytest.mark.parametrize(
    "op",
    [
        Op("aten.unheard_of", Family.MEMORY, (TensorSpec((2,), "fp32"),), (), 0, 8),
        Op("primus_te.moe_permute", Family.MEMORY, (TensorSpec((2,), "fp32"),), (), 0, 8),
        Op("fused.unheard_of", Family.MEMORY, (TensorSpec((2,), "fp32"),), (), 0, 8),
        Op("primus_te.gemm", Family.GEMM, (), (), 8, 8,
           (("dtype", "fp8_e4m3/tensor"), ("k", 2), ("layout", "tn"), ("m", 2), ("n", 2))),
        Op("primus_te.gemm", Family.GEMM, (), (), 8, 8,
           (("dtype", "bf16"), ("k", 2), ("layout", "nt"), ("m", 2), ("n", 2),
            ("out_dtype", "fp32"), ("accumulate", True))),
        Op("c10d.allreduce_", Family.COLLECTIVE, (), (), 0, 0),
    ],
    ids=lambda op: op.name,
)  # fmt: skip
def test_what_can_not_run_is_named(op: Op) -> None:
    answer = serve.measure(op, CPU, {})
    assert answer["status"] == "refused" and op.name in answer["message"]
    assert "\n" not in answer["message"] and "samples" not in answer


def test_samples_are_single_executions_and_the_devices_time_counts_all() -> None:
    ticks = []

    def clock(_run, executions: int) -> float:
        ticks.append(executions)
        return executions * 1e-3

    found = timing.sample(lambda: None, clock, 5, 2, short_s=4e-3)
    assert found.samples == (1e-3,) * 5 and found.executions == 4
    assert ticks == [1, 1, 4, 4, 4, 4, 4]
    assert found.device_s == pytest.approx(22e-3)
    assert timing.sample(lambda: None, clock, 3, 0, short_s=0.0).executions == 1


def test_a_throttling_device_is_measured_again_and_told_by_its_spread() -> None:
    attempts = [(1.0, 1.2, 1.5, 1.9, 2.4), (1.0, 1.1, 1.3, 1.6, 2.0)]
    tried = iter([timing.Sampled(samples, sum(samples), 1, 1) for samples in attempts])
    found = timing.steadiest(lambda: next(tried), 0.1, retries=1)
    assert found.samples == attempts[1] and found.device_s == pytest.approx(15.0)
    assert timing.spread(found.samples) > 0.1
    calm = timing.Sampled((1.0,) * 5, 5.0, 1, 1)
    assert timing.steadiest(lambda: calm, 0.1, retries=9).device_s == 5.0


HUGE = Op("aten.zero_", Family.MEMORY, (), (TensorSpec((1 << 45,), "fp32"),), 0, 1 << 47)


def test_too_large_an_op_is_a_verdict_with_its_bytes_and_the_run_goes_on() -> None:
    with Microbench("cpu", repetitions=3, warmup=1) as bench:
        verdict, after = bench.answer(HUGE), bench.answer(product(64))
        assert verdict["status"] == "oom" and verdict["bytes"] == 1 << 47
        assert verdict["free"] < 1 << 47 and str(1 << 47) in verdict["message"]
        assert after["status"] == "ok" and len(after["samples"]) == 3
        made = bench.row(product(64), after)
    assert made.device.kind == "cpu" and made.device.threads >= 1 and made.device.memory_bytes > 0
    assert made.versions.torch == torch.__version__ and made.kernel == "torch.matmul"
    assert made.warmup == 1 and made.taken and all(math.isfinite(s) for s in made.samples)


def test_a_process_that_dies_costs_one_op(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "dies_once.py").write_text(
        "import json, os, sys\n"
        "hello = {'device': {'product': 'x', 'kind': 'cpu'}, 'versions': {}}\n"
        "print(json.dumps(hello), flush=True)\n"
        "for line in sys.stdin:\n"
        "    if 'aten.zero_' in line: os.kill(os.getpid(), 9)\n"
        "    print(json.dumps({'status': 'refused', 'message': 'm'}), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(microbench, "MODULE", "dies_once")
    with Microbench("cpu") as bench:
        assert bench.answer(product(8)) == {"status": "refused", "message": "m"}
        died = bench.answer(HUGE)
        assert died["status"] == "failed" and "signal 9" in died["message"]
        assert bench.answer(product(8)) == {"status": "refused", "message": "m"}


def test_a_device_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Microbench("cuda") as bench, pytest.raises(Exception, match="--device=cuda"):
        bench.device  # noqa: B018


def test_answers_are_json_whatever_the_op(capfd) -> None:
    for op in (product(8), HUGE):
        json.dumps(serve.measure(op, CPU, {"repetitions": 1, "warmup": 1}))
