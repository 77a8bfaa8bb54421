"""``projection.json``: the contract, atomic, the numbers of the terminal."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest
from rich.console import Console

from primus_ext.cluster_data import load_cluster
from primus_ext.project.compose import project
from primus_ext.project.result import Projection
from primus_ext.report import files, terminal
from primus_ext.report.units import gib, seconds
from tests.synthetic import Job, plan, traces

KEYS = ["schema_version", "plan", "program", "cluster", "mode", "model", "memory", "throughput",
        "breakdown", "not_modelled", "warnings", "provenance", "collectives",
        "simulated", "schedules", "expert_imbalance", "stragglers"]  # fmt: skip


def projection(**changes: int) -> Projection:
    job = Job(tp=8, pp=4, dp=2, **changes)
    return project(plan(job), traces(job), load_cluster("mi325x", 8, 8), mode="simulate",
                   warnings=["simulated"])  # fmt: skip


def test_the_file_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    found = json.loads(files.write(projection(), tmp_path).read_text())
    assert list(found) == KEYS
    memory, throughput = found["memory"], found["throughput"]
    assert set(memory) == {"verdict", "capacity_bytes", "binding_role", "per_role", "notes"}
    assert memory["verdict"] in ("fits", "at_risk", "oom")
    role = memory["per_role"][0]
    assert {"role", "ranks", "parameters", "peak_bytes", "reserved_bytes", "parts"} <= set(role)
    assert set(role["parts"]) == {"parameters", "gradients", "optimizer", "activations",
                                  "temporaries", "communication", "reserve"}  # fmt: skip
    assert set(throughput) == {"step_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu",
                               "interval"}  # fmt: skip
    assert set(throughput["interval"]) == {"low", "high", "level"}
    assert set(found["breakdown"][0]) == {"term", "seconds", "exposed_seconds", "evidence"}
    assert set(found["model"]) == {"total_parameters", "active_parameters"}


def test_sums_hold_in_the_file(tmp_path: Path) -> None:
    found = json.loads(files.write(projection(), tmp_path).read_text())
    assert sum(t["exposed_seconds"] for t in found["breakdown"]) == found["throughput"]["step_s"]
    for role in found["memory"]["per_role"]:
        assert sum(role["parts"].values()) == role["peak_bytes"]


def test_the_terminal_shows_the_numbers_of_the_file(tmp_path: Path) -> None:
    value = projection()
    found = json.loads(files.write(value, tmp_path).read_text())
    out = io.StringIO()
    terminal.render(value, Console(file=out, width=120))
    text = out.getvalue()
    assert seconds(found["throughput"]["step_s"]) in text
    assert f"{found['throughput']['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU" in text
    assert f"{100 * found['throughput']['mfu']:.1f} %" in text
    for role in found["memory"]["per_role"]:
        assert gib(role["reserved_bytes"]) in text
    for term in found["breakdown"]:
        line = next(line for line in text.splitlines() if line.startswith(term["term"]))
        assert seconds(term["exposed_seconds"]) in line


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.write(projection(), tmp_path)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write(projection(microbatches=8), tmp_path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == [files.PROJECTION_FILE]


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        files.write(projection(), tmp_path / "missing")


def test_others_may_read_the_file(tmp_path: Path) -> None:
    mode = files.write(projection(), tmp_path).stat().st_mode
    assert stat.S_IMODE(mode) == 0o644
