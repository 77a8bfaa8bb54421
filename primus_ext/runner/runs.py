"""Runs files: what is in them, which rows can be scored, which repeat another one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from primus_ext.frameworks import published
from primus_ext.runner.outcome import UsageError

Run = dict[str, Any]
_PARTS = ("hardware", "model", "parallelism", "batch", "precision", "recompute")
_NOT_CONFIGURATION = {"label", "basis", "name"}
"""Words about a knob, not knobs."""


def load(path: Path, wanted: Iterable[str] = ()) -> list[Run]:
    """Runs of a runs file, all or those named; what is assumed of partial ones is filled in.

    Raises:
        UsageError: the file can't be read, or an id is not in it.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        runs = yaml.load(path.read_text(), Loader=loader)
    except OSError as error:
        raise UsageError(f"RUNS={path} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"RUNS={path} is not YAML: {error}") from error
    if not isinstance(runs, list) or not all(isinstance(r, dict) and "id" in r for r in runs):
        raise UsageError(f"RUNS={path} must be a list of runs, each with an id")
    known = {run["id"]: _completed(run) for run in runs}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UsageError(f"run {missing[0]} is not in {path}")
    return [known[name] for name in wanted] if wanted else list(known.values())


def _completed(run: Run) -> Run:
    named = isinstance(run.get("source"), Mapping) and "name" in run["source"]
    return published.completed(run) if named else run


def subset(runs_path: Path, name: str) -> list[str]:
    """Ids of a named subset, from the subsets file beside a runs file.

    Raises:
        UsageError: there is no such file or subset.
    """
    path = runs_path.with_name(runs_path.name.replace("_runs", "_subsets"))
    if path == runs_path or not path.exists():
        raise UsageError(f"--subset={name} needs a subsets file beside {runs_path}: {path} is none")
    subsets = yaml.safe_load(path.read_text())
    if name not in subsets:
        raise UsageError(f"--subset={name} is unknown; legal: {', '.join(sorted(subsets))}")
    return list(subsets[name])


def source(run: Run) -> str:
    """Where a run was published, without the place in brackets."""
    return str(run["source"]["name"]).split(" (")[0]


def group(run: Run) -> str:
    """Source, model and GPU: rows that are left out of a fit together."""
    return f"{source(run)}, {run['model'].get('name', '?')}, {run['hardware']['gpu']}"


def cell(run: Run) -> str:
    """Rows among which a user would choose: the same work on as many GPUs of the same kind."""
    hardware, batch = run["hardware"], run["batch"]
    words = f"{hardware.get('num_gpus')} GPUs, gbs {batch.get('gbs')}, seq {batch.get('seq_len')}"
    return f"{group(run)}, {words}"


def measured_seconds(run: Run) -> float:
    """Step time that a run states, or that follows from its tokens per second and GPU.

    Raises:
        ValueError: it states none, or one that can't be.
    """
    normalized, batch = run.get("normalized") or {}, run["batch"]
    seconds = _positive("iteration_time_s", normalized.get("iteration_time_s"))
    if seconds is not None:
        return seconds
    rate = _positive("tokens_per_s_per_gpu", normalized.get("tokens_per_s_per_gpu"))
    sizes = batch.get("gbs"), batch.get("seq_len"), run["hardware"].get("num_gpus")
    if rate is None or not all(sizes):
        raise ValueError(
            "neither a step time is stated nor tokens per second and what they are counted over"
        )
    return sizes[0] * sizes[1] / (rate * sizes[2])


def _positive(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}={value!r} is not a number")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value} is not positive")
    return float(value)


def _absent(run: Run) -> list[str]:
    """Parts of a row that are not there."""
    return [part for part in (*_PARTS, "source") if not isinstance(run.get(part), Mapping)]


def defect(run: Run) -> str | None:
    """Why a row can't be scored whatever the projection says; None if it can."""
    absent = _absent(run)
    if absent:
        return f"{absent[0]} is missing"
    try:
        measured_seconds(run)
    except ValueError as error:
        return str(error)
    if run.get("transcription") == "memory":
        return "transcribed from memory: not to be scored"
    return None


def impossible(run: Run) -> str | None:
    """What of a row's parallel degrees can't be; None if they fit its GPUs."""
    parallelism, count = run["parallelism"], run["hardware"].get("num_gpus")
    degrees = [parallelism.get(key) for key in ("tp", "pp", "cp", "dp")]
    if any(isinstance(d, int) and d < 1 for d in degrees):
        return f"a degree of {dict(zip(('tp', 'pp', 'cp', 'dp'), degrees, strict=True))} is below 1"
    if all(isinstance(d, int) for d in (*degrees, count)) and math.prod(degrees) != count:
        product = " x ".join(f"{k}{d}" for k, d in zip(("tp", "pp", "cp", "dp"), degrees,
                                                       strict=True))  # fmt: skip
        return f"{product} is not num_gpus={count}"
    return None


def superseded(runs: Iterable[Run]) -> dict[str, str]:
    """Rows that repeat a configuration of which there is a newer one: its id by theirs.

    The newest is the one with the highest release of its software, the last in the file of equals.
    """
    newest: dict[str, tuple[tuple[tuple[int, ...], int], Run]] = {}
    same: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        if _absent(run):
            continue
        key, age = _configuration(run), (_release(run), place)
        same.setdefault(key, []).append(run["id"])
        if key not in newest or age > newest[key][0]:
            newest[key] = age, run
    return {
        name: newest[key][1]["id"]
        for key, names in same.items()
        for name in names
        if name != newest[key][1]["id"]
    }


def _configuration(run: Run) -> str:
    parts = [{k: v for k, v in run[part].items() if k not in _NOT_CONFIGURATION} for part in _PARTS]
    name = re.sub(r" v\d[\d.]*", "", source(run))  # rounds of a benchmark
    return json.dumps([name, run.get("workload"), run.get("flags"), *parts],
                      sort_keys=True, default=str)  # fmt: skip


def _release(run: Run) -> tuple[int, ...]:
    """Numbers of the release that a row names: of its container, else of its benchmark's round."""
    software = run.get("software") or {}
    text = str(software.get("container") or "") or source(run)
    found = re.findall(r"\d+(?:\.\d+)+", text)
    return max((tuple(int(n) for n in one.split(".")) for one in found), default=())
