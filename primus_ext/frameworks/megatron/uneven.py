"""Experts with different numbers of tokens: the heaviest rank, and what gates each layer.

Every layer's tokens are dispatched and combined, so that each rank waits in each layer for the one
that has most of them there.  The rank with most tokens over all its layers is recorded for what it
holds in memory; where it isn't the busiest one in each layer, it is recorded once more as a rank
that is: with the experts of every layer moved round until the busiest one's are its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from primus_ext.emulate.session import Session
from primus_ext.frameworks.megatron import expert_load, plans, rank, roles
from primus_ext.plan import is_sharded
from primus_ext.trace import ExpertLoad, RankTrace


def trace(
    active: Session,
    original: Callable[..., Any],
    call: inspect.BoundArguments,
    pp_ranks: tuple[int, ...],
    member: int | None,
) -> RankTrace:
    """The rank of a pipeline stage, and what gates it.

    Args:
        active: Forks.
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        pp_ranks: Pipeline ranks that hold the same modules.
        member: Global rank to be; None for the heaviest.
    """
    found = active.in_fork(lambda: rank.trace(original, call, pp_ranks, member))
    if not expert_load.is_uneven():
        return found
    arguments = plans.arguments()
    config = plans.transformer_config(call.arguments["cfg_container"])
    layers = expert_load.of_layers(roles.moe_layers(config, pp_ranks[0]), config)
    if not layers:
        return found
    own = roles.expert_rank(pp_ranks[0], found.rank, arguments)
    load = ExpertLoad(layers=layers, rank=own)
    waits = any(max(ranks) > ranks[own] for ranks in layers.values())
    # layers of sharded parameters overlap each other and can't be put together of two ranks'
    if waits and not is_sharded(vars(arguments)):
        gate = active.in_fork(
            lambda: rank.trace(original, call, pp_ranks, found.rank, stands_in=own)
        )
        load = dataclasses.replace(
            load, ops=gate.ops, segments=tuple(chunk.segments for chunk in gate.chunks)
        )
    return dataclasses.replace(found, experts=load)
