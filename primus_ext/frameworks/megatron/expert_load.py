"""How many tokens each expert gets: the same number, what was recorded, or as skewed as asked."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.emulate.deep_ep.load import Load
from primus_ext.emulate.session import ProgramError, current
from primus_ext.frameworks.megatron import expert_skew, moe_layers

_FORMAT = (
    '{"tokens": T, "layers": {"1": [copies of T tokens that expert 0 gets, ...], ...}} with one '
    "list for every mixture-of-experts layer"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Token counts recorded in a run.

    A layer's key is its number in the whole model, from 1, or ``mtp.`` and the number of the
    multi-token-prediction layer.
    """

    tokens: int
    """Tokens that one row of counts is of."""
    layers: Mapping[str, tuple[int, ...]]
    """Layer to copies that each expert got, after token dropping if any."""
    ranks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Layer to distinct tokens that went to each expert-parallel rank, where known."""

    @staticmethod
    def of(value: Any) -> Table:
        """Read a request's ``routing``: the table itself, or the path of a JSON file.

        Raises:
            ProgramError: It is no such table.
        """
        if isinstance(value, str):
            try:
                value = json.loads(Path(value).read_text())
            except (OSError, ValueError) as error:
                raise ProgramError(
                    f"routing={value} can't be read: {error}; legal: JSON {_FORMAT}"
                ) from error
        try:
            return Table(
                int(value["tokens"]), _rows(value["layers"]), _rows(value.get("ranks", {}))
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProgramError(f"routing has another shape than {_FORMAT}: {error!r}") from error

    def row(self, layer: str, tokens: int, experts: int, topk: int) -> tuple[int, ...]:
        """Copies that each expert gets of ``tokens`` tokens.

        Other numbers of tokens than recorded scale the counts; rounding keeps their sum.

        Raises:
            ProgramError: The layer is not in the table, or its counts are impossible.
        """
        if layer not in self.layers:
            raise ProgramError(
                f"routing has no layer {layer}; legal: counts for every mixture-of-experts layer"
            )
        counts = self.layers[layer]
        if len(counts) != experts or min(counts) < 0 or max(counts) > self.tokens or (
            sum(counts) > self.tokens * topk
        ):  # fmt: skip
            raise ProgramError(
                f"routing of layer {layer} has {len(counts)} counts that sum to {sum(counts)}, the "
                f"largest {max(counts)}; legal: {experts} counts from 0 to {self.tokens} that sum "
                f"to at most {self.tokens * topk} (tokens x moe_router_topk)"
            )
        return scaled(counts, tokens, self.tokens)


def _rows(value: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    return {str(layer): tuple(int(n) for n in counts) for layer, counts in value.items()}


def table() -> Table | None:
    """The recorded counts of this session, if it was given any."""
    given = current().request.get("routing")
    return None if given is None else _parsed(json.dumps(given))


_tables: dict[str, Table] = {}


def _parsed(text: str) -> Table:
    if text not in _tables:
        _tables[text] = Table.of(json.loads(text))
    return _tables[text]


def scaled(counts: Sequence[int], tokens: int, recorded: int) -> tuple[int, ...]:
    """Counts times ``tokens / recorded``, rounded so that the sum is right (largest remainder)."""
    if tokens == recorded:
        return tuple(counts)
    exact = [n * tokens for n in counts]
    whole = [n // recorded for n in exact]
    missing = sum(exact) // recorded - sum(whole)
    order = sorted(range(len(exact)), key=lambda e: (-(exact[e] % recorded), e))
    for expert in order[:missing]:
        whole[expert] += 1
    return tuple(whole)


def balanced(tokens: int, experts: int, topk: int) -> tuple[int, ...]:
    """Copies that each expert gets where all get the same, as near as the division allows."""
    base, extra = divmod(tokens * topk, experts)
    return tuple(base + (expert < extra) for expert in range(experts))


def counts_of(layer: str) -> tuple[int, ...] | None:
    """What was recorded of a layer, None where nothing was."""
    recorded = table()
    return recorded.layers.get(layer) if recorded else None


def is_uneven() -> bool:
    """Whether something is said of how uneven experts are."""
    return table() is not None or expert_skew.asked() is not None


def by_rank(counts: Sequence[int], config: Any) -> tuple[int, ...]:
    """Copies that each expert-parallel rank gets."""
    local = config.num_moe_experts // config.expert_model_parallel_size
    return tuple(sum(counts[e : e + local]) for e in range(0, len(counts), local))


_stands_in: int | None = None
"""The expert-parallel rank that does, in every layer, what the busiest one does there."""


def stand_in(rank: int) -> None:
    """Be the busiest rank of every layer from now on; meant for a fork.

    Args:
        rank: The expert-parallel rank of this process.
    """
    global _stands_in
    _stands_in = rank


def _turned(counts: Sequence[int], config: Any) -> int:
    """By how many ranks a layer's experts are moved round, so that the busiest is this one."""
    if _stands_in is None:
        return 0
    loads = by_rank(counts, config)
    return _stands_in - loads.index(max(loads))


def copies(layer: str, tokens: int, config: Any) -> tuple[int, ...]:
    """As :func:`assigned`, in the order in which this process sees the experts."""
    counts = assigned(layer, tokens, config)
    local = config.num_moe_experts // config.expert_model_parallel_size
    return expert_skew.moved(counts, _turned(counts, config) * local)


def assigned(layer: str, tokens: int, config: Any) -> tuple[int, ...]:
    """Copies that each expert gets of one rank's tokens in one layer, after token dropping.

    Args:
        layer: Key of the layer in a table.
        tokens: Tokens of the rank.
        config: Megatron's transformer config.
    """
    experts, topk = config.num_moe_experts, config.moe_router_topk
    recorded, skew = table(), expert_skew.asked()
    if recorded is not None:
        counts = recorded.row(layer, tokens, experts, topk)
    elif skew is not None and skew > 1:
        counts = expert_skew.skewed(moe_layers.place(layer, config), tokens, config, skew)
    else:
        counts = balanced(tokens, experts, topk)
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return counts
    most = min(tokens, math.ceil(tokens * topk / experts * factor))
    if config.moe_pad_expert_input_to_capacity:
        return (most,) * experts
    return tuple(min(n, most) for n in counts)


def reached(counts: Sequence[int], tokens: int, everybody: int, config: Any) -> int:
    """Tokens with at least one of their experts in a set of experts, each counted once.

    Which experts a token chooses together is not in the counts.  Taken is the expected number for
    tokens that choose ``topk`` different experts at random, within ``group_topk`` of the groups
    where the router is limited to groups; the set counts as as many experts as its share of copies.

    Args:
        counts: Copies that each expert of the set gets.
        tokens: Tokens that chose.
        everybody: Copies of all experts.
        config: Megatron's transformer config.
    """
    held = sum(counts)
    if held == 0:
        return 0
    topk, experts = config.moe_router_topk, config.num_moe_experts
    width = experts * held / everybody
    groups = config.moe_router_num_groups or 1
    chosen = config.moe_router_group_topk or groups
    missed = _missed(width, experts, topk, groups, chosen)
    expected = round(tokens * (1 - missed) * min(1.0, everybody / (tokens * topk)))
    return max(max(counts), min(tokens, held, expected))


def _missed(width: float, experts: int, topk: int, groups: int, chosen: int) -> float:
    """Share of tokens that choose none of ``width`` experts."""
    pool, group = experts * chosen / groups, experts / groups
    spanned = max(1, round(width / group))
    inside = width / spanned
    total = math.comb(groups, chosen)
    missed = 0.0
    for hit in range(max(0, chosen - (groups - spanned)), min(spanned, chosen) + 1):
        ways = math.comb(spanned, hit) * math.comb(groups - spanned, chosen - hit) / total
        none = math.prod(max(0.0, pool - hit * inside - i) / (pool - i) for i in range(topk))
        missed += ways * none
    return missed


def group_load(layer: str, tokens: int, config: Any, *, rank: int, etp: int, per_node: int) -> Load:
    """What one rank sends and receives in a dispatch over its expert (and tensor) parallel group.

    Args:
        layer: Key of the layer in a table.
        tokens: Tokens of every rank.
        config: Megatron's transformer config.
        rank: Place in the group; ranks of one expert-parallel rank are neighbours.
        etp: Expert-tensor-parallel degree.
        per_node: Ranks of the group in one node.
    """
    ep = config.expert_model_parallel_size
    counts, local = copies(layer, tokens, config), config.num_moe_experts // ep
    everybody = sum(counts)

    def distinct(first: int, last: int) -> int:
        held = counts[first * local : last * local]
        return reached(held, tokens, everybody, config)

    recorded = table()
    known = recorded.ranks.get(layer) if recorded else None
    turned = _turned(assigned(layer, tokens, config), config)
    to_ep = (
        expert_skew.moved(scaled(known, tokens, recorded.tokens), turned)
        if known and recorded
        else tuple(distinct(e, e + 1) for e in range(ep))
    )
    size, mine = ep * etp, rank // etp
    nodes = [(n * per_node // etp, -(-(n + 1) * per_node // etp)) for n in range(size // per_node)]
    return Load(
        sent_to_ranks=tuple(to_ep[r // etp] for r in range(size)),
        sent_to_nodes=tuple(max(*to_ep[a:b], distinct(a, b)) if b - a > 1 else to_ep[a]
                            for a, b in nodes),
        received=size * to_ep[mine],
        per_local_expert=tuple(size * n for n in counts[mine * local : (mine + 1) * local]),
    )  # fmt: skip


_TOKENS = 1024
"""Tokens for each expert, of which loads are told that were not recorded."""


def of_layers(layers: Sequence[str], config: Any) -> dict[str, tuple[int, ...]]:
    """Layer to copies that each expert-parallel rank gets of the same number of tokens."""
    recorded = table()
    tokens = recorded.tokens if recorded else config.num_moe_experts * _TOKENS
    return {layer: by_rank(assigned(layer, tokens, config), config) for layer in layers}


def heaviest_of(by_layer: Sequence[Sequence[int]]) -> int:
    """The expert-parallel rank that gets the most tokens over a stage's layers, in their order.

    Of several the one with most tokens in the last layers: a stage holds most memory when its last
    layer runs backward, and that layer's temporaries are then there too.
    """
    loads = list(zip(*by_layer[::-1], strict=True))
    return max(range(len(loads)), key=lambda rank: (sum(loads[rank]), loads[rank]))


def heaviest_ep_rank(layers: Sequence[str], config: Any) -> int:
    """As :func:`heaviest_of`, of the layers with these keys; 0 if all ranks are alike."""
    if not is_uneven() or not layers:
        return 0
    return heaviest_of(list(of_layers(layers, config).values()))
