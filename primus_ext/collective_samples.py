"""Measured times of collectives as pure data, and the file that holds them.

:mod:`primus_ext.observe.collective_sweep` measures, :mod:`primus_ext.cost.measured_collectives`
fits and prices.  The file is JSON and written whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

from primus_ext import whole_file
from primus_ext.trace import CollectiveKind, to_plain
from primus_ext.trace_io import FormatError, from_plain

SCHEMA = 1
HOST, NETWORK = "host", "network"
"""Tiers: all members in one host; one member in each of several."""
EXCHANGE, UNEVEN = "exchange", "uneven"
"""Variants: send_recv in which everyone sends round a ring at once; all_to_all with unlike parts
(the largest is three times the smallest)."""


ADDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
"""Kinds whose time depends on the numbers that are added, and not on their bytes alone."""


class SamplesError(ValueError):
    """A file that holds no such measurement; the message is one sentence."""


Rounds = tuple[tuple[float, ...], ...]


def _typical(rounds: Rounds) -> float:
    return statistics.median(statistics.median(one) for one in rounds)


def _quietest(rounds: Rounds) -> float:
    every = sorted(seconds for one in rounds for seconds in one)
    return every[len(every) // 10]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind, size and group: all groups of so many members at once."""

    kind: CollectiveKind
    variant: str = ""
    """'' (plain), :data:`EXCHANGE` or :data:`UNEVEN`."""
    dtype: str
    """Of the elements, as in a trace: fp32, bf16, ..."""
    tier: str = HOST
    members: int
    """Of the group; the other processes were at it too, in groups as large."""
    bytes: int
    """As :attr:`primus_ext.trace.Collective.bytes` counts; 0 of a barrier."""

    def __str__(self) -> str:
        """In words."""
        name = " ".join(part for part in (self.variant, str(self.kind)) if part)
        size = f" of {self.bytes:,} bytes" if self.bytes else ""
        return f"{name}{size} ({self.dtype})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Case):
    """A case, measured several times."""

    seconds: Rounds
    """All repetitions, by round.  Of each the slowest member's; a plain send_recv is half of a
    message there and back."""
    processor_s: tuple[float, ...] = ()
    """Seconds of a core that a member's threads took, the median of each round; empty where devices
    do the work."""

    @property
    def processor_share(self) -> float:
        """Of an undisturbed repetition, the part that a core works; 1 where it is not known."""
        if not self.processor_s:
            return 1.0
        return min(1.0, statistics.median(self.processor_s) / self.quietest)

    @property
    def typical(self) -> float:
        """Median over rounds of the medians of their repetitions."""
        return _typical(self.seconds)

    @property
    def quietest(self) -> float:
        """Lower decile of all repetitions: what disturbs a measurement only ever adds to it.

        On a machine that others use it comes back best: between odd and even rounds of a sweep of
        gloo at a load of 10 to 16 on two cores it moved by 7 to 22 %, the least of the rounds'
        medians by 19 to 33 %, the median of medians by 16 to 47 %
        (scripts/bench/collectives_gloo.py).
        """
        return _quietest(self.seconds)

    def noise(self, quiet: bool) -> float:
        """How far :attr:`quietest`, or :attr:`typical`, may be off by chance; 0 of one round.

        Half of the distance (of logarithms) between that of the odd rounds and of the even ones.
        """
        if len(self.seconds) < 2:
            return 0.0
        found = _quietest if quiet else _typical
        return abs(math.log(found(self.seconds[::2]) / found(self.seconds[1::2]))) / 2

    @property
    def spread(self) -> float:
        """Median distance of a round's median from the middle one, over that; 0 of one round."""
        middle = self.typical
        rounds = [statistics.median(one) for one in self.seconds]
        return statistics.median(abs(one - middle) for one in rounds) / middle


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was measured on one machine or cluster in one go."""

    schema: int = SCHEMA
    backend: str
    """nccl or gloo; RCCL goes by the name of nccl in torch, ``versions`` tells."""
    accelerator: str
    """What the times are of: a name of ``hydra_conf/accelerator``, or the vendor's name of a
    product that has no file there."""
    product: str
    """The vendor's name of the device."""
    processes: int
    hosts: int = 1
    host_cores: int
    """Cores of a host that its processes may use."""
    versions: dict[str, str]
    """Of torch, the collective library and the driver."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How it was measured: repetitions, rounds, threads a process, load of the machine."""
    samples: tuple[Sample, ...]
    failures: tuple[str, ...] = ()
    """What was not measured, and why."""
    fits: tuple[dict[str, Any], ...] = ()
    """Lines that were fitted, for the reader; prices fit the samples anew."""


def save(sweep: Sweep, path: Path) -> None:
    """Write a sweep whole, or leave what is there.

    Raises:
        OSError: It can't be written.
    """
    whole_file.write(path, json.dumps(to_plain(sweep), indent=1))


def load(path: Path) -> Sweep:
    """Read a sweep.

    Raises:
        SamplesError: The file is not there or holds none.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SamplesError(f"{path} can't be read as measured collectives: {error}") from error
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise SamplesError(f"{path} holds no measured collectives of schema {SCHEMA}")
    try:
        sweep = from_plain(Sweep, plain)
    except FormatError as error:
        raise SamplesError(f"{path} holds no measured collectives: {error}") from error
    for sample in sweep.samples:
        if not sample.seconds or not all(sample.seconds) or sample.members < 2:
            raise SamplesError(f"{path}: a sample of {sample.kind} has no times or no group")
        if not all(0 < seconds < math.inf for one in sample.seconds for seconds in one):
            raise SamplesError(f"{path}: a sample of {sample.kind} has times that are not positive")
    return sweep
