"""Run the user's program in a child process and bring its answer back."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from primus_ext.runner.outcome import Exit

BOOTSTRAP = "primus_ext.emulate.bootstrap"
PROGRESS = b"PRIMUS_EXT_PROGRESS "
MARK = "PRIMUS_EXT_CHILD"
"""Set in the child's environment, and so in that of every process it starts."""
_INHERITED = str(Path(__file__).resolve().parent.parent / "emulate" / "inherited")
"""Folder whose sitecustomize arms the tripwire in all Python processes that the child starts."""
_LEFT = "the program left with exit code"
"""How the bootstrap's message begins where the program called ``sys.exit``."""
_LOG_TAIL = 15
_GRACE_S = 5.0
# What torchrun, MPI and Slurm tell the ranks of the job that the parent belongs to.
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")
_FOREIGN = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
        "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS",
        "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS",
    }
)  # fmt: skip
# Switches by which trackers are turned off; WANDB_MODE and NEPTUNE_MODE are documented by both.
_QUIET = {"WANDB_MODE": "disabled", "NEPTUNE_MODE": "debug", "PYTHONUNBUFFERED": "1"}


class ChildError(Exception):
    """The child gave no traces."""

    def __init__(self, exit_code: int, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.tail = tuple(tail)
        """The last lines that the child printed, where they help."""


Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is in all, and a few words on what runs now."""


def run(
    request: dict[str, Any], options: Sequence[str], folder: Path, log: Path, progress: Progress
) -> dict[str, Any]:
    """Start the bootstrap on a request, follow it, and return its answer.

    Args:
        request: What the bootstrap is asked; ``cwd`` is where it starts, ``result`` is added.
        options: Options of the user's own interpreter, e.g. ``-u``.
        folder: Scratch folder for the request and the answer.
        log: File that gets what the program prints.
        progress: Told how far the child is.

    Returns:
        The answer: ``plan``, ``program``, ``traces``, ``warnings``.

    Raises:
        ChildError: the child answered with an error, or not at all.
        KeyboardInterrupt: after the child and all that it started were ended.
    """
    result = folder / "result.json"
    asked = folder / "request.json"
    asked.write_text(json.dumps({**request, "result": str(result)}))
    # -P: the folder we stand in must not shadow modules of the interpreter; the bootstrap puts
    # on the path what the user's own command would.
    command = [sys.executable, *options, "-P", "-m", BOOTSTRAP, str(asked)]
    printed: deque[str] = deque(maxlen=_LOG_TAIL)
    complaint = ""
    with log.open("wb") as file, _process(command, request["cwd"], folder) as process:
        for line, is_error in _lines(process):
            if line.startswith(PROGRESS):
                _report(line, progress)
                continue
            file.write(line)
            file.flush()
            printed.append(line.decode("utf-8", errors="replace").rstrip())
            complaint = printed[-1].strip() if is_error and line.strip() else complaint
        code = process.wait()
    return _answer(result, code, list(printed), complaint, log)


def environment(folder: Path) -> dict[str, str]:
    """The child's environment: ours without this job's rank variables, trackers turned off.

    Args:
        folder: Scratch folder, which gets the temporary files of all that the child starts.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    paths = [_INHERITED, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "TMPDIR": str(folder)}
    return {**kept, **_QUIET, **own, MARK: "1"}


@contextlib.contextmanager
def _process(command: list[str], cwd: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The child in a process group of its own, which does not outlive the block."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with leaving_on_sigterm():
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a child that leads its process group, and all that it started."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    # Also after a good end: what the program started in the background must not stay.
    _signal(process, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM (torchrun, schedulers) into an orderly exit, so that the child is ended too."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        previous = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not in the main thread: the handler can't be set there
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _lines(process: subprocess.Popen[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines of the child, and whether each is from its standard error, until it ends.

    Something that it started may keep the pipes open: that is not waited for.
    """
    assert process.stdout is not None and process.stderr is not None
    rest = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    errors = process.stderr.fileno()
    with selectors.DefaultSelector() as selector:
        for descriptor in rest:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            ended = process.poll() is not None
            ready = selector.select(0 if ended else 0.1)
            if ended and not ready:
                break
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                if not block:
                    selector.unregister(key.fd)
                *whole, rest[key.fd] = (rest[key.fd] + block).split(b"\n")
                for line in whole:
                    yield line + b"\n", key.fd == errors
    for descriptor, line in rest.items():
        if line:
            yield line, descriptor == errors


def _report(line: bytes, progress: Progress) -> None:
    try:
        told = json.loads(line[len(PROGRESS) :])
        progress(int(told["done"]), int(told["total"]), str(told["text"]))
    except (ValueError, KeyError, TypeError):
        return  # two processes wrote into one line; the next report tells the same


def _answer(
    result: Path, code: int, printed: list[str], complaint: str, log: Path
) -> dict[str, Any]:
    if not result.exists():
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise ChildError(
            Exit.INTERNAL,
            f"the child process that runs your program ended without an answer ({how}); all that "
            f"it printed is in {log}",
            printed,
        )
    answer = json.loads(result.read_text())
    if answer["status"] == "ok":
        return answer
    exit_code, message = int(answer["exit_code"]), str(answer["message"])
    if exit_code != Exit.USAGE:  # what the program printed is the evidence
        raise ChildError(exit_code, message, printed)
    if message.startswith(_LEFT) and complaint:  # the program itself refused, in its own words
        message = complaint
    raise ChildError(exit_code, message)
