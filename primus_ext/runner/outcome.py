"""Exit codes, the one-sentence error, and ``verdict.json``."""

from __future__ import annotations

import dataclasses
import json
import sys
from enum import IntEnum
from pathlib import Path

from primus_ext import whole_file

VERDICT_FILE = "verdict.json"


class Exit(IntEnum):
    """What the process's exit code means.  1 is left to Hydra's own composition errors."""

    DONE = 0
    """Also with an ``oom`` verdict, unless ``fail_on`` asks for :attr:`FAIL_ON`."""
    PROGRAM = 1
    """Hydra, or the user's program itself, failed before there was anything to project."""
    USAGE = 2
    """Usage or configuration; the message names the key, the value and what is legal."""
    REGRESSION = 3
    INTERNAL = 4
    RECIPE = 5
    """A recipe is shadowed or stale."""
    FAIL_ON = 6
    """The verdict is one that ``+projection.fail_on`` gates."""
    INTERRUPTED = 130
    """Ctrl-C, as shells report it."""


class UsageError(Exception):
    """Bad input; the message is one sentence that names the key, the value and what is legal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended; the content of ``verdict.json``."""

    exit_code: int
    message: str
    """One sentence."""
    verdict: str | None = None
    """fits, at_risk or oom; None where nothing was projected."""
    projection: str | None = None
    """Path of ``projection.json``; None where none was written by this run."""


def write_verdict(outcome: Outcome, directory: Path) -> None:
    """Write ``verdict.json`` into an existing directory, whole or not at all.

    torchrun folds every exit code of its workers into 1, so scripts read the code here.

    Raises:
        OSError: the directory is missing, not writable or full; no partial file is left.
    """
    text = json.dumps(dataclasses.asdict(outcome), indent=2) + "\n"
    whole_file.write(directory / VERDICT_FILE, text)


def write_asked(option: str, path: Path, text: str) -> None:
    """Write a file that an option of the command names, whole or not at all.

    Raises:
        UsageError: It can't be written.
    """
    try:
        whole_file.write(path, text)
    except OSError as error:
        raise UsageError(f"{option}={path} can't be written: {error.strerror}") from error


def say(message: str) -> None:
    """Write one sentence to standard error."""
    sys.stderr.write(f"primus_ext: {message}\n")
    sys.stderr.flush()


def close(outcome: Outcome, directory: Path | None) -> int:
    """Record how a run ended, and say it where it went wrong.

    Args:
        outcome: How it ended.
        directory: Where ``verdict.json`` goes; None, or a folder that can't be made or written,
            leaves only the sentence on standard error.

    Returns:
        The exit code.
    """
    if outcome.exit_code != Exit.DONE:
        say(outcome.message)
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_verdict(outcome, directory)
        except OSError as error:
            if outcome.exit_code != Exit.USAGE:  # that sentence says it already, or says worse
                say(f"{directory / VERDICT_FILE} could not be written: {error.strerror or error}")
    return int(outcome.exit_code)
