"""Modules of a program are put back as they were."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from primus_ext.emulate import rewind

SOURCE = """
import functools
COUNT, CACHE, NAMES = None, {"a": 1}, ["x"]
class Kept:
    best = None
    seen = set()
@functools.lru_cache
def table(n):
    return object()
def work():
    global COUNT, NEW
    COUNT, NEW = 3, 4
    CACHE["b"], Kept.best = 2, 5
    NAMES.append("y"); Kept.seen.add(1)
    return table(1)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "user_program_to_rewind.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("user_program_to_rewind")
    del sys.modules["user_program_to_rewind"]


def test_what_a_program_changed_is_put_back(program: Any) -> None:
    state = rewind.State()
    cache, names = program.CACHE, program.NAMES
    first = program.work()
    os.environ["PRIMUS_EXT_REWIND_TEST"] = "1"
    assert (program.COUNT, program.NEW, program.Kept.best) == (3, 4, 5)
    state.restore()
    assert program.COUNT is None and program.Kept.best is None
    assert not hasattr(program, "NEW")
    assert program.CACHE is cache and cache == {"a": 1}
    assert program.NAMES is names and names == ["x"]
    assert program.Kept.seen == set()
    assert "PRIMUS_EXT_REWIND_TEST" not in os.environ
    assert program.work() is not first  # its table was emptied
    state.restore()
    assert program.COUNT is None and names == ["x"]


def test_what_may_grow_stays(program: Any) -> None:
    state = rewind.State(growing=[program.CACHE])
    program.work()
    state.restore()
    assert program.CACHE == {"a": 1, "b": 2}
    assert program.NAMES == ["x"]
