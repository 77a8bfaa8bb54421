"""A child process that times ops on the device at hand, and rows of what it answers."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from primus_ext import trace_io
from primus_ext.cost.latency_db import Clock, Device, Origin, Row, Source, Versions
from primus_ext.runner import child, local_device
from primus_ext.trace import Op, to_plain

MODULE = "primus_ext.observe.microbench"
TIMEOUT_S = 600.0
"""After so long without an answer an op is given up, and the process with it."""
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""On a CPU functions that a GPU would compile run as they are."""


class Microbench:
    """Times ops one by one.  A process that dies or hangs costs one op: the next one starts anew.

    Use as a context manager: its child does not outlive it.
    """

    def __init__(self, device: str, repetitions: int = 7, warmup: int = 2) -> None:
        """Nothing is started yet.

        Args:
            device: As torch names it: ``cpu`` or ``cuda`` (ROCm too).
            repetitions: Samples of each op.
            warmup: Executions before the first.
        """
        self._name, self._asked = device, {"repetitions": repetitions, "warmup": warmup}
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._said: dict[str, Any] = {}

    def __enter__(self) -> Microbench:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._end()

    @property
    def device(self) -> Device:
        """What it runs on.

        Raises:
            ChildError: The device can't be used.
        """
        self._start()
        found = trace_io.from_plain(Device, {**_BARE, **self._said["device"]})
        ours = local_device.accelerator_of(found.product) or ""
        return Device(**{**to_plain(found), "accelerator": ours})

    @property
    def versions(self) -> Versions:
        """Its software."""
        self._start()
        return trace_io.from_plain(Versions, self._said["versions"])

    def answer(self, op: Op) -> dict[str, Any]:
        """Time one op: ``status``, and what :mod:`primus_ext.observe.microbench.serve` says.

        Raises:
            ChildError: No process can be started.
        """
        self._start()
        assert self._process is not None and self._process.stdin is not None
        line = json.dumps({"id": 0, "op": to_plain(op), **self._asked}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
            return self._line()
        except TimeoutError:
            words = f"no answer within {TIMEOUT_S:.0f} s"
        except (OSError, EOFError):
            code = self._process.wait()
            words = f"exit code {code}" if code >= 0 else f"signal {-code}"
        self._end()
        return {"status": "failed", "message": f"{op.name} ended the measuring process: {words}"}

    def row(self, op: Op, answer: Mapping[str, Any]) -> Row:
        """The row of a good answer."""
        return Row(
            op=op,
            device=self.device,
            versions=self.versions,
            source=Source(origin=Origin.MEASURED, name="this machine", note=answer["timed"]),
            samples=tuple(answer["samples"]),
            clock=Clock.BOOST,
            kernel=answer["kernel"],
            warmup=answer["warmup"],
            clock_hz=answer["clock_hz"],
            taken=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )

    def _start(self) -> None:
        if self._process is not None:
            return
        own = _EAGER if self._name == "cpu" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-P", "-m", MODULE, "--device", self._name],
            env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._rest = b""
        try:
            self._said = self._line()
        except (EOFError, TimeoutError) as error:
            self._end()
            raise child.ChildError(
                2, f"--device={self._name} can't be used here; legal is a device that torch finds"
            ) from error

    def _line(self) -> dict[str, Any]:
        """The next line of the child.

        Raises:
            EOFError: It ended.
            TimeoutError: It says nothing.
        """
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(TIMEOUT_S):
                    raise TimeoutError
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                if not block:
                    raise EOFError
                self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                if self._process.stdin is not None:
                    self._process.stdin.close()
            child.end(self._process)
            self._process = None


_BARE = to_plain(Device(product="", kind=""))


def all_answers(
    bench: Microbench, ops: list[Op], progress: child.Progress
) -> Iterator[tuple[Op, dict[str, Any]]]:
    """Time ops, one after another."""
    for number, op in enumerate(ops):
        progress(number, len(ops), op.name)
        yield op, bench.answer(op)
