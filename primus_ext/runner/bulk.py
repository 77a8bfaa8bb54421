"""The traces of many jobs: from the cache, or from processes that each answer a list of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.emulate.session import SAME
from primus_ext.runner import child
from primus_ext.runner.trace_cache import TraceCache, folder

BATCH = "primus_ext.emulate.batch"
SLICE = 48
"""Requests that one process answers: it costs the imports once, a crash the rest of the slice."""
_SHAPES = ("--hidden-size", "--tensor-model-parallel-size", "--micro-batch-size",
           "--num-layers")  # fmt: skip
TIMEOUT_S = 900
"""Seconds after which a job is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What the child answered, in JSON; or in one sentence why there is no answer."""

    text: str = ""
    refused: str = ""


Told = Callable[[str, Answer], None]


def answers(requests: Mapping[str, dict[str, Any]], told: Told, workers: int | None = None) -> None:
    """Trace jobs, in any order.

    Args:
        requests: By name; as :mod:`primus_ext.emulate.bootstrap` takes them, without ``cwd``.
        told: Called with a name and its answer as soon as there is one.
        workers: Processes at a time; by default the cores of this machine.
    """
    directory = folder(os.environ)
    cache = None if directory is None else TraceCache(directory)
    with tempfile.TemporaryDirectory(prefix="primus_ext_") as name:
        scratch = Path(name)
        keys: dict[str, str] = {}
        todo: dict[str, dict[str, Any]] = {}
        for run, request in requests.items():
            asked = {**request, "cwd": name}
            if cache is not None:
                keys[run] = cache.key(asked, (), child.environment(scratch), scratch)
                found = cache.text(keys[run], scratch)
                if found is not None:
                    told(run, Answer(found))
                    continue
            todo[run] = asked
        with child.leaving_on_sigterm():
            for run, answer in _traced(todo, scratch, workers or os.cpu_count() or 1):
                if cache is not None and answer.text:
                    cache.store(keys[run], json.loads(answer.text), scratch)
                told(run, answer)


def _traced(
    requests: Mapping[str, dict[str, Any]], scratch: Path, workers: int
) -> Iterator[tuple[str, Answer]]:
    waiting, running = _slices(requests, workers), []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Process(waiting.pop(), requests, scratch))
            process = running.pop(0)
            yield from process.new()
            if not process.ended:
                running.append(process)
    finally:
        for process in running:
            process.end()


def _slices(requests: Mapping[str, dict[str, Any]], workers: int) -> list[list[str]]:
    """Names of requests that one process can answer, the longest lists last."""
    alike: dict[str, list[str]] = defaultdict(list)
    # what differs least stands side by side: a process remembers the shapes of those before
    for run, request in sorted(requests.items(), key=lambda item: likeness(item[1])):
        alike[json.dumps([request.get(key) for key in SAME], sort_keys=True)].append(run)
    size = max(1, min(SLICE, -(-len(requests) // workers)))
    found = [names[i : i + size] for names in alike.values() for i in range(0, len(names), size)]
    return sorted(found, key=len)


def likeness(request: Mapping[str, Any]) -> tuple[str, ...]:
    """A key by which requests with many shapes in common are neighbours."""
    words = [str(word) for word in request["args"]]
    values = dict(zip(words, words[1:], strict=False))
    return (*(values.get(name, "") for name in _SHAPES), *words)


class _Process:
    """One process, and the answers that it has written."""

    def __init__(
        self, names: Sequence[str], requests: Mapping[str, dict[str, Any]], scratch: Path
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self._results = {name: self._folder / f"{number}.json" for number, name in enumerate(names)}
        asked = [
            {**requests[name], "result": str(path), "timeout_s": TIMEOUT_S}
            for name, path in self._results.items()
        ]
        (self._folder / "requests").write_text(json.dumps(asked))
        with (self._folder / "log").open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-P", "-m", BATCH, str(self._folder / "requests")],
                cwd=scratch,
                env=child.environment(scratch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """Whether there will be no more answers."""
        return not self._results

    def new(self) -> Iterator[tuple[str, Answer]]:
        """Answers since the last call; waits a moment for one."""
        try:
            self._child.wait(0.1)
            over = True
        except subprocess.TimeoutExpired:
            over = False
        for name, path in list(self._results.items()):
            if path.exists():
                del self._results[name]
                yield name, _read(path)
        if over:
            for name in self._results:
                yield name, Answer(refused=self._complaint())
            self._results = {}

    def _complaint(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"exit code {self._child.returncode}"
        return f"the process that traces it gave no answer: {last}"

    def end(self) -> None:
        """End it, and what it started."""
        child.end(self._child)


def _read(path: Path) -> Answer:
    """An answer, which is written whole or not at all."""
    text = path.read_text()
    path.unlink()
    if text.startswith('{"status": "ok"'):
        return Answer(text)
    return Answer(refused=str(json.loads(text)["message"]))
