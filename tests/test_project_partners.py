"""Pipeline ranks against their peers: every send has its receive, in the same order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose, inventory, memory
from primus_ext.project.programs import BACKWARD, FORWARD, TRANSFER, Shape, Transfers
from primus_ext.project.schedule import programs
from tests import synthetic


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    pp, vpp = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    if vpp == 1:
        return Shape(pp=pp, microbatches=draw(st.integers(1, 20)))
    group = draw(st.integers(pp, 2 * pp))
    rest = draw(st.one_of(st.just(0), st.integers(pp, group)))
    return Shape(
        pp=pp, vpp=vpp, group=group, overlap_p2p=draw(st.booleans()),
        waits_for_sends=draw(st.booleans()),
        microbatches=group * draw(st.integers(1, 3)) + rest % group,
    )  # fmt: skip


def partner(shape: Shape, rank: int, transfer: int) -> tuple[int, bool]:
    """The other side of a transfer, and whether ``rank`` is the one that sends."""
    boundary, backward = Transfers(shape).boundary(transfer), transfer & 1
    sender = (boundary + backward) % shape.pp
    receiver = (boundary + 1 - backward) % shape.pp
    assert rank in (sender, receiver) and sender != receiver
    return (receiver, True) if rank == sender else (sender, False)


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_every_send_meets_its_receive(shape: Shape) -> None:
    sends: dict[tuple[int, int], list[frozenset[int]]] = {}
    receives: dict[tuple[int, int], list[frozenset[int]]] = {}
    for rank, program in enumerate(programs(shape)):
        for kind, posts, _ in program:
            if kind != TRANSFER:
                continue
            by_pair: dict[tuple[int, int, bool], set[int]] = {}
            for transfer in posts:
                other, is_send = partner(shape, rank, transfer)
                by_pair.setdefault((rank, other, is_send), set()).add(transfer)
            for (mine, other, is_send), together in by_pair.items():
                side, pair = (sends, (mine, other)) if is_send else (receives, (other, mine))
                side.setdefault(pair, []).append(frozenset(together))
    assert sends.keys() == receives.keys()
    for pair in sends:
        sent = [t for together in sends[pair] for t in sorted(together)]
        received = [t for together in receives[pair] for t in sorted(together)]
        assert len(set(sent)) == len(sent)
        assert set(sent) == set(received)
        if shape.pp > 2:  # with two ranks one pair carries both directions
            assert sent == received
        for backward in (0, 1):
            one_way = [t for t in sent if t & 1 == backward]
            assert one_way == [t for t in received if t & 1 == backward]


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_work_waits_for_what_it_needs_and_sends_what_it_made(shape: Shape) -> None:
    of = Transfers(shape)
    for rank, program in enumerate(programs(shape)):
        received: set[int] = set()
        made: set[int] = set()
        for kind, first, second in program:
            if kind == TRANSFER:
                for transfer in first:
                    if partner(shape, rank, transfer)[1]:
                        assert transfer in made
                received |= {t for t in second if not partner(shape, rank, t)[1]}
            elif kind == FORWARD:
                assert of.forward_in(rank, first, second) in received | {-1}
                made.add(of.forward_out(rank, first, second))
            else:
                assert kind == BACKWARD
                assert of.backward_in(rank, first, second) in received | {-1}
                made.add(of.backward_out(rank, first, second))


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_the_inventory_counts_the_transfers_of_the_schedule(shape: Shape) -> None:
    job = synthetic.Job(
        pp=shape.pp, vpp=shape.vpp, microbatches=shape.microbatches,
        layers=shape.pp * shape.vpp, seq=64, hidden=64, ffn=128, vocab=128,
    )  # fmt: skip
    stages = [synthetic.trace(job, rank) for rank in range(shape.pp)]
    sizes = memory.boundary_bytes(stages, shape)
    for rank, program in enumerate(programs(shape)):
        expected: Counter[tuple] = Counter()
        for kind, posts, _ in program:
            for transfer in posts if kind == TRANSFER else ():
                direction = "backward" if transfer & 1 else "forward"
                action = "send" if partner(shape, rank, transfer)[1] else "recv"
                size = sizes[Transfers(shape).boundary(transfer)]
                expected[direction, action, "pp", shape.pp, size, "bf16", True] += 1
        assert inventory.pipeline_transfers(stages, shape, "bf16")[rank] == expected
        last = shape.stages - 1
        boundaries = [s for s in range(last + 1) if s % shape.pp == rank]
        # each chunk receives and sends each way, but for the ends of the pipeline
        ends = sum(stage in (0, last) for stage in boundaries)
        assert sum(expected.values()) == (4 * len(boundaries) - 2 * ends) * shape.microbatches


def test_a_projection_lists_what_every_pipeline_rank_issues() -> None:
    job = synthetic.Job(tp=2, pp=4, dp=1, microbatches=8)
    plan, traces = synthetic.plan(job), synthetic.traces(job)
    rows = compose.project(plan, traces, load_cluster("h100", 1, 8), mode="simulate").collectives
    assert {rank for row in rows for rank in row.pp_ranks} == set(range(4))
    gathers = [row for row in rows if (row.direction, row.kind) == ("forward", "all_gather")]
    (row,) = gathers  # two a layer, on all ranks alike
    assert (row.pp_ranks, row.group, row.size, row.bytes) == ((0, 1, 2, 3), "tp", 2,
                                                              2 * job.tokens * job.hidden)
    assert row.count == 2 * job.layers_here * job.microbatches
    sends = {row.pp_ranks: row.count for row in rows if row.kind == "send"}
    assert sends == {(0, 1, 2): 8, (1, 2, 3): 8}  # activations; gradients


def test_too_many_rows_are_left_out_whole() -> None:
    row = inventory.Row((0,), "step", "all_reduce", "tp", 2, 4, "fp32", False, 1)
    full = (row,) * inventory.MOST_ROWS
    assert inventory.listed(full) == full
    assert inventory.listed((*full, row)) == ()
