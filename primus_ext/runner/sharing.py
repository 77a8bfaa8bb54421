"""One trace for requests that differ in nothing that a rank does.

A microbatch is the same however many a step has, and where the optimizer is replicated a rank does
the same however many replicas there are: only the members of its groups are others.  Requests are
reduced to one that stands for them all; the answers of the others follow from its answer exactly
(``tests/test_sharing.py`` compares them with traces of their own).  A request of which this is not
known stands for itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from primus_ext.plan import Plan
from primus_ext.trace import RankTrace

_GBS = "--global-batch-size"
_MICROBATCHES = 2
"""Of the request that stands for others, per pipeline stage."""
_REPLICAS = 2
"""Of it, where there are several."""
_NODE = 8
"""GPUs of one of its nodes, at most."""
_FSDP = ("--use-torch-fsdp2", "--use-megatron-fsdp")
# The optimizer is sharded over the replicas; a bucket grows with their number where reductions
# overlap the backward; experts have other replicas than the rest; the other order of ranks is not
# mapped here.
_BOUND = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--expert-model-parallel-size",
          "--use-tp-pp-dp-mapping")  # fmt: skip
_SCHEDULED = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
              "--pipeline-model-parallel-layout")  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What of a request its trace need not know."""

    gbs: int
    world_size: int
    argv: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The request that stands for another, and what is to be put back."""

    request: dict[str, Any]
    sizes: Sizes | None
    """None: it is the request itself."""


def shared(request: Mapping[str, Any]) -> Shared:
    """The request that stands for a request of the built-in GPT program.

    Args:
        request: As the bootstrap takes it, with a ``module``.
    """
    argv = [str(word) for word in request["args"]]
    itself = Shared(dict(request), None)
    if _GBS not in argv or not set(_FSDP).isdisjoint(argv):
        return itself  # each microbatch of a step is its own there
    mbs, gbs = int(_value(argv, "--micro-batch-size")), int(_value(argv, _GBS))
    tp, pp, cp = _degrees(argv)
    rest = tp * pp * cp
    if request["world_size"] % rest:
        return itself  # the framework says why not
    dp = request["world_size"] // rest
    if gbs % (mbs * dp) or gbs < mbs * dp:
        return itself
    if not set(_SCHEDULED).isdisjoint(argv) and gbs // (mbs * dp) % pp:
        return itself
    changed, world = list(argv), dict(request)
    if dp > 1 and set(_BOUND).isdisjoint(argv):
        dp = _REPLICAS
        size = rest * dp
        world = {**world, "world_size": size, "gpus_per_node": math.gcd(size, _NODE)}
    changed[argv.index(_GBS) + 1] = str(mbs * dp * _MICROBATCHES * pp)
    sizes = Sizes(gbs, request["world_size"], tuple(argv))
    return Shared({**world, "args": changed}, sizes)


def _value(argv: Sequence[str], name: str) -> str:
    return argv[argv.index(name) + 1] if name in argv else "1"


def _degrees(argv: Sequence[str]) -> tuple[int, int, int]:
    tp, pp = (int(_value(argv, f"--{name}-model-parallel-size")) for name in ("tensor", "pipeline"))
    return tp, pp, int(_value(argv, "--context-parallel-size"))


def restored(
    plan: Plan, traces: Sequence[RankTrace], sizes: Sizes
) -> tuple[Plan, tuple[RankTrace, ...]]:
    """Plan and traces of the request that another stood for.

    Args:
        plan: Of the one that was traced.
        traces: The same.
        sizes: Of the other.
    """
    parallelism = dataclasses.replace(plan.parallelism, world_size=sizes.world_size)
    batch = dataclasses.replace(plan.batch, gbs=sizes.gbs, dp=parallelism.dp)
    told = dataclasses.replace(plan, parallelism=parallelism, batch=batch)
    if parallelism.dp == plan.parallelism.dp:
        return told, tuple(traces)
    return told, tuple(_moved(trace, plan, parallelism.dp) for trace in traces)


def _moved(trace: RankTrace, plan: Plan, dp: int) -> RankTrace:
    """The trace of the same rank among ``dp`` replicas (order of ranks: tp-cp-ep-dp-pp)."""
    before, inner = plan.parallelism.dp, plan.parallelism.tp * plan.parallelism.cp

    def place(rank: int) -> tuple[int, int, int]:
        """Pipeline stage, replica and the rest."""
        return rank // (inner * before), rank // inner % before, rank % inner

    def rank_of(stage: int, replica: int, rest: int) -> int:
        return (stage * dp + replica) * inner + rest

    def members(ranks: Sequence[int]) -> tuple[int, ...]:
        places = [place(rank) for rank in ranks]
        replicas = {replica for _, replica, _ in places}
        if len(replicas) == 1:
            return tuple(rank_of(*one) for one in places)
        others = dict.fromkeys((stage, rest) for stage, _, rest in places)
        if len(others) * before != len(places):
            raise ValueError(f"{tuple(ranks)} is no group of {before} replicas")
        every = itertools.product(others, range(dp))
        return tuple(sorted(rank_of(stage, replica, rest) for (stage, rest), replica in every))

    groups = {name: members(ranks) for name, ranks in trace.groups.items()}
    return dataclasses.replace(trace, rank=rank_of(*place(trace.rank)), groups=groups)
