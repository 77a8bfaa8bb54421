"""A sweep whose ranks torchrun (or another launcher with its variables) has started.

Nobody watches them here but the library itself: NCCL's watchdog and gloo end a rank whose
collective hangs.  The first rank writes what there is every half minute, so that such an end leaves
a whole file.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from primus_ext.collective_samples import save
from primus_ext.observe import collective_machine, collective_worker
from primus_ext.observe.collective_ranks import FAILED, SweepError
from primus_ext.observe.collective_sweep import Times, Wanted, cases, gathered, orders_for

_EVERY = 30.0
"""Seconds between two files."""


def main(asked: dict[str, Any]) -> int:
    """Be one rank.

    Args:
        asked: Arguments of the command.

    Returns:
        As the command; each rank its own.
    """
    out: Path = asked.pop("out")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device = asked.pop("device") or collective_machine.default_device()
    given = asked.pop("processes")
    try:
        if given not in (None, local):
            raise SweepError(f"processes={given} is not legal: the launcher started {local}", 2)
        wanted = Wanted(device=device, processes=local, hosts=world // local, **asked)
        if rank == 0 and not out.parent.is_dir():
            raise SweepError(f"--out {out}: {out.parent} is not a folder", 2)
        return _measured(wanted, out, rank, world)
    except SweepError as error:
        sys.stderr.write(f"primus_ext: {error}\n")
        return error.exit_code


def _measured(wanted: Wanted, out: Path, rank: int, world: int) -> int:
    asked = cases(wanted)
    times: Times = defaultdict(list)
    begun: list[int] = []
    written = time.monotonic()

    def write(failures: list[str]) -> None:
        nonlocal written
        if rank == 0 and times:
            save(gathered(wanted, asked, times, failures), out)
            written = time.monotonic()

    def tell(event: dict[str, Any]) -> None:
        if "begin" in event:
            begun[:] = [event["begin"]]
        elif "sample" in event:
            seconds, worked = event["seconds"], event.get("processor")
            times[event["sample"]].append((tuple(seconds), worked))
            if time.monotonic() - written > _EVERY:
                write([])

    try:
        collective_worker.run(orders_for(wanted, asked, "env://"), rank, world, tell)
    except RuntimeError as error:  # of gloo, of NCCL, of the store
        during = f"during {asked[begun[0]]} in groups of {asked[begun[0]].members}"
        reason = str(error).splitlines()[0]
        failure = f"rank {rank} failed {during if begun else 'at the start'}: {reason}"
        write([failure])
        raise SweepError(f"{failure}; what was measured before is kept", FAILED) from error
    write([])
    return 0
