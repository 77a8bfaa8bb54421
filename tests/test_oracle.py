"""Three peaks of one job are equal: composed, whole rank without storage, whole rank with it.

The real side is metered by PyTorch's allocator events (observe/allocator_meter.py), so a tensor
that the recorder does not see, or that a stand-in does not make, shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus_ext.emulate import batch
from tests.test_oracle_design import ENTRIES, oracle, table

RUN = {row["id"] for row in table()} - {row["id"] for row in table() if row["reason"]}
"""Configurations whose peaks are equal in the committed table."""


def cheapest(count: int, **wanted: str) -> list[str]:
    """Ids of the cheapest configurations with some values that were run before."""
    fitting = [e for e in ENTRIES if e["id"] in RUN and wanted.items() <= e["knobs"].items()]
    return [e["id"] for e in sorted(fitting, key=oracle.work_of)[:count]]


FAST = [*cheapest(1, mlp="dense", precision="fp8 blockwise"), *cheapest(1, mlp="sequential")]
SLOW = [*cheapest(3, pipeline="2"), *cheapest(2, pipeline="1", mlp="shared"),
        *cheapest(1, mlp="dense first"), *cheapest(1, recompute="uniform"),
        *cheapest(1, recompute="block", precision="fp8 blockwise", pipeline="4"),
        *cheapest(1, precision="nvfp4"), *cheapest(1, stages="mtp")]  # fmt: skip


def require_equal(ids: list[str], work: Path) -> None:
    chosen = [entry for entry in ENTRIES if entry["id"] in ids]
    oracle.run(chosen, oracle.SIDES, work)
    for row in oracle.rows(chosen, work):
        assert row["virtual - composed"] == 0, row
        assert row["real - virtual"] == 0, row


def test_peaks_are_equal(tmp_path: Path) -> None:
    require_equal(FAST, tmp_path)


@pytest.mark.slow
def test_peaks_are_equal_over_many_knobs(tmp_path: Path) -> None:
    require_equal(SLOW, tmp_path)


def test_a_process_answers_only_requests_that_are_alike() -> None:
    one: dict[str, Any] = oracle.request(ENTRIES[0], "virtual", Path("/nowhere"))
    batch.require_alike([one, {**one, "world_size": 8, "gpus_per_node": 2}])
    with pytest.raises(ValueError, match="device=.*'warp_size': 64"):
        batch.require_alike([one, {**one, "device": {**one["device"], "warp_size": 64}}])


def test_two_designs_share_the_answers_of_what_they_have_in_common() -> None:
    entry, work = ENTRIES[0], Path("/nowhere")
    moved = {**entry, "id": "other"}
    assert oracle.answer_path(entry, "real", work) == oracle.answer_path(moved, "real", work)
    changed = {**entry, "args": entry["args"] + " --seq-length 64"}
    assert oracle.answer_path(entry, "real", work) != oracle.answer_path(changed, "real", work)
