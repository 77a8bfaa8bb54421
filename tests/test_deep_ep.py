"""DeepEP's stand-in: what is sent, what arrives, and what its buffers hold."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch

from primus_ext.emulate.deep_ep import config, hybrid_ops, hybrid_sizes, load, ops
from primus_ext.emulate.session import ProgramError
from primus_ext.frameworks.megatron import expert_load, routing


def router(experts: int, topk: int, **more: Any) -> Any:
    """A transformer config as far as routing goes."""
    return types.SimpleNamespace(
        num_moe_experts=experts, moe_router_topk=topk,
        **{"moe_router_num_groups": None, "moe_router_group_topk": None,
           "moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False,
           "expert_model_parallel_size": 1, **more},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("experts", "topk", "groups", "limit", "held"),
    [(8, 2, 1, 1, 2), (8, 3, 1, 1, 4), (12, 4, 4, 2, 3), (12, 4, 4, 2, 1), (12, 4, 4, 2, 6)],
)
def test_reached_is_the_mean_over_every_choice(
    experts: int, topk: int, groups: int, limit: int, held: int
) -> None:
    """Enumerate all choices that the router can make; every expert is equally likely."""
    size = experts // groups
    choices = [
        choice
        for picked in itertools.combinations(range(groups), limit)
        for choice in itertools.combinations(
            [g * size + e for g in picked for e in range(size)], topk
        )
    ]
    hits = sum(any(e < held for e in choice) for choice in choices)
    tokens = len(choices) * experts  # so that every expert gets a whole number
    each = tokens * topk // experts
    settings = router(
        experts, topk,
        moe_router_num_groups=groups if groups > 1 else None,
        moe_router_group_topk=limit if groups > 1 else None,
    )  # fmt: skip
    assert expert_load.reached([each] * held, tokens, tokens * topk, settings) == hits * experts


def test_recorded_counts_scale_and_keep_their_sum() -> None:
    assert expert_load.scaled([3, 5, 8], 16, 16) == (3, 5, 8)
    assert expert_load.scaled([3, 5, 8], 32, 16) == (6, 10, 16)
    assert expert_load.scaled([3, 5, 8], 5, 16) == (1, 2, 2)  # 0.94, 1.56, 2.5: sum 5


def test_balanced_counts_differ_by_one_at_most() -> None:
    counts = expert_load.balanced(10, 7, 3)
    assert sum(counts) == 30 and set(counts) == {4, 5}


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), (8, 8, 0, 0), (8, 1, 2, 5), (0, 0, 0, 0)])
def test_map_has_the_counts_and_no_token_twice(counts: tuple[int, ...]) -> None:
    chosen = routing.map_of(counts, 8)
    assert chosen.sum(0).tolist() == list(counts)
    assert int(chosen.sum(1).max()) <= -(-sum(counts) // 8)


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), (8, 1, 2, 5)])
def test_sums_of_a_map_are_those_of_one_with_values(counts: tuple[int, ...]) -> None:
    known, whole = routing.CountedMap(counts, 8), routing.map_of(counts, 8)
    assert known.shape == tuple(whole.shape) and known.size(0) == whole.size(0)
    assert torch.equal(known.sum(dim=0), whole.sum(dim=0))
    assert known.sum(dim=0).dtype == whole.sum(dim=0).dtype
    with pytest.raises(ValueError, match="dim=1 .* legal: 0"):
        known.sum(dim=1)


def test_impossible_counts_are_refused_by_name() -> None:
    table = expert_load.Table(8, {"1": (9, 0)})
    with pytest.raises(ProgramError, match=r"layer 1 has 2 counts .* largest 9; legal"):
        table.row("1", 8, 2, 1)
    with pytest.raises(ProgramError, match="no layer 2"):
        table.row("2", 8, 2, 1)
    with pytest.raises(ProgramError, match="another shape"):
        expert_load.Table.of({"layers": {}})
    with pytest.raises(ProgramError, match=r"routing=/nowhere\.json can't be read"):
        expert_load.Table.of("/nowhere.json")


def test_load_counts_a_token_once_per_rank_and_per_node() -> None:
    # 4 ranks of 2 experts, 2 ranks a node; expert numbers of 3 tokens
    indices = torch.tensor([[0, 1], [1, 6], [4, -1]])
    found = load.from_indices(indices, experts=8, ranks=4, rank=0, per_node=2)
    assert found.sent_to_ranks == (2, 0, 1, 1)
    assert found.sent_to_nodes == (2, 2)
    assert found.received == 4 * 2
    assert found.per_local_expert == (4 * 1, 4 * 2)
    assert (found.sent, found.copies) == (4, 12)


def test_dispatch_delivers_this_ranks_tokens_once_for_each_peer() -> None:
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    indices = torch.tensor([[0, 1], [1, 6], [4, -1]])
    in_rank = ops.layout(indices, experts=8, ranks=4, nodes=1)[2]
    common: dict[str, Any] = {"group": "", "row_bytes": 0, "node_sent": 0, "sms": 20}
    got = ops.dispatch(
        x, indices, torch.ones(3, 2), in_rank, rank=0, experts=8, received=8, sent=4,
        tables=[[8]], **common,
    )  # fmt: skip
    assert torch.equal(got[0], x[:2].repeat(4, 1))
    assert got[1].tolist() == [[0, 1], [1, -1]] * 4
    assert got[2].tolist() == [[1, 1], [1, 0]] * 4
    back = ops.combine(got[0], got[2], in_rank, rank=0, sent=8, **common)
    assert back[0].shape == x.shape and torch.equal(back[0][:2], x[:2])


def test_hybrid_dispatch_sorts_by_expert_and_pads() -> None:
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    chosen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    rows, weights = hybrid_ops.dispatch(
        x, torch.full((3, 4), 0.5), chosen, group="", rank=0, rows=8, counts=[4, 4], sent=3,
        arrived=4, node_sent=0, row_bytes=0, sms=24,
    )  # fmt: skip
    assert torch.equal(rows[:2], x[[0, 0]]) and torch.equal(rows[4:], x[[0, 1, 0, 1]])
    assert rows[2:4].abs().sum() == 0
    assert weights.tolist() == [0.5, 0.5, 0, 0, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("ranks", "tokens_nvl", "tokens_rdma"), [(8, 256, 0), (64, 288, 140)])
def test_buffer_sizes_follow_the_library(ranks: int, tokens_nvl: int, tokens_rdma: int) -> None:
    hidden = 7168 * 2
    found = config.dispatch_config(ranks, 20)
    # per token: hidden state, source, 128 expert numbers and weights, 128 scales
    token = hidden + 8 + 128 * 8 + 128 * 4 + 128 * 4
    nodes = ranks // 8
    nvl = 10 * 8 * (4 * (2 * nodes + 3) + tokens_nvl * token)
    assert 0 <= found.get_nvl_buffer_size_hint(hidden, ranks) - nvl < 128
    rdma = 2 * 10 * nodes * (4 * 18 + tokens_rdma * (token + 16)) if tokens_rdma else 0
    assert 0 <= found.get_rdma_buffer_size_hint(hidden, ranks) - rdma < 128


def test_a_group_without_configuration_is_refused_as_the_library_does() -> None:
    with pytest.raises(ProgramError, match=r"=48 is not supported by DeepEP; legal: 2, 4, 8, 16"):
        config.combine_config(48, 20)


def test_hybrid_buffers_hold_every_ranks_tokens() -> None:
    one = hybrid_sizes.buffer_bytes(hybrid_sizes.Shape(1024, 4096, 4, 8, 1))
    tokens = 4096 * 8
    payload = tokens * (2 * 1024 + 4 * 32 + 4 * 8 + 32)  # states, weights, scales, routing map
    assert payload <= one <= 1.001 * payload
    two = hybrid_sizes.buffer_bytes(hybrid_sizes.Shape(1024, 4096, 4, 8, 2))
    assert two > 2 * one
