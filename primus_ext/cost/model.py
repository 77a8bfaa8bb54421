"""The one door to the prices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus_ext.cluster import Cluster
from primus_ext.cost import (
    attention,
    backends,
    collectives,
    exchange,
    gemm,
    memory_bound,
    sustained,
)
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.latency_db.rows import Clock
from primus_ext.cost.measured import Measured
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.cost.placement import placement
from primus_ext.cost.priced import FREE, CostError, Priced
from primus_ext.trace import Collective, Family, Op

if TYPE_CHECKING:
    from primus_ext.cost.latency_db.prices import Prices
    from primus_ext.cost.latency_db.store import LatencyDatabase

_MATRIX = (Family.GEMM, Family.GROUPED_GEMM)
_TRAFFIC = (Family.MEMORY, Family.QUANTIZE)


class CostModel:
    """Durations of ops and collectives on one cluster, from published figures.

    Each op is priced once; equal ops share the answer.
    """

    def __init__(
        self, cluster: Cluster, gemm_backend: str = "", tables: Measured | bool = True,
        conditions: Conditions | None = None, alone: bool = False,
        measured_collectives: MeasuredCollectives | None = None,
        database: LatencyDatabase | Prices | None = None,
    ) -> None:  # fmt: skip
        """Price for ``cluster``.

        Args:
            cluster: The target.
            gemm_backend: Entry point (:mod:`primus_ext.cost.backends`) that is asked first about
                matrix products; '' for none.
            tables: Correct forward kernels by measured neighbours where the optional tables are
                installed and hold the target; False: formulas alone.
            conditions: Of the job; None: a host that is always ahead of the device.
            alone: As in a short run on an idle device at boost clock, not as in training.
            measured_collectives: Go before the model, where they carry; None: the model alone.
            database: Times measured on this product, which come before everything else; between
                them the formulas have the trend.  For a CPU, which is no product of ours, the
                prices of that very device (``Prices.of``).

        Raises:
            CostError: No such backend, or collectives of another accelerator.
        """
        self.cluster, self._alone = cluster, alone
        self.conditions = conditions or Conditions()
        self.measured_collectives = measured_collectives
        if measured_collectives is not None:
            measured_collectives.require(cluster)
        self._collectives: collectives.Known = {}
        self._backend = backends.backend(gemm_backend) if gemm_backend else None
        self._tables = Measured(cluster.accelerator) if tables is True else (tables or None)
        self._priced: dict[Op, Priced] = {}
        self._database = self._prices(database) if database else None

    def op_seconds(self, op: Op) -> Priced:
        """Seconds that one execution of ``op`` keeps the device busy.

        Raises:
            CostError: The op has no price, or is a collective (they need their group).
            ClusterError: The accelerator lacks the precision.
        """
        found = self._priced.get(op)
        if found is None:
            measured = self._database.price(op) if self._database else None
            found, clock = measured or (self._price(op), Clock.BOOST)
            if not self._alone and clock is Clock.BOOST:
                factor = sustained.slowdown(self.cluster.accelerator, op)
                found = sustained.slowed(found, factor)
            self._priced[op] = found
        return found

    def _prices(self, database: LatencyDatabase | Prices) -> Prices:
        from primus_ext.cost.latency_db.prices import Prices  # NumPy

        if isinstance(database, Prices):
            return database
        name = self.cluster.accelerator.name
        return Prices.of(database, accelerator=name, model=self._modelled)

    def _modelled(self, op: Op) -> float:
        """Seconds by formula, alone at boost clock, of what the database has measured."""
        return self._price(op).seconds

    def _price(self, op: Op) -> Priced:
        accelerator = self.cluster.accelerator
        if op.family in _MATRIX:
            own = self._backend(accelerator, op) if self._backend else None
            return own or self._corrected(op, gemm.price(accelerator, op))
        if op.family is Family.ATTENTION:
            kernel = attention.kernel_of(op, self.conditions.attention_kernel)
            priced = attention.price(accelerator, op, kernel)
            return priced if kernel else self._corrected(op, priced)
        if op.family in _TRAFFIC:
            return memory_bound.price(accelerator, op)
        if op.family in (Family.HOST, Family.TRANSFER):  # not_modelled names the copies
            return FREE
        raise CostError(f"op {op.name} of family {op.family} has no price without its group")

    def _corrected(self, op: Op, priced: Priced) -> Priced:
        return self._tables.correct(op, priced) if self._tables else priced

    def collective_seconds(self, collective: Collective, ranks: Sequence[int]) -> Priced:
        """Seconds of a collective over the group of global ``ranks``.

        Raises:
            CostError: The kind has no price, or a rank does not exist on the target.
        """
        measured, priced = self.measured_collectives, None
        if measured is not None:
            priced = measured.price(self.cluster, collective, ranks)
        if priced is None:
            priced = collectives.price(self.cluster, collective, ranks, self._collectives)
        return self._shared(priced, ranks)

    def remote_seconds(self, op: Op, ranks: Sequence[int]) -> Priced:
        """Seconds of an op that talks to the other members of the group of global ``ranks``.

        Raises:
            CostError: It has no price, or a rank does not exist on the target.
        """
        if exchange.is_exchange(op):
            return self._shared(exchange.price(self.cluster, op, ranks), ranks, exchange=True)
        if op.collective is None:
            raise CostError(f"op {op.name} of family {op.family} says nothing of its collective")
        received = op.attr("received_bytes")  # of an all-to-all, where it is not what is sent
        if received and received > op.collective.bytes:
            larger = dataclasses.replace(op.collective, bytes=received)
            return self.collective_seconds(larger, ranks)
        return self.collective_seconds(op.collective, ranks)

    def _shared(self, priced: Priced, ranks: Sequence[int], *, exchange: bool = False) -> Priced:
        """A price of communication beside the rest of a training step."""
        if self._alone:
            return priced
        domains = placement(self.cluster, ranks).domains
        factor = sustained.communication(self.cluster.accelerator, domains, exchange=exchange)
        return sustained.slowed(priced, factor)
