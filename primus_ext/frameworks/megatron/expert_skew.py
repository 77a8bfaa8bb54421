"""Experts with as uneven a load as was asked for: one busy rank in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from primus_ext.emulate.session import ProgramError, current


def asked() -> float | None:
    """Tokens of every layer's busiest expert-parallel rank over the mean; None: nothing asked."""
    given = current().request.get("expert_skew")
    return None if given is None else float(given)


def require_legal(factor: float, config: Any) -> None:
    """Refuse a skew that no router of the model can have.

    Args:
        factor: As :func:`asked`.
        config: Megatron's transformer config.

    Raises:
        ProgramError: It is not legal.
    """
    experts, topk = config.num_moe_experts, config.moe_router_topk
    if not experts:
        raise ProgramError(f"expert_skew={factor:g} is not legal: the model has no experts")
    ep = config.expert_model_parallel_size
    most = min(ep, experts / topk)
    if not 1 <= factor <= most:
        raise ProgramError(
            f"expert_skew={factor:g} is not legal: the busiest of ep={ep} ranks gets from 1 to "
            f"{most:g} times the mean (a token goes to {topk} of {experts} different experts)"
        )


def skewed(place: int, tokens: int, config: Any, factor: float) -> tuple[int, ...]:
    """Copies that each expert gets where one expert-parallel rank gets ``factor`` times the mean.

    The other ranks share what is left alike, and so do the experts of a rank.  The busiest rank is
    the next one in every layer, since in trained models it changes from layer to layer; so every
    layer's counts are those of the first, moved round.

    Args:
        place: Of the layer among the mixture-of-experts layers, from 0.
        tokens: That choose.
        config: Megatron's transformer config.
        factor: Legal (:func:`require_legal`) and above 1.
    """
    experts, topk = config.num_moe_experts, config.moe_router_topk
    ep = config.expert_model_parallel_size
    local = experts // ep
    rest = (ep - factor) / (ep - 1)
    exact = [tokens * topk / experts * (factor if e < local else rest) for e in range(experts)]
    whole = [int(n) for n in exact]
    by_remainder = sorted(range(experts), key=lambda e: (whole[e] - exact[e], e))
    for expert in by_remainder[: tokens * topk - sum(whole)]:
        whole[expert] += 1
    return moved(whole, place % ep * local)


def moved(values: Sequence[int], places: int) -> tuple[int, ...]:
    """Values moved round by so many places; the last ones come first."""
    first = -places % len(values)
    return (*values[first:], *values[:first])
