"""Answer requests, one JSON line each: ``{"id", "op", "repetitions", "warmup"}``.

The first line that is written describes device and software.  Then every request gets one answer:
``status`` is ``ok`` (with ``samples``, seconds), ``refused`` (it can't be run alone here), ``oom``
(with ``bytes`` that it needs and ``free`` that there are) or ``failed``; ``message`` says why.  An
op that fails does not end the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, TextIO

import torch

from primus_ext import trace_io
from primus_ext.observe.microbench import build, machine, tensors, timing
from primus_ext.observe.microbench.tensors import CannotRun
from primus_ext.trace import Op

SCATTER = 0.10
"""Spread above which an op is measured again: see ``STEADY_SPREAD`` of the latency database."""
ROOM = 0.9
"""Share of the free memory that one op may take: the rest is for what its kernel needs beside."""


def measure(op: Op, device: torch.device, asked: dict[str, Any]) -> dict[str, Any]:
    """One answer, without its id.

    Args:
        op: What to run.
        device: Where.
        asked: ``repetitions`` (7), ``warmup`` (2) and ``retries`` (1) where samples scatter.
    """
    needed, free = 0, machine.free_bytes(device)
    try:
        needed = tensors.needed_bytes(op)
        if needed > ROOM * free:
            return _oom(op, needed, free)
        sampled, kernel, taken = _sampled(op, device, asked)
    except CannotRun as error:
        return {"status": "refused", "message": str(error)}
    except (torch.OutOfMemoryError, MemoryError):
        return _oom(op, needed, free)
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # what torch says on a CPU
            return _oom(op, needed, free)
        return _failed(op, error)
    except Exception as error:
        return _failed(op, error)
    finally:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
    return {
        "status": "ok", "samples": list(sampled.samples), "device_s": sampled.device_s,
        "executions": sampled.executions, "warmup": sampled.warmup, "kernel": kernel,
        "timed": taken,
        "clock_hz": machine.clock_hz(device), "spread": timing.spread(sampled.samples),
    }  # fmt: skip


def _sampled(
    op: Op, device: torch.device, asked: dict[str, Any]
) -> tuple[timing.Sampled, str, str]:
    torch.manual_seed(0)
    clock, taken = timing.clock_of(device)
    short = timing.SHORT_S if device.type == "cpu" else 0.0
    with torch.no_grad():
        run, kernel = build.build(op, device)

        def once() -> timing.Sampled:
            return timing.sample(
                run, clock, int(asked.get("repetitions", 7)), int(asked.get("warmup", 2)), short
            )

        return timing.steadiest(once, SCATTER, int(asked.get("retries", 1))), kernel, taken


def _oom(op: Op, needed: int, free: int) -> dict[str, Any]:
    words = f"{op.name} needs {needed} bytes of memory, and {free} are free"
    return {"status": "oom", "bytes": needed, "free": free, "message": words}


def _failed(op: Op, error: Exception) -> dict[str, Any]:
    told = str(error).strip().splitlines() or [""]
    return {"status": "failed", "message": f"{op.name}: {type(error).__name__}: {told[0]}"}


def serve(device: torch.device, requests: TextIO, answers: TextIO) -> None:
    """Answer until there are no more requests."""

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    tell(machine.described(device))
    for line in requests:
        asked = json.loads(line)
        op = trace_io.from_plain(Op, asked["op"])
        tell({"id": asked["id"], **measure(op, device, asked)})


def main() -> None:
    """Serve standard input; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device(sys.argv[sys.argv.index("--device") + 1])
    serve(device, sys.stdin, answers)
