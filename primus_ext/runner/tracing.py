"""The traces of a job: from the cache, or from a child process that runs the program."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus_ext.runner import child
from primus_ext.runner.trace_cache import TraceCache, folder


def answer(
    request: dict[str, Any],
    options: Sequence[str],
    scratch: Path,
    log: Path,
    progress: child.Progress,
    cached: bool = True,
) -> dict[str, Any]:
    """As :func:`primus_ext.runner.child.run`, but for a job that was traced before.

    Args:
        request: As there; see :mod:`primus_ext.emulate.bootstrap`.
        options: As there.
        scratch: As there; its name may stand in the program's arguments.
        log: As there.
        progress: As there.
        cached: Whether the cache may be used.

    Raises:
        ChildError: the child answered with an error, or not at all.
    """
    directory = folder(os.environ) if cached else None
    if directory is None:
        return child.run(request, options, scratch, log, progress)
    cache = TraceCache(directory)
    key = cache.key(request, options, child.environment(scratch), scratch)
    found = cache.load(key, scratch)
    if found is not None:
        log.write_text(f"the program was not run: its traces are in {directory}\n")
        return found
    fresh = child.run(request, options, scratch, log, progress)
    cache.store(key, fresh, scratch)
    return fresh
