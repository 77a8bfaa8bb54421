"""What projections on one target share: prices, and what follows from a trace alone.

A search projects many plans from few traces.  Whatever depends on a trace, the target and a few
numbers is made once and kept as long as the trace is among the latest ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from primus_ext.cluster import Cluster
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.cost.model import CostModel
from primus_ext.project import data_parallel, observed, stage
from primus_ext.trace import Collective, CollectiveKind, RankTrace

MOST_TRACES = 256
"""Traces of which something is kept; a recorded one with its events takes about 0.3 MB."""


class Kept:
    """Values by trace; a trace is known by its identity, so it must not be changed.

    What is given out is given to every projection, so that must not be changed either.
    """

    def __init__(
        self, cluster: Cluster, most: int = MOST_TRACES, conditions: Conditions | None = None,
        collectives: MeasuredCollectives | None = None,
    ) -> None:  # fmt: skip
        """Nothing is kept yet.

        Args:
            cluster: The target of all projections that share this.
            most: Traces of which something is kept, the latest.
            conditions: Of the jobs; None: a host that is always ahead.
            collectives: Measured ones, which go before the model.

        Raises:
            CostError: The collectives are of another accelerator.
        """
        self.cluster = cluster
        self.cost = CostModel(cluster, conditions=conditions, measured_collectives=collectives)
        self._most = most
        self._others: dict[Conditions, Kept] = {}
        # the trace itself is held, so that no other one gets its identity
        self._of: OrderedDict[int, tuple[RankTrace, dict[Hashable, Any]]] = OrderedDict()
        self._target: dict[Hashable, Any] = {}
        self._observed: dict[int, observed.Observed] = {}

    def observe(self, trace: RankTrace, seen: observed.Observed) -> None:
        """Let a trace last as long as it really took."""
        self.of(trace, "observed", lambda: seen)
        self._observed[id(trace)] = seen

    def under(self, conditions: Conditions) -> Kept:
        """The same for jobs under these conditions."""
        if conditions == self.cost.conditions:
            return self
        found = self._others.get(conditions)
        if found is None:
            measured = self.cost.measured_collectives
            found = Kept(self.cluster, self._most, conditions, measured)
            self._others[conditions] = found
        return found

    def of[T](self, trace: RankTrace, key: Hashable, make: Callable[[], T]) -> T:
        """A value of a trace.

        Args:
            trace: What it depends on, beside the target.
            key: Its name, and whatever else it depends on.
            make: Makes it, where it is not there.
        """
        found = self._of.get(id(trace))
        if found is None:
            found = self._of[id(trace)] = (trace, {})
            if len(self._of) > self._most:
                self._of.popitem(last=False)
        else:
            self._of.move_to_end(id(trace))
        values = found[1]
        if key not in values:
            values[key] = make()
        return values[key]

    def times(self, trace: RankTrace, microbatches: int) -> stage.StageTimes:
        """Seconds of everything that one rank does (:func:`stage.price`).

        Raises:
            ValueError: As there.
        """
        matter = microbatches if trace.chunks[0].microbatches else 1
        seen = self._observed.get(id(trace))
        return self.of(
            trace, ("times", matter), lambda: stage.price(self.cost, trace, microbatches, seen)
        )

    def buckets(self, trace: RankTrace, sharded: bool) -> list[data_parallel.BucketTimes]:
        """Its gradient buckets, priced (:func:`data_parallel.bucket_times`).

        Raises:
            ValueError: As there.
        """
        return self.of(
            trace, ("buckets", sharded),
            lambda: data_parallel.bucket_times(self.cost, trace, sharded),
        )  # fmt: skip

    def send_seconds(self, size: int, here: int, there: int) -> float:
        """Seconds of a message of ``size`` bytes between two global ranks of a pipeline.

        Raises:
            CostError: One of them is not on the target.
        """
        message = Collective(kind=CollectiveKind.SEND_RECV, group="pp", bytes=size, dtype="")
        return self.of_target(
            (message, here, there),
            lambda: self.cost.collective_seconds(message, (here, there)).seconds,
        )

    def gather_seconds(self, size: int, ranks: tuple[int, ...]) -> float:
        """Seconds in which global ranks gather ``size`` bytes of which each has its piece.

        Raises:
            CostError: One of them is not on the target.
        """
        gather = Collective(kind=CollectiveKind.ALL_GATHER, group="tp", bytes=size, dtype="")
        return self.of_target(
            (gather, ranks), lambda: self.cost.collective_seconds(gather, ranks).seconds
        )

    def of_target[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """A value that depends on the target alone, and on ``key``."""
        if key not in self._target:
            self._target[key] = make()
        return self._target[key]
