"""Optimizers and their dtypes: state as arithmetic says, composed peak as the whole rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import FFN, HEADS, HIDDEN, KV, MODEL, PP2, Compared, assert_same, compared
from tests.emulation import COMMON

slow = pytest.mark.slow
NOT_DISTRIBUTED = [a for a in COMMON if a != "--use-distributed-optimizer"]
OFFLOAD = "--use-precision-aware-optimizer --optimizer-cpu-offload "


def shard(one: Compared, dp: int) -> int:
    """Elements of a rank's share of the distributed optimizer."""
    return sum(b.param_bytes for b in one.trace.buckets) // 2 // dp


@pytest.fixture(scope="module")
def offloaded(tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    path = tmp_path_factory.mktemp("offload")
    return compared(path, 4, MODEL + PP2 + OFFLOAD + "--overlap-cpu-optimizer-d2h-h2d")


def test_offloaded_optimizer_is_in_host_memory(offloaded: list[Compared]) -> None:
    assert_same(offloaded)
    for one in offloaded:
        # fp32 parameter, its gradient and two moments, of the half that this rank updates
        assert one.composed.host_bytes == 16 * shard(one, dp=2)
        assert one.composed.parts.optimizer < 64


def test_offloaded_gradients_and_parameters_cross_the_host_link(
    offloaded: list[Compared],
) -> None:
    for one in offloaded:
        moved: dict[str, int] = {}
        for call in one.trace.step:
            op = one.trace.ops[call.op]
            if op.family == "transfer":
                direction = str(op.attr("direction"))
                moved[direction] = moved.get(direction, 0) + op.bytes
        assert moved == {"d2h": 4 * shard(one, dp=2), "h2d": 2 * shard(one, dp=2)}


@slow
def test_half_of_the_optimizer_offloaded(tmp_path: Path) -> None:
    found = compared(tmp_path, 4, MODEL + PP2 + OFFLOAD + "--optimizer-offload-fraction 0.5")
    assert_same(found)
    for one in found:
        elements = shard(one, dp=2)
        on_host = one.composed.host_bytes // 16
        # parameters are offloaded whole, until half of all is reached
        assert elements / 2 <= on_host < elements
        assert one.composed.parts.optimizer == pytest.approx(12 * (elements - on_host), abs=64)


@slow
@pytest.mark.parametrize(
    ("dtypes", "each", "main_grads"),
    [
        # the upper half of an fp32 main parameter is the bf16 weight: its remainder is stored
        ("--main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype fp32 "
         "--exp-avg-sq-dtype fp32", 2 + 4 + 4, 4),
        ("--main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype fp16 "
         "--exp-avg-sq-dtype bf16", 2 + 2 + 2, 2),
    ],
)  # fmt: skip
def test_precision_aware_optimizer(
    tmp_path: Path, dtypes: str, each: int, main_grads: int
) -> None:
    found = compared(tmp_path, 4, MODEL + PP2 + "--use-precision-aware-optimizer " + dtypes)
    assert_same(found)
    for one in found:
        elements = shard(one, dp=2)
        per_tensor = 2048  # scales of the low-precision states, one a parameter
        assert 0 <= one.composed.parts.optimizer - each * elements <= per_tensor
        assert one.composed.parts.gradients == 2 * elements * main_grads


@slow
def test_sgd_keeps_one_momentum(tmp_path: Path) -> None:
    found = compared(tmp_path, 2, MODEL + "--optimizer sgd", common=NOT_DISTRIBUTED)
    assert_same(found)
    assert found[0].composed.parts.optimizer == 8 * found[0].composed.parameters


def newton_schulz(rows: int, columns: int, steps: int = 5) -> int:
    """FLOPs: X X^T, its square, and their product with X, with the smaller side first."""
    small, large = sorted((rows, columns))
    return steps * (2 * small * small * large * 2 + 2 * small**3)


@slow
def test_muon_orthogonalises_every_matrix(tmp_path: Path) -> None:
    found = compared(tmp_path, 2, MODEL + "--optimizer muon", common=NOT_DISTRIBUTED)
    assert_same(found)
    trace, kv = found[0].trace, HIDDEN // HEADS * KV
    layer = (
        newton_schulz(HIDDEN, HIDDEN) * 2 + newton_schulz(kv, HIDDEN) * 2
        + newton_schulz(2 * FFN, HIDDEN) + newton_schulz(FFN, HIDDEN)
    )  # fmt: skip
    ops = [trace.ops[call.op] for call in trace.step]
    assert sum(op.flops for op in ops if op.family == "gemm") == 4 * layer
    embeddings, norms = 2 * 1024 * HIDDEN, 9 * HIDDEN
    matrices = trace.parameters - embeddings - norms
    assert found[0].composed.parts.optimizer == pytest.approx(
        8 * matrices + 12 * (embeddings + norms), abs=64
    )
