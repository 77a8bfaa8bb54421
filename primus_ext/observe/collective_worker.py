"""One rank of a sweep (:mod:`primus_ext.observe.collective_sweep`)."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from primus_ext.collective_samples import HOST, Case
from primus_ext.observe import collective_timing
from primus_ext.observe.collective_calls import Prepared, prepare
from primus_ext.trace import CollectiveKind, to_plain

PIPE = "PRIMUS_EXT_SWEEP_PIPE"
"""Environment variable: number of the file descriptor that events are written to."""
_FEWEST = 3
"""Repetitions of the slowest case: a median of fewer is none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What every rank is told."""

    cases: tuple[Case, ...]
    device: str
    """cpu or cuda."""
    hosts: int
    rounds: int
    repetitions: int
    """Most of a case in a round."""
    seconds: float
    """That a case may take in a round."""
    timeout: float
    """Seconds after which a collective counts as hanging."""
    rendezvous: str
    """As ``init_process_group`` takes it."""
    patience: float = 4.0
    """Timeouts after which a rank gives up by itself: whoever watches it is to see it first."""
    seed: int = 1234


Tell = Callable[[dict[str, Any]], None]
"""Takes what a rank says: that it begins a case, what a case took, that it is through."""


class _Rank:
    """This process in its groups."""

    def __init__(self, orders: Orders, rank: int, world: int, tell: Tell) -> None:
        self.orders, self.rank, self.world, self.tell = orders, rank, world, tell
        self.local = world // orders.hosts
        self.cuda = orders.device == "cuda"
        if self.cuda:
            torch.cuda.set_device(rank % self.local)
        self.device = torch.device(orders.device)
        limit = datetime.timedelta(seconds=orders.patience * orders.timeout)
        dist.init_process_group(
            "nccl" if self.cuda else "gloo", init_method=orders.rendezvous, rank=rank,
            world_size=world, timeout=limit,
        )  # fmt: skip
        everyone = list(range(world))
        self.control: Any = dist.new_group(everyone, backend="gloo", timeout=limit)
        self.groups: dict[tuple[str, int], Any] = {}
        for tier, members in dict.fromkeys((c.tier, c.members) for c in orders.cases):
            self.groups[tier, members] = self._join(tier, members, limit)

    def _join(self, tier: str, members: int, limit: datetime.timedelta) -> Any:
        """This rank's group of so many, None where it is in none."""
        mine = None
        for ranks in groups_of(tier, members, self.local, self.orders.hosts):
            group = dist.new_group(ranks, timeout=limit)
            if self.rank in ranks:
                mine = group
        return mine

    def together(self) -> None:
        """Wait for all ranks."""
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier(group=self.control)

    def measure(self, index: int, round_: int) -> None:
        """One case in one round; the first rank tells the times of its group and of all others."""
        case = self.orders.cases[index]
        self.tell({"begin": index})
        group = self.groups[case.tier, case.members]
        prepared = None
        if group is not None:
            numbers = torch.Generator().manual_seed(self.orders.seed + self.rank)
            prepared = prepare(case, group, self.device, numbers)
        repetitions = self._repetitions(prepared)
        spans: list[collective_timing.Span] = []
        if prepared is not None:
            timed = collective_timing.on_device if self.cuda else collective_timing.on_host
            spans = timed(prepared, repetitions, self.together)
        elif not self.cuda:
            for _ in range(repetitions):
                self.together()
        else:
            self.together()
        self._gather(index, round_, case, prepared.share if prepared else 1.0, spans)

    def _repetitions(self, prepared: Prepared | None) -> int:
        """Warm up, and agree on how many there is time for."""
        took = 0.0
        for _ in range(2):  # the first one connects pairs and fills caches
            self.together()
            begun = time.perf_counter()
            if prepared is not None:
                prepared.refill()
                prepared.run()
            if self.cuda:
                torch.cuda.synchronize()
            took = time.perf_counter() - begun
        longest = torch.tensor([took])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.control)
        fitting = int(self.orders.seconds / max(float(longest), 1e-6))
        return min(self.orders.repetitions, max(_FEWEST, fitting))

    def _gather(
        self, index: int, round_: int, case: Case, share: float,
        spans: list[collective_timing.Span],
    ) -> None:  # fmt: skip
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, spans, group=self.control)
        if self.rank != 0:
            return
        groups = groups_of(case.tier, case.members, self.local, self.orders.hosts)
        common = not self.cuda and self.orders.hosts == 1
        by_group = [
            collective_timing.of_group([everyone[rank] for rank in ranks], share, common)
            for ranks in groups
        ]
        # all groups are at it at once; each repetition is over with the slowest of them
        seconds = [max(one) for one in zip(*by_group, strict=True)]
        event = {"sample": index, "round": round_, "seconds": seconds}
        if not self.cuda:
            members = [everyone[rank] for ranks in groups for rank in ranks]
            event["processor"] = collective_timing.processor(members, share)
        self.tell(event)


def groups_of(tier: str, members: int, local: int, hosts: int) -> list[list[int]]:
    """Global ranks of all groups of a case; they run at the same time, as in a training step.

    Args:
        tier: Of one host, or one member of each of ``members`` hosts.
        members: Of a group.
        local: Ranks of a host.
        hosts: Of the job; ranks fill them in order.
    """
    if tier == HOST:
        starts = [h * local + g * members for h in range(hosts) for g in range(local // members)]
        return [list(range(start, start + members)) for start in starts]
    return [[place + host * local for host in range(members)] for place in range(local)]


def orders_of(plain: dict[str, Any]) -> Orders:
    """What the parent wrote."""
    cases = tuple(
        Case(**{**case, "kind": CollectiveKind(case["kind"])}) for case in plain["cases"]
    )
    return Orders(**{**plain, "cases": cases})


def main(path: str, rank: int, world: int) -> None:
    """Run what a file says, and write events to the pipe.

    Args:
        path: File with the orders.
        rank: Of this process.
        world: Processes.
    """
    with open(path, encoding="utf-8") as file:
        orders = orders_of(json.load(file))
    pipe = int(os.environ[PIPE])

    def tell(event: dict[str, Any]) -> None:
        os.write(pipe, (json.dumps(event) + "\n").encode())  # one write, so that it arrives whole

    run(orders, rank, world, tell)


def run(orders: Orders, rank: int, world: int, tell: Tell) -> None:
    """Measure all cases in all rounds, together with the other ranks.

    Args:
        orders: The same on every rank.
        rank: Of this process.
        world: Processes.
        tell: Hears what happens here.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that Megatron still calls
    mine = _Rank(orders, rank, world, tell)
    order = random.Random(orders.seed)
    for round_ in range(orders.rounds):
        indices = list(range(len(orders.cases)))
        order.shuffle(indices)  # what disturbs a moment disturbs no single curve
        for index in indices:
            mine.measure(index, round_)
    mine.together()
    tell({"end": True})
    dist.destroy_process_group()


def plain_orders(orders: Orders) -> str:
    """As :func:`main` reads them."""
    return json.dumps(to_plain(orders))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
