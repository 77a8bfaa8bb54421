"""One emulation in a child process: what was asked, where the answer goes, one fork per role."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from primus_ext.emulate.inputs import Inputs

T = TypeVar("T")
PROGRESS = "PRIMUS_EXT_PROGRESS"
SAME = ("device", "frameworks", "module")
"""Keys of a request that a process which answers several is made for (``batch``)."""
EXIT_CONFIG = 2
EXIT_INTERNAL = 4

_current: Session | None = None


class Memory(Protocol):
    """What processes of one program can learn from each other (``shape_cache``)."""

    def size(self) -> int:
        """How much is known."""
        ...

    def learned(self, since: int) -> bytes:
        """What was learned after ``since`` was known."""
        ...

    def absorb(self, content: bytes) -> None:
        """Know it too."""
        ...


memory: Memory | None = None
"""Set where tensors have no storage; here nothing may import torch."""


class ProgramError(Exception):
    """The user's program or configuration can't be projected; the message is one sentence."""


chosen: set[str] = set()
"""Environment variables that the user left open and that were set in their place."""


def known() -> int:
    """How much :data:`memory` knows."""
    return 0 if memory is None else memory.size()


def learned(since: int) -> bytes:
    """What it learned after ``since`` was known; nothing where there is none."""
    return b"" if memory is None else memory.learned(since)


def absorb(content: bytes) -> None:
    """Tell it what another process learned."""
    if memory is not None and content:
        memory.absorb(content)


def current() -> Session:
    """The session of this process."""
    if _current is None:
        raise RuntimeError("no emulation runs in this process")
    return _current


def imported() -> None:
    """The program is at its entry point: garbage is collected again, but not what was imported."""
    gc.freeze()
    gc.enable()


class Session:
    """Owns the request, the result file and the forks."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Make this the session of the process.

        Args:
            request: See :mod:`primus_ext.runner`; ``result`` is the path of the answer.
        """
        global _current
        self.request = request
        self.warnings: list[str] = []
        self._known = known()
        self.inputs = Inputs(Path(request["result"]).parent, request.get("cwd", ""))
        _current = self

    def progress(self, done: int, total: int, text: str) -> None:
        """Tell the parent how far we are (one line on standard output)."""
        line = json.dumps({"done": done, "total": total, "text": text})
        sys.stdout.write(f"{PROGRESS} {line}\n")
        sys.stdout.flush()

    def in_fork(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a forked copy of this process and return its (pickled) result.

        A rank leaves process groups, random states and patched globals behind; a fork costs
        milliseconds and leaves nothing.

        Raises:
            ProgramError: raised by ``work``, or the copy died.
        """
        return Fork(work).result()

    def _tell_shapes(self) -> None:
        """What other requests to the process behind this one can use (``batch``)."""
        if "shapes_learned" in self.request:
            Path(self.request["shapes_learned"]).write_bytes(learned(self._known))

    def finish(self, plan: Any, program: Any, traces: list[Any]) -> NoReturn:
        """Write the answer and leave the process; nothing of the user's program runs after."""
        self._tell_shapes()
        self._write(
            {
                "status": "ok",
                "plan": plan,
                "program": program,
                "traces": traces,
                "warnings": self.warnings,
                "inputs": self.inputs.manifest(),
            }
        )
        self._leave(0)

    def fail(self, exit_code: int, message: str) -> NoReturn:
        """Write why there is no answer and leave the process."""
        self._write({"status": "error", "exit_code": exit_code, "message": message})
        self._leave(exit_code)

    def _write(self, answer: dict[str, Any]) -> None:
        path = Path(self.request["result"])
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(answer))
        partial.replace(path)

    @staticmethod
    def _leave(code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Fork[T]:
    """Work that runs in a forked copy of this process."""

    def __init__(self, work: Callable[[], T]) -> None:
        """Start it.

        Args:
            work: Its result must be picklable.
        """
        handle, name = tempfile.mkstemp(prefix="primus_ext_role_")
        os.close(handle)
        self._path = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # what was imported stays; every collection in the copy would look through it
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            _run_and_leave(work, self._path)

    @property
    def succeeded(self) -> bool:
        """Whether it has ended with a result."""
        data = self._path.read_bytes()
        return bool(data) and pickle.loads(data)[0] == "ok"

    def result(self) -> T:
        """Wait for it.

        Raises:
            ProgramError: raised by the work.
            RuntimeError: it raised something else, or the copy died.
        """
        if self._status is None:
            _, self._status = os.waitpid(self._pid, 0)
        status = self._status
        data = self._path.read_bytes()
        self._path.unlink()
        if not data:
            raise RuntimeError(f"the process of one rank died (wait status {status})")
        kind, value, shapes = pickle.loads(data)
        absorb(shapes)  # the next copy starts with them
        if kind == "ok":
            return value
        if kind == "program":
            raise ProgramError(value)
        raise RuntimeError(value)


def results[R](forks: Sequence[Fork[R]]) -> list[R]:
    """Wait for forks that need each other: where one fails the others are ended.

    Raises:
        ProgramError: raised by the work of one.
        RuntimeError: one raised something else, or died.
    """
    waiting = list(forks)
    try:
        while waiting:
            pid, status = os.wait()
            ended = [fork for fork in waiting if fork._pid == pid]
            for fork in ended:
                waiting.remove(fork)
                fork._status = status
                if not fork.succeeded:
                    fork.result()
    finally:
        for fork in waiting:
            os.kill(fork._pid, signal.SIGKILL)
    return [fork.result() for fork in forks]


def _run_and_leave(work: Callable[[], Any], path: Path) -> None:
    """Body of a fork: never returns."""
    before = known()
    try:
        answer: tuple[str, Any] = ("ok", work())
    except BaseException as error:
        judgement = judgement_of(error)
        answer = ("program", judgement)
        if judgement is None:
            answer = ("internal", f"{type(error).__name__}: {error}{_place_of(error)}")
        if not isinstance(error, ProgramError):
            traceback.print_exc()
    try:
        path.write_bytes(pickle.dumps((*answer, learned(before))))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _place_of(error: BaseException) -> str:
    """Where a defect showed: `` (in MODULE, FUNCTION)``; '' where nothing of it is known."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return ""
    return f" (in {frames[-1].f_globals.get('__name__')}, {frames[-1].f_code.co_name})"


_JUDGEMENTS = (AssertionError, ValueError, ImportError)
"""What frameworks raise where they refuse a configuration or lack a package for it."""

_FRAMEWORKS = ("megatron", "transformer_engine")


def judgement_of(error: BaseException) -> str | None:
    """Why a job can't be projected, in one sentence; None if the error is a defect instead."""
    if isinstance(error, ProgramError):
        return str(error)
    if isinstance(error, _JUDGEMENTS) and _raised_by_framework(error):
        return f"the framework refuses this job: {first_line(error)}"
    return None


def _raised_by_framework(error: BaseException) -> bool:
    """Whether the innermost frame is the framework's: then it is a judgement, not a defect."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not set(Path(frames[-1].filename).parts).isdisjoint(_FRAMEWORKS)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
