"""One measured time and all that it depends on, as pure data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from enum import StrEnum
from typing import Any

from primus_ext import trace_io
from primus_ext.cost.latency_db import signature
from primus_ext.trace import Op, to_plain

STEADY_SPREAD = 0.10
"""Spread above which samples are called unsteady.  Repeated kernels of aiconfigurator-core 0.12.0
differ by 6 % at the 95th percentile (B300, 109,205 duplicated keys): beyond that the device itself
changed, e.g. its clock under a power or temperature limit."""


class Clock(StrEnum):
    """In which condition of the device a time was taken."""

    BOOST = "boost"
    """An isolated short run on an idle device: short kernels at the highest clock.  Training is
    slower (:mod:`primus_ext.cost.sustained`)."""
    SUSTAINED = "sustained"
    """Inside steps of training, or a run as long as to be thermally stable."""


class Origin(StrEnum):
    """Where a time comes from."""

    MEASURED = "measured"
    IMPORTED = "imported"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What ran."""

    product: str
    """The vendor's name, e.g. ``NVIDIA H200`` or ``AMD EPYC``."""
    kind: str
    """``gpu`` or ``cpu``."""
    accelerator: str = ""
    """Our name of the product (``hydra_conf/accelerator``), '' where we have no figures of it."""
    memory_bytes: int = 0
    """Device memory; 0 where it is not known."""
    units: int = 0
    """Multiprocessors (SMs, CUs), or cores of a CPU; 0 where not known."""
    threads: int = 0
    """Of a CPU: threads that one op may use; 0 for GPUs."""
    clock_hz: float = 0.0
    """Highest clock; 0 where not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Software that a time depends on; '' where it is not known."""

    torch: str = ""
    framework: str = ""
    """What calls the kernel, e.g. ``transformer-engine 2.20``."""
    driver: str = ""
    """Of the device, with the runtime (CUDA, ROCm)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who says so."""

    origin: Origin
    name: str
    """``this machine``, or the file and its own source."""
    license: str = ""
    """Of imported figures, as their publisher states it."""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Samples of one op on one device.

    Raises:
        ValueError: No samples, or one that is no positive time.
    """

    op: Op
    """In canonical form (:func:`primus_ext.cost.latency_db.signature.canonical`)."""
    device: Device
    versions: Versions
    source: Source
    samples: tuple[float, ...]
    """Seconds of single executions, in the order in which they were taken."""
    clock: Clock
    kernel: str
    """What was called, e.g. ``aten.mm``; it says so where that is not what the op's name says."""
    warmup: int = 0
    """Executions before the first sample."""
    clock_hz: float = 0.0
    """While it ran; 0 where not known."""
    taken: str = ""
    """Date and time, ISO 8601; '' where not known."""

    def __post_init__(self) -> None:
        if not self.samples or not all(math.isfinite(s) and s > 0 for s in self.samples):
            raise ValueError(f"samples={list(self.samples)} of {self.op.name}: seconds above 0")
        object.__setattr__(self, "op", signature.canonical(self.op))

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median; 0 for a single sample."""
        return spread(self.samples)

    @property
    def steady(self) -> bool:
        """Whether the device ran alike through all samples."""
        return self.spread <= STEADY_SPREAD


def spread(samples: tuple[float, ...]) -> float:
    """Distance between the quartiles of samples over their median; 0 for a single one."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def to_json(row: Row) -> str:
    """One line of an exported file."""
    plain = {
        "op": json.loads(signature.text(row.op)),
        **{name: to_plain(getattr(row, name)) for name in _FIELDS},
    }
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def from_json(line: str) -> Row:
    """The row that :func:`to_json` wrote.

    Raises:
        ValueError: It is none.
    """
    return from_plain(json.loads(line))


def from_plain(plain: dict[str, Any]) -> Row:
    """The row from JSON values.

    Raises:
        ValueError: It has another shape.
    """
    if not isinstance(plain, dict):
        raise ValueError(f"{type(plain).__name__} is no row")
    op, rest = plain.get("op"), {name: value for name, value in plain.items() if name != "op"}
    fields = trace_io.from_plain(_Fields, rest)
    return Row(
        op=trace_io.from_plain(Op, op),
        **{name: getattr(fields, name) for name in _FIELDS},
    )


def digest(row: Row) -> str:
    """What tells a row from any other: equal rows are kept once."""
    return hashlib.sha256(to_json(row).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """A row without its op."""

    device: Device
    versions: Versions
    source: Source
    samples: tuple[float, ...]
    clock: Clock
    kernel: str
    warmup: int
    clock_hz: float
    taken: str


_FIELDS = tuple(field.name for field in dataclasses.fields(_Fields))
