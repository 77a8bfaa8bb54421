"""Which files a program read before its training entry point, so that a changed one is noticed.

Hashes of the files outside the installed packages, sizes and times of the framework's.  A file
that would only be found first from now on (a new module that shadows another) is not noticed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

_OWN = Path(__file__).resolve().parent.parent
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_FRAMEWORKS = ("megatron", "transformer_engine", "primus")
_HASHED_BYTES = 64 << 20
"""Larger files (data) go by size and time."""
_WRITES = os.O_WRONLY | os.O_RDWR


class Inputs:
    """Collects the files that this process opens for reading."""

    def __init__(self, scratch: Path, cwd: str) -> None:
        """Watch from now on (an audit hook can't be taken away again).

        Args:
            scratch: Folder of this run's own files, which are no input.
            cwd: Where the program is started.
        """
        self._opened: set[str] = set()
        self._started = time.time_ns()
        self._cwd = cwd
        self._outside = (f"{scratch}{os.sep}", *_NOT_FILES)
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, str) and not (isinstance(flags, int) and flags & _WRITES):
            self._opened.add(path if os.path.isabs(path) else os.path.abspath(path))

    def manifest(self) -> dict[str, Any] | None:
        """What was read: ``hashes`` and ``stats`` by path; None if a file changed meanwhile."""
        paths = {path for path in self._opened if not path.endswith(".pyc")}
        installed = [sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib")]
        inside = tuple(f"{folder}{os.sep}" for folder in {*installed, str(_OWN)})
        stats: dict[str, list[int]] = {}
        for name, module in list(sys.modules.items()):
            source = getattr(module, "__file__", None)
            if not isinstance(source, str) or not source.endswith(".py"):
                continue
            source = os.path.join(self._cwd, source)  # as scripts are named on command lines
            paths.add(source)
            if source.startswith(inside) and name.split(".")[0] in _FRAMEWORKS:
                stats[source] = file_stat(Path(source))
        hashes: dict[str, str] = {}
        for path in sorted(paths):
            file = Path(path)
            if path.startswith((*self._outside, *inside)) or not file.is_file():
                continue
            size, changed = file_stat(file)
            if changed >= self._started:
                return None
            if size > _HASHED_BYTES:
                stats[path] = [size, changed]
            else:
                hashes[path] = file_hash(file)
        return {"hashes": hashes, "stats": stats}


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_stat(path: Path) -> list[int]:
    """Size in bytes, and time of the last change in nanoseconds since 1970."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
