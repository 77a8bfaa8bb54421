"""Measured times of ops: what was measured once is not measured again.

One SQLite file holds samples by op signature, device, versions, source and clock.  A regression
over them prices shapes that nobody measured, with an interval from its own left-out residuals.
"""

from primus_ext.cost.latency_db.rows import Clock, Device, Origin, Row, Source, Versions
from primus_ext.cost.latency_db.store import DatabaseError, LatencyDatabase, default_path

__all__ = [
    "Clock",
    "DatabaseError",
    "Device",
    "LatencyDatabase",
    "Origin",
    "Row",
    "Source",
    "Versions",
    "default_path",
]
