"""From the calls of one rank to seconds by term."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.project import stage
from primus_ext.project.ledger import TermName
from primus_ext.trace import (
    ChunkTrace,
    CollectiveKind,
    Family,
    Op,
    RankTrace,
    ScopeKind,
    Segment,
)
from tests.synthetic import Job, Ops, collective, gemm, trace, traffic

COST = CostModel(load_cluster("h100", 1, 8))


def one_chunk(
    forward: list[Op], kind: ScopeKind = ScopeKind.DENSE_LAYER, count: int = 1,
    phase: str = "forward",
) -> RankTrace:  # fmt: skip
    ops = Ops()
    segment = Segment(kind, "s", count, ops.calls(forward, phase), ())
    base = trace(Job(tp=8), 0)
    chunk = ChunkTrace(0, (segment,), base.chunks[0].memory, 0)
    return dataclasses.replace(base, ops=tuple(ops.ops), chunks=(chunk,), step=())


def terms(rank: RankTrace) -> tuple[dict[TermName, float], dict[TermName, float]]:
    ledger = stage.price(COST, rank).chunks[0].forward
    return dict(ledger.busy), dict(ledger.exposed)


PRODUCT = gemm(8192, 8192, 8192)
GATHER = collective(CollectiveKind.ALL_GATHER, "tp", 2**27)
BESIDE = collective(CollectiveKind.ALL_GATHER, "tp", 2**27, asynchronous=True)
T_PRODUCT = COST.op_seconds(PRODUCT).seconds
assert GATHER.collective is not None
T_GATHER = COST.collective_seconds(GATHER.collective, range(8)).seconds


def test_equal_layers_count_as_often_as_they_are() -> None:
    _, exposed = terms(one_chunk([PRODUCT, traffic("norm", 10**6)], count=20))
    assert exposed[TermName.GEMM] == pytest.approx(20 * T_PRODUCT)


def test_a_synchronous_collective_is_exposed() -> None:
    busy, exposed = terms(one_chunk([GATHER, PRODUCT]))
    assert exposed[TermName.TENSOR] == busy[TermName.TENSOR] == pytest.approx(T_GATHER)


def test_an_asynchronous_collective_hides_behind_the_next_product() -> None:
    assert T_GATHER < T_PRODUCT
    busy, exposed = terms(one_chunk([BESIDE, PRODUCT]))
    assert busy[TermName.TENSOR] == pytest.approx(T_GATHER)
    assert exposed.get(TermName.TENSOR, 0.0) == 0.0


def test_what_does_not_fit_behind_the_product_is_exposed() -> None:
    _, exposed = terms(one_chunk([BESIDE, BESIDE, BESIDE, BESIDE, PRODUCT]))
    assert exposed[TermName.TENSOR] == pytest.approx(4 * T_GATHER - T_PRODUCT)


def waiting(rank: RankTrace, **changes: dict[int, Any]) -> RankTrace:
    """The rank with fields of the calls of its forward changed, by place."""
    (chunk,) = rank.chunks
    (segment,) = chunk.segments
    calls = list(segment.forward)
    for field, values in changes.items():
        for place, value in values.items():
            calls[place] = dataclasses.replace(calls[place], **{field: value})
    segment = dataclasses.replace(segment, forward=tuple(calls))
    return dataclasses.replace(rank, chunks=(dataclasses.replace(chunk, segments=(segment,)),))


@pytest.mark.parametrize("products", [1, 2])
def test_an_asynchronous_collective_is_waited_for_where_the_program_does(products: int) -> None:
    rank = one_chunk([*[BESIDE] * 9, *[PRODUCT] * 2])
    place = 9 + products  # the call that waits for all collectives; past the end: none does
    _, exposed = terms(waiting(rank, waits={place: (("tp", 0),)} if place < 11 else {}))
    assert exposed[TermName.TENSOR] == pytest.approx(9 * T_GATHER - products * T_PRODUCT)
    assert exposed[TermName.GEMM] == pytest.approx(2 * T_PRODUCT)


def test_only_what_is_waited_for_must_be_over() -> None:
    calls = [*[BESIDE] * 9, PRODUCT, PRODUCT]
    _, exposed = terms(waiting(one_chunk(calls), waits={9: (("tp", 8),)}))  # the first of nine
    assert exposed[TermName.TENSOR] == pytest.approx(9 * T_GATHER - 2 * T_PRODUCT)
    first = exposed[TermName.TENSOR]
    _, exposed = terms(waiting(one_chunk(calls), waits={9: (("tp", 9),)}))  # one before the list
    assert exposed[TermName.TENSOR] == pytest.approx(first)


def test_who_waits_at_once_hides_nothing() -> None:
    _, exposed = terms(waiting(one_chunk([BESIDE, PRODUCT]), waits={1: (("tp", 0),)}))
    assert exposed[TermName.TENSOR] == pytest.approx(T_GATHER)


def test_a_synchronous_collective_queues_behind_the_others_of_its_group_only() -> None:
    other = collective(CollectiveKind.ALL_GATHER, "cp", 2**27)
    rank = one_chunk([BESIDE, GATHER, PRODUCT])
    _, exposed = terms(rank)
    assert exposed[TermName.TENSOR] == pytest.approx(2 * T_GATHER)
    rank = one_chunk([BESIDE, other, PRODUCT])
    rank = dataclasses.replace(rank, groups={**rank.groups, "cp": tuple(range(8))})
    busy, exposed = terms(rank)
    assert busy[TermName.TENSOR] == busy[TermName.CONTEXT] == pytest.approx(T_GATHER)
    assert exposed[TermName.TENSOR] == pytest.approx(T_GATHER)
    assert exposed.get(TermName.CONTEXT, 0.0) == 0.0


def test_parameters_gathered_ahead_hide_behind_the_layer_before() -> None:
    """Each of 4 layers gathers the next one's parameters, then waits for its own."""
    gather = collective(CollectiveKind.ALL_GATHER, "dp", 2**27, asynchronous=True)
    ops, layers = Ops(), 4
    calls = list(ops.calls([gather, PRODUCT], "forward"))
    calls[1] = dataclasses.replace(calls[1], waits=(("dp", 1),))
    segment = Segment(
        ScopeKind.DENSE_LAYER, "s", layers, tuple(calls), (), places=tuple(range(layers))
    )
    base = one_chunk([])
    chunk = dataclasses.replace(base.chunks[0], segments=(segment,))
    groups = {**base.groups, "dp": tuple(range(8))}
    _, exposed = terms(
        dataclasses.replace(base, groups=groups, ops=tuple(ops.ops), chunks=(chunk,))
    )
    # the first layer waits for the one gather before its own, of which there is none
    assert exposed == {TermName.GEMM: pytest.approx(layers * T_PRODUCT)}


def test_kernels_of_two_streams_share_the_device() -> None:
    rank = waiting(one_chunk([PRODUCT, PRODUCT, PRODUCT]), stream={1: "side1"})
    _, exposed = terms(rank)
    assert exposed == {TermName.GEMM: pytest.approx(3 * T_PRODUCT)}


def test_a_stream_that_waits_for_a_collective_lets_the_other_go_on() -> None:
    rank = one_chunk([BESIDE, PRODUCT, PRODUCT])
    _, exposed = terms(waiting(rank, stream={1: "side1"}, waits={1: (("tp", 0),)}))
    assert exposed.get(TermName.TENSOR, 0.0) == 0.0
    _, exposed = terms(waiting(rank, waits={1: (("tp", 0),)}))
    assert exposed[TermName.TENSOR] == pytest.approx(T_GATHER)


def test_nothing_to_hide_behind_means_exposed() -> None:
    _, exposed = terms(one_chunk([PRODUCT, BESIDE]))
    assert exposed[TermName.TENSOR] == pytest.approx(T_GATHER)


def test_a_send_and_its_receive_are_one_exchange() -> None:
    send = collective(CollectiveKind.SEND_RECV, "tp", 2**27, asynchronous=True)
    both = [
        dataclasses.replace(send, name="c10d.send", family=Family.P2P),
        dataclasses.replace(send, name="c10d.recv_", family=Family.P2P),
    ]
    assert send.collective is not None
    alone = COST.collective_seconds(send.collective, range(8)).seconds
    busy, _ = terms(one_chunk(both))
    assert busy[TermName.TENSOR] == pytest.approx(alone)


@pytest.mark.parametrize(
    ("kind", "phase", "term"),
    [
        (ScopeKind.DENSE_LAYER, "forward", TermName.GEMM),
        (ScopeKind.MOE_LAYER, "forward", TermName.GEMM),
        (ScopeKind.DENSE_LAYER, "recompute", TermName.RECOMPUTE),
        (ScopeKind.OUTPUT, "forward", TermName.EDGES),
        (ScopeKind.EMBEDDING, "forward", TermName.EDGES),
    ],
)
def test_terms_follow_scope_and_phase(kind: ScopeKind, phase: str, term: TermName) -> None:
    _, exposed = terms(one_chunk([PRODUCT], kind, phase=phase))
    assert exposed == {term: pytest.approx(T_PRODUCT)}


@pytest.mark.parametrize(
    ("group", "term"),
    [("tp", TermName.TENSOR), ("cp", TermName.CONTEXT), ("ep", TermName.EXPERT),
     ("tp_ep", TermName.EXPERT), ("tp_cp", TermName.OTHER)],
)  # fmt: skip
def test_communication_is_named_by_its_group(group: str, term: TermName) -> None:
    rank = one_chunk([collective(CollectiveKind.ALL_TO_ALL, group, 2**27)])
    rank = dataclasses.replace(rank, groups={**rank.groups, group: tuple(range(8))})
    _, exposed = terms(rank)
    assert list(exposed) == [term]


def test_a_group_that_is_not_in_the_trace_is_an_error() -> None:
    with pytest.raises(CostError, match="group ep of a all_to_all is not in the trace"):
        terms(one_chunk([collective(CollectiveKind.ALL_TO_ALL, "ep", 2**20)]))


def test_exposed_terms_add_up_to_the_duration() -> None:
    times = stage.price(CostModel(load_cluster("h100", 4, 8)), trace(Job(tp=8, pp=4), 0))
    for chunk in times.chunks:
        for ledger in (chunk.forward, chunk.backward):
            assert ledger.seconds == pytest.approx(sum(ledger.kinds.values()))
    assert times.step.seconds > 0


def test_tensor_parallel_communication_in_pieces_shows_one_of_them() -> None:
    """tp pieces, all but one beside a product; where products are too short the rest shows too."""
    job = Job(tp=8, dp=1)
    cluster = load_cluster("h100", 1, 8)
    plain = stage.price(CostModel(cluster), trace(job, 0)).chunks[0]
    pieces = CostModel(cluster, conditions=Conditions(pipelined_tp=8))
    cut = stage.price(pieces, trace(job, 0)).chunks[0]
    for before, after in ((plain.forward, cut.forward), (plain.backward, cut.backward)):
        sent = before.exposed[TermName.TENSOR]
        edges = after.exposed[TermName.TENSOR]
        hidden = min(sent * 7 / 8, before.exposed[TermName.GEMM])
        assert before.seconds - after.seconds == pytest.approx(sent - edges)
        assert 0 < sent - edges <= hidden * (1 + 1e-9)
        assert after.busy[TermName.TENSOR] == before.busy[TermName.TENSOR]
