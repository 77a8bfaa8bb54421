"""A process that fills a trace cache: ``python -m tests.cache_writer FOLDER KEY HOW``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from primus_ext.runner import trace_cache


class Dies:
    """A file that ends its process in the middle of what is written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> Dies:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, key: str, how: str) -> None:
    cache, scratch = trace_cache.TraceCache(Path(folder)), Path("/nowhere")
    answer = {"traces": [how] * 1000, "inputs": {"hashes": {}, "stats": {}}}
    if how == "dies":
        opened = os.fdopen
        setattr(trace_cache.os, "fdopen", lambda *a, **k: Dies(opened(*a, **k)))
        cache.store(key, answer, scratch)
    for _ in range(200):
        cache.store(key, answer, scratch)
        found = cache.load(key, scratch)
        if found is None or len(set(found["traces"])) != 1 or len(found["traces"]) != 1000:
            sys.exit("a torn answer")


if __name__ == "__main__":
    main(*sys.argv[1:])
