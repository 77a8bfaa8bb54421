"""A program that hands its training to a job scheduler is stopped before it does."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

COMMANDS = frozenset({"sbatch", "srun", "salloc", "qsub", "bsub", "mpirun", "mpiexec"})
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_EVENTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"})

_watching = False


def watch(trip: Callable[[str], Any]) -> None:
    """Call ``trip`` before this process starts one of :data:`COMMANDS`.  Idempotent.

    An audit hook can't be removed, and is the one place that all ways to start a process pass.

    Args:
        trip: Called with what was about to start; what it raises reaches whoever started it.
    """
    global _watching
    if _watching:
        return
    _watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            command = scheduler_in(_words(event, arguments))
            if command:
                trip(f"{command} was about to start a job")

    sys.addaudithook(hook)


def scheduler_in(words: Sequence[str]) -> str | None:
    """The scheduler's command that a command line starts, None where it starts none.

    Args:
        words: The command and its arguments; of a shell's ``-c`` every word counts.
    """
    if not words:
        return None
    if os.path.basename(words[0]) in _SHELLS and "-c" in words[1:-1]:
        script = words[words.index("-c") + 1]
        try:
            words = shlex.split(script, comments=True)
        except ValueError:  # an unfinished quotation: the shell will say so
            words = script.split()
    else:
        words = words[:1]
    return next((name for word in words if (name := os.path.basename(word)) in COMMANDS), None)


def _words(event: str, arguments: tuple[Any, ...]) -> list[str]:
    if event == "os.system":
        return ["sh", "-c", os.fsdecode(arguments[0])]
    command = arguments[1]  # the others: (program, arguments, ...)
    if isinstance(command, (str, bytes, os.PathLike)):
        return [os.fsdecode(command)]
    return [os.fsdecode(word) for word in command]
