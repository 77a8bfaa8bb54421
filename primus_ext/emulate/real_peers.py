"""The other ranks, real: one process each, over gloo, in the world that is otherwise virtual.

For the oracle of memory: the program, the stand-ins and the meter are those of the virtual run, so
that what differs is the backend's.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=15)
"""Of a collective: the ranks share few cores."""


def join(rank: int, world_size: int, rendezvous: str) -> None:
    """Become ``rank`` of a group of processes; every group of it is gloo's.

    Args:
        rank: Global rank.
        world_size: Processes; each of them calls this.
        rendezvous: A file that all of them see and that does not exist before.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size,
        timeout=TIMEOUT,
    )  # fmt: skip
    dist.new_group = _on_gloo(dist.new_group)


def _on_gloo(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def create(ranks: list[int] | None = None, *_args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("backend", "pg_options", "timeout")}
        return new_group(ranks, timeout=TIMEOUT, backend="gloo", **kwargs)

    return create
