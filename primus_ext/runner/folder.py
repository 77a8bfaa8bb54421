"""The output folder: made and proved writable before any work is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from primus_ext.runner.outcome import UsageError

ROOM_BYTES = 4 << 20
"""Space that must be free: the files of one run stay below it (projection.json, verdict.json and
child.log are 0.1-0.3 MiB for the largest shipped model on 8,192 GPUs, timeline.json up to 1.7)."""


def prepare(directory: Path) -> None:
    """Make ``directory`` and prove that a run's files fit into it.

    Raises:
        UsageError: it can't be made, written or filled; whatever was made is gone again.
    """
    made = _make(directory)
    try:
        _probe(directory)
    except OSError as error:
        _remove(made)
        raise UsageError(
            f"+projection.out={directory} can't be used: {error.strerror or error}; name a folder "
            f"that can be written and has {ROOM_BYTES >> 20} MiB free"
        ) from error


def _make(directory: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were made, outermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            made.append(path)
        if not directory.is_dir():
            raise NotADirectoryError(f"{directory} is not a folder")
    except OSError as error:
        _remove(made)
        raise UsageError(
            f"+projection.out={directory} can't be made: {error.strerror or error}; name a folder "
            "that can be written"
        ) from error
    return made


def _probe(directory: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=".probe-", dir=directory)
    try:
        os.posix_fallocate(handle, 0, ROOM_BYTES)
    finally:
        os.close(handle)
        os.unlink(name)


def _remove(made: list[Path]) -> None:
    for path in reversed(made):
        path.rmdir()
