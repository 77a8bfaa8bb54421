"""What the database says of one device: measured, or between what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from primus_ext.cost.latency_db import kinds, signature
from primus_ext.cost.latency_db.regression import Estimate, Model, Regression
from primus_ext.cost.latency_db.rows import Clock, Device, Origin, Row
from primus_ext.cost.latency_db.store import LatencyDatabase
from primus_ext.cost.priced import TABLE, Priced
from primus_ext.trace import Family, Op

_NAMELESS = (Family.GEMM, Family.GROUPED_GEMM, Family.ATTENTION)


class Prices:
    """Times of ops on one device.

    A row that was measured again counts in its newest form; unsteady ones count where there is no
    other.  Rows of training count before those of isolated runs.
    """

    def __init__(self, rows: Iterable[Row], model: Model | None = None) -> None:
        """Hold rows of one device.

        Args:
            rows: Of one device, oldest first.
            model: Modelled seconds of an op alone at boost clock; None: a roofline of the rows.
        """
        self._rows = _chosen(rows)
        self._work = {
            (kinds.kind_of(op), kinds.place_of(op)): op
            for op in self._rows
            if op.family in _NAMELESS
        }
        self._model = model
        self._regressions: dict[Clock, Regression] = {}
        self._estimates: dict[Op, Priced | None] = {}

    @classmethod
    def of(
        cls, database: LatencyDatabase, *, device: Device | None = None, accelerator: str = "",
        model: Model | None = None, imported: bool = False,
    ) -> Prices:  # fmt: skip
        """Those of a device in a database.

        Args:
            database: The database.
            device: This very device; None: any of the product ``accelerator``.
            accelerator: Our name of a product.
            model: As for the class.
            imported: Take imported figures too.  Our formulas are fitted to the same figures, and
                many are of kernels that training does not call.

        Raises:
            ValueError: Neither a device nor a product is named.
        """
        if device is None and not accelerator:
            raise ValueError("prices are those of one device: name it, or its product")
        origin = None if imported else Origin.MEASURED
        found = database.rows(device=device, accelerator=accelerator, origin=origin)
        return cls(found, model)

    @property
    def rows(self) -> list[Row]:
        """The row that counts of every op."""
        return list(self._rows.values())

    def exact(self, op: Op) -> Row | None:
        """The row of this very op, or of the same product or attention under another name.

        Args:
            op: In canonical form.
        """
        found = self._rows.get(op)
        if found is None and op.family in _NAMELESS:
            twin = self._work.get((kinds.kind_of(op), kinds.place_of(op)))
            found = self._rows.get(twin) if twin is not None else None
        return found

    def estimate(self, op: Op, clock: Clock = Clock.BOOST) -> Estimate | None:
        """From ops of the same kind; None where nothing of the family was measured.

        Args:
            op: In canonical form.
            clock: Condition of the rows that are asked.
        """
        if clock not in self._regressions:
            points = [(row.op, row.median) for row in self._rows.values() if row.clock is clock]
            self._regressions[clock] = Regression(points, self._model)
        return self._regressions[clock].estimate(op)

    def price(self, op: Op) -> tuple[Priced, Clock] | None:
        """The price of an op and in which condition it holds; None if the database has none.

        It has one for what was measured, and for what lies near that in the same kind of work
        (:attr:`~primus_ext.cost.latency_db.regression.Estimate.sound`).
        """
        try:
            wanted = signature.canonical(op)
        except signature.SignatureError:
            return None
        row = self.exact(wanted)
        if row is not None:
            return _exact(row), row.clock
        for clock in (Clock.SUSTAINED, Clock.BOOST):
            found = self.estimate(wanted, clock)
            if found and found.sound:
                return _between(found), clock
        return None


def _exact(row: Row) -> Priced:
    interval = row.median * math.exp(-row.spread), row.median * math.exp(row.spread)
    words = f"{len(row.samples)} samples of {row.kernel} on {row.device.product}"
    return Priced(row.median, TABLE, {"measured": row.median}, interval, words)


def _between(found: Estimate) -> Priced:
    words = f"{found.points} of its kind measured, the nearest {found.octaves:.1f} octaves away"
    interval = found.low, found.high
    return Priced(found.seconds, TABLE, {"measured": found.seconds}, interval, words)


def _chosen(rows: Iterable[Row]) -> dict[Op, Row]:
    """One row of every op, its samples those of the newest software."""
    by_op: dict[Op, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    return {op: _best(found) for op, found in by_op.items()}


def _best(rows: Sequence[Row]) -> Row:
    steady = [row for row in rows if row.steady] or list(rows)
    training = [row for row in steady if row.clock is Clock.SUSTAINED] or steady
    newest = training[-1].versions
    same = [row for row in training if row.versions == newest]
    if len(same) == 1:
        return same[0]
    middle = statistics.median(row.median for row in same)
    return min(reversed(same), key=lambda row: abs(row.median - middle))
