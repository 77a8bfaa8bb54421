"""A measured winner of a search must rank first also where nothing is measured (slow)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training import train

JOB = ["model=mixtral_8x22b", "train.seq=4096", "train.gbs=512", "train.recompute=none",
       "+projection=simulate", "+target_cluster=mi355x_4x8"]  # fmt: skip
DEEP_EP = ["+megatron.moe_token_dispatcher_type=flex",
           "+megatron.moe_flex_dispatcher_backend=deepep"]  # fmt: skip
CANDIDATES = {
    "measured winner": ["parallel.tp=1", "parallel.pp=4", "parallel.ep=8", "train.mbs=2",
                        "precision=fp8", *DEEP_EP],
    "exhaustive search with its own simulation": [
        "parallel.tp=2", "parallel.pp=2", "parallel.ep=4", "parallel.etp=1", "train.mbs=1",
        "precision=fp8"],
    "the same with a budget of 30": [
        "parallel.tp=8", "parallel.pp=1", "parallel.ep=4", "parallel.etp=1", "train.mbs=2",
        "precision=bf16"],
}  # fmt: skip
"""Mixtral-8x22B on four nodes of MI355X (arXiv 2610.19423, ablation): the best of a tuner that
measured, and the best of two searches over a simulation; sequence and batch were not published."""


@pytest.mark.slow
def test_simulation_ranks_the_measured_winner_first(tmp_path: Path) -> None:
    rates = {}
    for name, overrides in CANDIDATES.items():
        out = tmp_path / name.replace(" ", "-")
        run = train(tmp_path, *JOB, *overrides, f"+projection.out={out}")
        assert run.returncode == 0, run.stderr[-2000:]
        found = json.loads((out / "projection.json").read_text())
        rates[name] = found["throughput"]["tokens_per_s_per_gpu"]
    winner, *others = rates.values()
    assert winner > max(others), rates
