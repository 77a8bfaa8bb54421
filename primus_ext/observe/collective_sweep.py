"""Measure the collectives of this machine with the real library, and write the times to a file.

    python -m primus_ext.observe.collective_sweep --processes 2 --out collectives.json
    torchrun --nnodes 2 ... -m primus_ext.observe.collective_sweep --out collectives.json

One process a device (NCCL, or RCCL by the same name), or processes on the cores of a host (gloo).
All kinds, sizes, group sizes and, where numbers are added, number formats; all groups of a size at
once.  Started by torchrun on several hosts it also measures groups with one member on each.
Rounds go through all cases in changing order.  A collective that hangs and a rank that dies
end the sweep with a sentence that names them; what was measured by then is written, whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.collective_samples import (
    ADDS,
    EXCHANGE,
    HOST,
    NETWORK,
    UNEVEN,
    Case,
    Sample,
    Sweep,
    save,
)
from primus_ext.observe import collective_machine, collective_ranks
from primus_ext.observe.collective_calls import DTYPES, fitting
from primus_ext.observe.collective_ranks import SweepError
from primus_ext.observe.collective_worker import Orders
from primus_ext.trace import CollectiveKind

_KINDS = {
    "all_reduce": (CollectiveKind.ALL_REDUCE, ""),
    "all_gather": (CollectiveKind.ALL_GATHER, ""),
    "reduce_scatter": (CollectiveKind.REDUCE_SCATTER, ""),
    "all_to_all": (CollectiveKind.ALL_TO_ALL, ""),
    "all_to_all_uneven": (CollectiveKind.ALL_TO_ALL, UNEVEN),
    "broadcast": (CollectiveKind.BROADCAST, ""),
    "send_recv": (CollectiveKind.SEND_RECV, ""),
    "send_recv_ring": (CollectiveKind.SEND_RECV, EXCHANGE),
    "barrier": (CollectiveKind.BARRIER, ""),
}
KINDS = tuple(_KINDS)
"""What ``--kinds`` may name."""
SMALLEST = 1024
Times = dict[int, list[tuple[tuple[float, ...], float | None]]]
"""By case and round: repetitions, and what of them took a core."""
LARGEST = {"cuda": 256 << 20, "cpu": 32 << 20}
"""Bytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to measure."""

    processes: int
    """Of a host."""
    hosts: int = 1
    device: str
    """cpu or cuda."""
    kinds: Sequence[str] = KINDS
    sizes: Sequence[int] = ()
    """Bytes; empty: powers of two, from :data:`SMALLEST` to :data:`LARGEST`."""
    members: Sequence[int] = ()
    """Group sizes; empty: all from 2 to 4, then powers of two, and all processes."""
    dtypes: Sequence[str] = ("fp32", "bf16")
    rounds: int = 3
    repetitions: int = 20
    seconds: float = 0.25
    """That a case may take in a round."""
    timeout: float = 60.0
    accelerator: str = ""
    """Name of the accelerator file that describes the device; '': cpu, or the product's name."""


def usual_sizes(device: str) -> list[int]:
    """Powers of two."""
    sizes = [SMALLEST]
    while sizes[-1] < LARGEST[device]:
        sizes.append(2 * sizes[-1])
    return sizes


def usual_members(processes: int) -> list[int]:
    """Group sizes that a host of so many processes can have."""
    powers = {1 << power for power in range(1, processes.bit_length() + 1)}
    return sorted(n for n in {2, 3, 4, *powers, processes} if 2 <= n <= processes)


def cases(wanted: Wanted) -> list[Case]:
    """All cases, equal ones once.

    Raises:
        SweepError: Something that was asked for does not exist.
    """
    _check(wanted)
    sizes = wanted.sizes or usual_sizes(wanted.device)
    found: dict[Case, None] = {}
    for name, tier in itertools.product(wanted.kinds, (HOST, NETWORK)):
        kind, variant = _KINDS[name]
        most = wanted.processes if tier == HOST else wanted.hosts
        groups = [n for n in wanted.members or usual_members(most) if n <= most]
        if kind is CollectiveKind.SEND_RECV and not variant:
            groups = [2] if most >= 2 else []
        for members in groups:
            for dtype in wanted.dtypes if kind in ADDS else wanted.dtypes[:1]:
                for size in (0,) if kind is CollectiveKind.BARRIER else sizes:
                    found[fitting(Case(kind=kind, variant=variant, dtype=dtype, members=members,
                                       tier=tier, bytes=size))] = None  # fmt: skip
    return list(found)


def _check(wanted: Wanted) -> None:
    for name, values, legal in (
        ("kinds", wanted.kinds, KINDS), ("dtypes", wanted.dtypes, tuple(DTYPES)),
    ):  # fmt: skip
        for value in values:
            if value not in legal:
                raise SweepError(f"{name}={value} is not known: legal are {', '.join(legal)}", 2)
    most = max(wanted.processes, wanted.hosts)
    if most < 2:
        raise SweepError(f"processes={wanted.processes} is not legal: a group has 2 or more", 2)
    for members in wanted.members:
        if not 2 <= members <= most:
            raise SweepError(f"members={members} is not legal: groups have 2 to {most} members", 2)
    for size in wanted.sizes:
        if size < 1:
            raise SweepError(f"sizes={size} is not legal: it must be positive", 2)
    there = collective_machine.devices(wanted.device)
    if there is not None and wanted.processes > there:
        raise SweepError(
            f"processes={wanted.processes} is not legal: {there} device(s) are here, and a device "
            "takes one process",
            2,
        )


def sweep(
    wanted: Wanted, out: Path, told: Callable[[int, int, Mapping[int, int]], None] | None = None
) -> Sweep:
    """Measure, and write what was measured to ``out``, also when it ends early.

    Args:
        wanted: What to measure.
        out: The file; its folder must exist.
        told: Called after each case with cases done, cases in all, and the ranks' process ids.

    Raises:
        SweepError: A collective hangs or a rank died, after the file is written; or something is
            not legal, before anything is measured.
    """
    asked = cases(wanted)
    if not out.parent.is_dir():
        raise SweepError(f"--out {out}: {out.parent} is not a folder", 2)
    times: Times = defaultdict(list)
    failures: list[str] = []

    def sampled(
        index: int, seconds: Sequence[float], worked: float | None, pids: Mapping[int, int]
    ) -> None:
        times[index].append((tuple(seconds), worked))
        if told is not None:
            told(sum(map(len, times.values())), len(asked) * wanted.rounds, pids)

    with tempfile.TemporaryDirectory(prefix="primus_ext_") as scratch:
        orders = orders_for(wanted, asked, f"file://{scratch}/rendezvous")
        try:
            collective_ranks.run(orders, wanted.processes, Path(scratch), sampled)
        except SweepError as error:
            failures.append(str(error))
            raise
        finally:
            found = gathered(wanted, asked, times, failures)
            if found.samples:
                save(found, out)
    return found


def orders_for(wanted: Wanted, asked: Sequence[Case], rendezvous: str) -> Orders:
    """What the ranks are told."""
    return Orders(
        cases=tuple(asked), device=wanted.device, hosts=wanted.hosts, rounds=wanted.rounds,
        repetitions=wanted.repetitions, seconds=wanted.seconds, timeout=wanted.timeout,
        rendezvous=rendezvous,
    )  # fmt: skip


def gathered(
    wanted: Wanted, asked: Sequence[Case], times: Times, failures: Sequence[str]
) -> Sweep:  # fmt: skip
    """Everything that was measured, as it is written."""
    machine = collective_machine.describe(wanted.device)
    samples = [
        Sample(
            **{field.name: getattr(asked[index], field.name) for field in dataclasses.fields(Case)},
            seconds=tuple(seconds for seconds, _ in rounds),
            processor_s=tuple(worked for _, worked in rounds if worked is not None),
        )
        for index, rounds in sorted(times.items())
    ]  # fmt: skip
    accelerator = wanted.accelerator or ("cpu" if wanted.device == "cpu" else machine.product)
    settings: dict[str, Any] = {
        "rounds": wanted.rounds, "repetitions": wanted.repetitions, "case_s": wanted.seconds,
        **machine.settings,
    }  # fmt: skip
    return Sweep(
        backend="nccl" if wanted.device == "cuda" else "gloo", accelerator=accelerator,
        product=machine.product, processes=wanted.processes * wanted.hosts, hosts=wanted.hosts,
        host_cores=machine.cores,
        versions=machine.versions, settings=settings, samples=tuple(samples),
        failures=tuple(failures),
    )  # fmt: skip


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m primus_ext.observe.collective_sweep",
        description="Measure collectives over the devices of this machine.",
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the times (JSON)")
    parser.add_argument("--processes", type=int, help="default: one a device; on CPUs one a core")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND")
    parser.add_argument("--sizes", nargs="+", type=int, default=[], metavar="BYTES")
    parser.add_argument("--members", nargs="+", type=int, default=[], metavar="N")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], metavar="DTYPE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=20, help="most of a case in a round")
    parser.add_argument("--seconds", type=float, default=0.25, help="for a case in a round")
    parser.add_argument("--timeout", type=float, default=60.0,
                        help="seconds after which a collective counts as hanging")  # fmt: skip
    parser.add_argument("--accelerator", default="", help="its file in hydra_conf/accelerator")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        0; 2 for what is not legal; 4 when a rank died or a collective hangs.
    """
    asked = vars(_arguments(arguments))
    if "LOCAL_WORLD_SIZE" in os.environ:
        from primus_ext.observe import collective_launched  # it takes this module's parts

        return collective_launched.main(asked)
    out = asked.pop("out")
    device = asked.pop("device") or collective_machine.default_device()
    processes = asked.pop("processes") or collective_machine.default_processes(device)

    def told(done: int, total: int, _pids: Mapping[int, int]) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done}/{total}")
            sys.stderr.flush()

    try:
        found = sweep(Wanted(device=device, processes=processes, **asked), out, told)
    except SweepError as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"primus_ext: {error}\n")
        return error.exit_code
    sys.stderr.write(f"{len(found.samples)} samples in {out}\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # what torchrun gives every rank
    sys.exit(main())
