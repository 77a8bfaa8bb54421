"""The peak of every rank over gloo: the real one but for the backend's buffers, which are named."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_oracle_design import script
from tests.training import environment

oracle_gloo = script("oracle_gloo")
NUMBERS = ("composed", "virtual", "real", "gloo", "gloo_difference", "gloo_buffers", "program")


def table() -> list[dict[str, str]]:
    with oracle_gloo.TABLE.open() as file:
        return list(csv.DictReader(file))


def require_explained(row: dict[str, str]) -> None:
    """The program's own peak is the real one, and what gloo adds to it is what gloo made."""
    composed, virtual, real, gloo, difference, buffers, program = (int(row[n]) for n in NUMBERS)
    assert composed == virtual == real == program, row
    assert difference == gloo - real, row
    # Without the buffers, that moment of the step is no higher than the program's peak.
    assert 0 <= difference <= buffers, row
    assert bool(difference) == bool(row["explained_by"]), row


def test_ten_jobs_ran_over_gloo_and_differences_are_explained() -> None:
    rows = [row for row in table() if row["rank"]]
    assert {row["id"] for row in rows} >= set(oracle_gloo.JOBS)
    assert len({row["id"] for row in rows}) >= 12
    for row in rows:
        require_explained(row)


def test_every_rank_of_a_job_is_in_the_table() -> None:
    worlds = {job["id"]: job["world"] for job in oracle_gloo.jobs()}
    found: dict[str, list[str]] = {}
    for row in table():
        found.setdefault(row["id"], []).append(row["rank"])
    for name, ranks in found.items():
        assert ranks in ([""], [str(rank) for rank in range(worlds[name])]), name


def test_what_has_no_peak_is_refused_by_megatron() -> None:
    for row in table():
        assert row["rank"] or row["explained_by"].startswith("the framework refuses"), row


@pytest.mark.slow
def test_a_job_of_the_table_runs_anew(tmp_path: Path) -> None:
    job = next(job for job in oracle_gloo.jobs() if job["id"] == "tp2 sp")
    oracle_gloo.run([job], tmp_path)
    fresh = oracle_gloo.rows([job], tmp_path)
    committed = [row for row in table() if row["id"] == "tp2 sp"]
    assert [{k: str(v) for k, v in row.items()} for row in fresh] == committed
    for row in committed:
        require_explained(row)


def test_a_buffer_is_named_after_what_it_copies() -> None:
    backend = [[100, 1, "c10d::reduce_scatter"], [50, 2, "gloo:all_gather"], [100, 1, "gloo:x"]]
    assert oracle_gloo.explained(backend, [{"grad_bytes": 100, "param_bytes": 50}]) == (
        "1 x 100 B of c10d::reduce_scatter, a copy of a bucket's gradients; "
        "2 x 50 B of gloo:all_gather, a copy of a bucket's parameters; 1 x 100 B of gloo:x"
    )


PAIR = """
import sys, torch, torch.distributed as dist
from primus_ext.emulate import real_peers
from primus_ext.observe.allocator_meter import AllocatorMeter, evaluate
rank = int(sys.argv[1])
real_peers.join(rank, 2, sys.argv[2])
meter = AllocatorMeter()
meter.start()
share, whole = torch.empty(1000), torch.arange(2000.0)
meter.mark()
dist.reduce_scatter_single(share, whole)
dist.all_gather_single(whole, share)
out = torch.full((7,), float(rank))
request = dist.isend(out, 1 - rank)
del out  # the transfer holds it
came = torch.empty(7)
dist.irecv(came, 1 - rank).wait()
assert request.wait() and request.wait()  # as NCCL's, and unlike gloo's own
del request
events = meter.events()
assert torch.equal(whole, 2 * torch.arange(2000.0))
assert torch.equal(share, whole.view(2, -1)[rank])
assert torch.equal(came, torch.full((7,), 1.0 - rank))
assert evaluate(*events, backend=False).peak_bytes == 4 * (1000 + 2000 + 7 + 7)
found = evaluate(*events)
assert found.peak_bytes == 4 * (1000 + 2000) + 4 * 2000, found  # a copy of what is reduced
assert [b.size for b in found.at_peak if b.of_backend] == [4 * 2000]
dist.barrier()
"""


def test_gloo_has_no_share_in_the_tensors_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "pair.py"
    program.write_text(PAIR)
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), str(rank), str(tmp_path / "meet")],
            env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in running:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, json.dumps(said[-2000:])
