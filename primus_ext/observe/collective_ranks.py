"""The processes of a sweep: started, watched, ended."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.observe.collective_worker import PIPE, Orders, groups_of, plain_orders

FAILED = 4
"""Exit code when a rank died or a collective hangs."""
_START = 120.0
"""Seconds, at least, that the ranks may take to load torch and to make their groups."""
_LAST_LINES = 3

Sampled = Callable[[int, Sequence[float], float | None, Mapping[int, int]], None]
"""Told the number of a case, its repetitions in a round, what of them took a core, and the process
ids of all ranks."""


class SweepError(RuntimeError):
    """The sweep can't go on; the message is one sentence."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        """Args: the sentence, and what the command ends with."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclasses.dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: int
    log: Path
    case: int | None = None
    """The one it began last."""
    ended: bool = False
    pending: bytes = b""


def run(orders: Orders, processes: int, scratch: Path, sampled: Sampled) -> None:
    """Let all ranks measure all cases.

    Args:
        orders: What they measure.
        processes: Ranks, all on this host.
        scratch: Folder for their orders and what they print.
        sampled: Told of each case as soon as it is measured.

    Raises:
        SweepError: A rank died, or nothing moved for ``orders.timeout`` seconds.
    """
    file = scratch / "orders.json"
    file.write_text(plain_orders(orders), encoding="utf-8")
    ranks: list[_Rank] = []
    try:
        ranks += [_start(file, scratch, rank, processes) for rank in range(processes)]
        _watch(orders, ranks, sampled)
    finally:
        for rank in ranks:
            rank.process.kill()  # also one that is stopped or hangs in a driver call
        for rank in ranks:
            rank.process.wait()
            os.close(rank.pipe)


def _start(orders: Path, scratch: Path, rank: int, world: int) -> _Rank:
    reading, writing = os.pipe()
    log = scratch / f"rank{rank}.log"
    environment = {**os.environ, PIPE: str(writing)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "primus_ext.observe.collective_worker", str(orders),
               str(rank), str(world)]  # fmt: skip
    try:
        with log.open("wb") as said:
            process = subprocess.Popen(
                command, env=environment, pass_fds=(writing,), stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT,
            )  # fmt: skip
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return _Rank(process, reading, log)


def _watch(orders: Orders, ranks: Sequence[_Rank], sampled: Sampled) -> None:
    """Hear all ranks until each has ended, or one fails."""
    pids = {number: rank.process.pid for number, rank in enumerate(ranks)}
    deadline = time.monotonic() + max(_START, orders.timeout)
    with selectors.DefaultSelector() as selector:
        for number, rank in enumerate(ranks):
            selector.register(rank.pipe, selectors.EVENT_READ, number)
        while not all(rank.ended for rank in ranks):
            ready = selector.select(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            for key, _ in ready:
                number = key.data
                events = _read(ranks[number])
                if events is None:
                    selector.unregister(key.fd)
                    continue
                for event in events:
                    deadline = time.monotonic() + orders.timeout
                    _heard(ranks[number], event, sampled, pids)
            _refuse_dead(orders, ranks)
            if time.monotonic() > deadline:
                raise SweepError(_hanging(orders, ranks))


def _read(rank: _Rank) -> list[dict[str, Any]] | None:
    """Events that have arrived; None at the end."""
    data = os.read(rank.pipe, 1 << 16)
    if not data:
        return None
    *lines, rank.pending = (rank.pending + data).split(b"\n")
    return [json.loads(line) for line in lines]


def _heard(
    rank: _Rank, event: Mapping[str, Any], sampled: Sampled, pids: Mapping[int, int]
) -> None:
    if "begin" in event:
        rank.case = event["begin"]
    elif "sample" in event:
        sampled(event["sample"], event["seconds"], event.get("processor"), pids)
    elif "end" in event:
        rank.ended = True


def _refuse_dead(orders: Orders, ranks: Sequence[_Rank]) -> None:
    """A rank that died takes its peers with it, so the one with a signal is the first cause."""
    dead = [
        (number, rank, code)
        for number, rank in enumerate(ranks)
        if (code := rank.process.poll()) is not None and not rank.ended
    ]
    if not dead:
        return
    number, rank, code = min(dead, key=lambda one: (one[2] >= 0, one[0]))
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    raise SweepError(
        f"rank {number} {how} {_during(orders, rank)}; what was measured before is kept"
        f"{_last_words(rank) if code >= 0 else ''}"
    )


def _during(orders: Orders, rank: _Rank) -> str:
    if rank.case is None:
        return "before its first collective"
    case = orders.cases[rank.case]
    return f"during {case} in groups of {case.members}"


def _last_words(rank: _Rank) -> str:
    """What a rank printed at its end, on one line."""
    try:
        lines = rank.log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return f" (it said: {' / '.join(said[-_LAST_LINES:])})" if said else ""


def _hanging(orders: Orders, ranks: Sequence[_Rank]) -> str:
    """Which collective, and which group: the one that the ranks who are furthest wait in."""
    begun = [rank.case for rank in ranks if rank.case is not None]
    if not begun:
        return (
            f"no rank began a collective within {max(_START, orders.timeout):.0f} s: the groups of "
            f"ranks 0 to {len(ranks) - 1} could not be made"
        )
    stuck = [number for number, rank in enumerate(ranks) if not rank.ended]
    counts = [ranks[number].case for number in stuck]
    last = max((case for case in counts if case is not None), key=counts.count)
    case = orders.cases[last]
    groups = groups_of(case.tier, case.members, len(ranks) // orders.hosts, orders.hosts)
    late = [str(number) for number in stuck if ranks[number].case != last]
    absent = f"; rank(s) {', '.join(late)} never came to it" if late else ""
    return (
        f"{case} hangs: nothing moved for {orders.timeout:g} s in the group(s) of ranks "
        f"{' and '.join(str(group) for group in groups)}{absent}; what was measured before is kept"
    )
