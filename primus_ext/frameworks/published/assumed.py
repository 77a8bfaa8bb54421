"""Knobs that a partial row does not state, from one committed file."""

from __future__ import annotations

import copy
import fnmatch
import functools
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("assumed_knobs.yaml")


def completed(run: dict[str, Any]) -> dict[str, Any]:
    """A row with what it leaves open filled in; its ``assumed`` names each knob that was.

    Args:
        run: As in the runs file; it is not changed.
    """
    if "assumed" in run:
        return run
    entry = _entry(str(run["source"].get("name")), str(run.get("id")))
    if entry is None:
        return run
    filled, notes = copy.deepcopy(run), []
    for path, value in entry["set"].items():
        part, key = path.split(".")
        knobs = filled.setdefault(part, {})
        if knobs.get(key) is None:
            knobs[key] = value
            notes.append(f"{key} is not stated: {value} assumed")
    return {**filled, "assumed": notes}


def _entry(source: str, name: str) -> dict[str, Any] | None:
    for entry in _entries():
        runs = entry["runs"]
        if fnmatch.fnmatch(source, f"{runs['source']}*") and fnmatch.fnmatch(name, runs["id"]):
            return entry
    return None


@functools.lru_cache(maxsize=1)
def _entries() -> list[dict[str, Any]]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))
