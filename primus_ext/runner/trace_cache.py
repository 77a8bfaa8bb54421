"""Traces on disk: a job that was traced before is priced without running its program again.

A file is named by everything that is known before the program runs: the command, where it was
started, its environment, the target, releases of the packages, and the source of our own recorder.
What the program read while it ran (its modules, configuration files) stands in the file with
hashes; one that changed makes the file useless.  Files are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.emulate.inputs import file_hash, file_stat
from primus_ext.runner.outcome import say

VARIABLE = "PRIMUS_EXT_CACHE"
"""Environment variable: the folder of the cache, or ``off``."""
LIMIT_BYTES = 1 << 30
"""The oldest files go when all of them are larger than this."""
_FORMAT = 2
_SUFFIX, _PARTIAL = ".trace", ".part-"
_ABANDONED_S = 3600.0
_PACKAGE = Path(__file__).resolve().parent.parent
_SHAPING = ("emulate", "observe", "frameworks", "trace.py", "plan.py", "parametric.py")
_TIMES = _PACKAGE / "observe" / "microbench"
"""Runs ops that were traced; no trace depends on it."""
_RELEASES = ("torch", "megatron-core", "transformer-engine", "hydra-core", "omegaconf", "numpy")
# Of the terminal and the session; no training program's work depends on them.
_SESSION = frozenset(
    {
        "_", "PWD", "OLDPWD", "SHLVL", "TERM", "COLORTERM", "COLUMNS", "LINES", "LS_COLORS",
        "DISPLAY", "WINDOWID", "TMUX", "TMUX_PANE", "STY", "HOSTNAME", "MAIL", "LESSOPEN",
        "LESSCLOSE", "PS1", "PROMPT_COMMAND", "TMPDIR", "PYTEST_CURRENT_TEST", VARIABLE,
    }
)  # fmt: skip
_TOLD = ("overrides_removed",)
"""Parts of a request that the child does not act on."""
_SESSION_PREFIXES = ("SSH_", "XDG_", "VSCODE_", "LC_", "DBUS_", "GPG_")


def folder(environment: Mapping[str, str]) -> Path | None:
    """Where traces are kept; None where the cache is turned off.

    Args:
        environment: ``os.environ``: ``PRIMUS_EXT_CACHE``, else ``XDG_CACHE_HOME``, else ``HOME``.
    """
    asked = environment.get(VARIABLE, "")
    if asked:
        return None if asked == "off" else Path(asked)
    base = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "~"), ".cache"))
    return Path(base).expanduser() / "primus_ext" / "traces"


def releases() -> dict[str, str]:
    """Versions that shape a trace, and a hash of our own source that makes it."""
    found = {"python": sys.version, "recorder": _own_source()}
    for package in _RELEASES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _own_source() -> str:
    total = hashlib.sha256()
    for name in _SHAPING:
        place = _PACKAGE / name
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            if _TIMES in path.parents:
                continue
            total.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes())
    return total.hexdigest()


class TraceCache:
    """Answers of the child process by key.

    One serves one run: what is installed, and which files changed, it looks up once.
    """

    def __init__(self, directory: Path) -> None:
        """Use ``directory``, which need not exist."""
        self._directory = directory
        self._releases: dict[str, str] | None = None
        self._files: dict[tuple[str, str], Any] = {}

    def key(
        self, request: Mapping[str, Any], options: Sequence[str],
        environment: Mapping[str, str], scratch: Path,
    ) -> str:  # fmt: skip
        """What a request's answer is kept under.

        Args:
            request: To the child.
            options: Of its interpreter.
            environment: The child's.
            scratch: Folder of this run alone; its name does not count.
        """
        counted = {
            name: value
            for name, value in environment.items()
            if name not in _SESSION and not name.startswith(_SESSION_PREFIXES)
        }
        asked = {name: value for name, value in request.items() if name not in _TOLD}
        if self._releases is None:
            self._releases = releases()
        whole = json.dumps(
            [_FORMAT, sys.executable, list(options), asked, counted, self._releases], sort_keys=True
        )
        return hashlib.sha256(whole.replace(str(scratch), "{scratch}").encode()).hexdigest()

    def load(self, key: str, scratch: Path) -> dict[str, Any] | None:
        """The answer under a key; None if there is none, or a file it depends on changed.

        A damaged file is named on standard error and left for the next answer to replace.
        """
        text = self.text(key, scratch)
        return None if text is None else json.loads(text)

    def text(self, key: str, scratch: Path) -> str | None:
        """As :meth:`load`, in JSON."""
        path = self._path(key)
        try:
            packed = path.read_bytes()
        except OSError:
            return None
        try:
            head, _, answer = zlib.decompress(packed).decode().partition("\n")
            entry = json.loads(head)
            if entry["key"] != key:
                raise ValueError("it belongs to another job")
            if not answer.endswith("}"):
                raise ValueError("its answer is not whole")
            unchanged = self._is_unchanged(entry["inputs"])
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            say(f"the cached trace {path} is damaged and was not used: {error}")
            return None
        if not unchanged:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # it is the youngest now
        return answer.replace("{scratch}", str(scratch))

    def store(self, key: str, answer: Mapping[str, Any], scratch: Path) -> str:
        """Keep an answer, if the child could say what it depends on.

        A folder that can't be written is named on standard error; nothing else happens.

        Returns:
            What :meth:`text` will.
        """
        inputs = answer.get("inputs")
        text = json.dumps({name: value for name, value in answer.items() if name != "inputs"})
        if inputs is None:
            return text
        kept = text.replace(str(scratch), "{scratch}")
        entry = json.dumps({"key": key, "inputs": inputs})
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, zlib.compress(f"{entry}\n{kept}".encode(), 1))
            self._prune()
        except OSError as error:
            say(f"the trace is not cached: {path.parent} can't be used: {error.strerror or error}")
        return text

    def _is_unchanged(self, inputs: Mapping[str, Mapping[str, Any]]) -> bool:
        try:
            return all(
                self._now(what, find, path) == known
                for what, find in (("stats", file_stat), ("hashes", file_hash))
                for path, known in inputs[what].items()
            )
        except OSError:  # one is gone
            return False

    def _now(self, what: str, find: Callable[[Path], Any], path: str) -> Any:
        if (what, path) not in self._files:
            self._files[what, path] = find(Path(path))
        return self._files[what, path]

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"

    def _prune(self) -> None:
        """Remove what writers that died left, and the oldest files beyond the limit."""
        for path in self._directory.glob(f"*{_PARTIAL}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()
        found, total = [], 0
        for path in self._directory.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process removed it
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > LIMIT_BYTES:
                with contextlib.suppress(OSError):
                    path.unlink()


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; several processes may do so at once."""
    handle, name = tempfile.mkstemp(prefix=f"{path.stem[:16]}{_PARTIAL}", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
