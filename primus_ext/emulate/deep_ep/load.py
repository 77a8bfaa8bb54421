"""How many tokens go where in one dispatch, as the host would learn it from the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """One rank's dispatch among peers that route like it does."""

    sent_to_ranks: tuple[int, ...]
    """Tokens to each rank of the group; a token that several experts of a rank get counts once."""
    sent_to_nodes: tuple[int, ...]
    """Tokens to each node, counted once however many ranks of the node get them."""
    received: int
    """Tokens that arrive at this rank."""
    per_local_expert: tuple[int, ...]
    """Token copies that each local expert gets."""

    @property
    def sent(self) -> int:
        """Rows that leave this rank or stay on it, each to one rank."""
        return sum(self.sent_to_ranks)

    @property
    def copies(self) -> int:
        """Rows that the local experts compute."""
        return sum(self.per_local_expert)


_expected: list[Load | None] = [None]


def expect(load: Load | None) -> None:
    """Say what the next dispatch of tensors without values carries; None: read it from values."""
    _expected[0] = load


def expected() -> Load:
    """What was said.

    Raises:
        RuntimeError: Nothing was.
    """
    load = _expected[0]
    if load is None:
        raise RuntimeError("deep_ep's stand-in was not told how the tokens are routed")
    return load


def from_indices(indices: torch.Tensor, experts: int, ranks: int, rank: int, per_node: int) -> Load:
    """Read a load from real indices; the peers send what this rank sends.

    Args:
        indices: ``[tokens, topk]``, expert numbers in the group, -1 for none.
        experts: Experts of the group, in order of the ranks.
        ranks: Ranks of the group.
        rank: This rank's place in it.
        per_node: Ranks of one node.
    """
    chosen = torch.zeros(indices.shape[0], experts + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(indices < 0, experts, indices), True)
    return from_map(chosen[:, :experts], ranks, rank, per_node)


def from_map(chosen: torch.Tensor, ranks: int, rank: int, per_node: int) -> Load:
    """Read a load from a real routing map; the peers send what this rank sends.

    Args:
        chosen: ``[tokens, experts of the group]`` bool, experts in order of the ranks.
        ranks: Ranks of the group.
        rank: This rank's place in it.
        per_node: Ranks of one node.
    """
    tokens = chosen.shape[0]
    by_rank = chosen.view(tokens, ranks, -1).any(-1)
    by_node = by_rank.view(tokens, ranks // per_node, per_node).any(-1)
    local = chosen.view(tokens, ranks, -1)[:, rank].sum(0)
    to_ranks = _ints(by_rank.sum(0))
    return Load(
        sent_to_ranks=to_ranks,
        sent_to_nodes=_ints(by_node.sum(0)),
        received=ranks * to_ranks[rank],
        per_local_expert=tuple(ranks * n for n in _ints(local)),
    )


def _ints(values: torch.Tensor) -> tuple[int, ...]:
    numbers: Sequence[int] = values.tolist()
    return tuple(numbers)
