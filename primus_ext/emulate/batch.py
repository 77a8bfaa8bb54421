"""Answer many requests with one start: ``python -m primus_ext.emulate.batch REQUESTS.json``.

Importing torch and the frameworks costs seconds, a fork milliseconds.  The virtual world is
installed and the frameworks are imported once; every request is then answered in a fork of that
process, which is a fresh one as far as the program can tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus_ext.emulate import bootstrap, device_profile, session
from primus_ext.emulate.device_profile import require_device
from primus_ext.emulate.session import SAME

_IMPORTS = ("megatron.training", "megatron.training.training", "transformer_engine.pytorch",
            "primus_ext.emulate.virtual_world")


def main(path: str) -> None:
    """Answer the requests of a file.

    Args:
        path: JSON, a list of requests as :func:`primus_ext.emulate.bootstrap.main` takes them,
            alike in :data:`SAME`; ``timeout_s`` is seconds after which one is given up.  Each
            fork's output goes to ``log``, beside ``result`` (default: ``result`` + ``.log``).

    Raises:
        ValueError: they differ in what a process has one of.
    """
    requests = json.loads(Path(path).read_text())
    require_alike(requests)
    if not requests:
        return
    bootstrap.install(requests[0])
    for name in _IMPORTS:
        importlib.import_module(name)
    for request in requests:
        _in_fork(request)


def require_alike(requests: Sequence[dict[str, Any]]) -> None:
    """Check that one process can answer all of them.

    Raises:
        ValueError: they differ in a key of :data:`primus_ext.emulate.session.SAME`.
    """
    for request in requests:
        for key in SAME:
            if request[key] != requests[0][key]:
                raise ValueError(
                    f"{key}={request[key]!r} can't be answered by the process of "
                    f"{key}={requests[0][key]!r}; legal: requests alike in {', '.join(SAME)}"
                )


def _in_fork(request: dict[str, Any]) -> None:
    shapes = Path(request["result"] + ".shapes")
    pid = os.fork()
    if pid == 0:
        _answer({**request, "shapes_learned": str(shapes)})
    deadline = time.monotonic() + float(request.get("timeout_s", 3600))
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.02)
    if shapes.exists():
        session.absorb(shapes.read_bytes())  # the next fork starts with them
        shapes.unlink()


def _answer(request: dict[str, Any]) -> None:
    """Body of a fork: never returns."""
    os.setpgid(0, 0)  # so that the forks of its ranks can be ended with it
    log = os.open(
        request.get("log", request["result"] + ".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    local = int(request["gpus_per_node"])
    os.environ.update(WORLD_SIZE=str(request["world_size"]), LOCAL_WORLD_SIZE=str(local))
    device_profile.set_device(dataclasses.replace(require_device(), device_count=local))
    bootstrap.answer(request, installed=True)


if __name__ == "__main__":
    main(sys.argv[1])
