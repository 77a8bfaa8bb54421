"""Sweeps with gloo in real processes: what is measured, what hangs, who dies."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from primus_ext.collective_samples import Case, Sample, SamplesError, Sweep, load, save
from primus_ext.cost.group_sizes import Host
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.cost.placement import Placement
from primus_ext.observe import collective_sweep, collective_timing
from primus_ext.observe.collective_calls import Prepared, fitting
from primus_ext.observe.collective_ranks import SweepError
from primus_ext.observe.collective_sweep import KINDS, Wanted, cases, sweep, usual_members
from primus_ext.observe.collective_worker import groups_of
from primus_ext.trace import Collective, CollectiveKind

SIZES = (1024, 1 << 20)
WANTED = Wanted(processes=2, device="cpu", sizes=SIZES, rounds=2, seconds=0.01, timeout=60)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds between two processes."""
    path = tmp_path_factory.mktemp("sweep") / "gloo.json"
    sweep(WANTED, path)
    return path


def test_every_kind_has_samples_that_price_it(file: Path) -> None:
    found = load(file)
    plain = {(s.kind, s.variant) for s in found.samples}
    assert {kind for kind, _ in plain} == set(CollectiveKind)
    assert plain >= {(CollectiveKind.ALL_TO_ALL, "uneven"), (CollectiveKind.SEND_RECV, "exchange")}
    assert (found.backend, found.accelerator, found.processes) == ("gloo", "cpu", 2)
    assert set(found.versions) == {"torch", "kernel"} and found.failures == ()
    for sample in found.samples:
        assert len(sample.seconds) == WANTED.rounds
        assert all(len(one) >= 3 for one in sample.seconds)
        assert sample.quietest <= sample.typical
        assert len(sample.processor_s) == WANTED.rounds and 0 < sample.processor_share <= 1
        if sample.kind is not CollectiveKind.BARRIER:
            assert sample.bytes in SIZES or sample.variant == "uneven"
    by = {(s.kind, s.variant, s.dtype, s.bytes): s.quietest for s in found.samples}
    small, large = (
        sum(by[kind, "", "fp32", size] for kind in CollectiveKind if kind != "barrier")
        for size in SIZES
    )
    assert large > 2 * small  # a thousand times the bytes; a busy machine adds to both
    priced = MeasuredCollectives.of_files([file])
    assert len(priced.curves[2]) == len(KINDS) + 2  # two kinds also in bf16


def test_the_file_comes_back_as_it_was(file: Path, tmp_path: Path) -> None:
    found = load(file)
    save(found, tmp_path / "again.json")
    assert load(tmp_path / "again.json") == found
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"]


def stopped(rank: int, after: int, name: int):
    """A callback that sends a signal to one rank once so many cases are measured."""

    def told(done: int, _total: int, pids: Mapping[int, int]) -> None:
        if done == after:
            os.kill(pids[rank], name)

    return told


def test_a_hanging_collective_is_named_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    wanted = dataclasses.replace(WANTED, timeout=8.0, rounds=3)
    path = tmp_path / "partial.json"
    with pytest.raises(SweepError) as refused:
        sweep(wanted, path, stopped(1, 5, signal.SIGSTOP))
    message = str(refused.value)
    assert re.search(r"hangs: nothing moved for 8 s in the group\(s\) of ranks \[0, 1\]", message)
    assert any(str(kind) in message for kind in CollectiveKind)
    assert "\n" not in message and refused.value.exit_code == 4
    kept = load(path)
    assert sum(len(sample.seconds) for sample in kept.samples) == 5
    assert kept.failures == (message,)


def test_a_rank_that_dies_is_named_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    words = r"^rank 1 was ended by signal 9 during .*is kept$"
    with pytest.raises(SweepError, match=words) as died:
        sweep(WANTED, path, stopped(1, 4, signal.SIGKILL))
    assert died.value.exit_code == 4
    kept = load(path)
    assert 4 <= sum(len(sample.seconds) for sample in kept.samples) <= 5
    assert [child for child in path.parent.iterdir()] == [path]


def test_a_rank_that_can_not_start_says_why(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    wanted = dataclasses.replace(WANTED, kinds=("barrier",), timeout=30.0)
    with pytest.raises(SweepError, match="before its first collective.*no_such_interface"):
        sweep(wanted, tmp_path / "none.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--kinds", "reduce"], "kinds=reduce is not known: legal are all_reduce"),
        (["--dtypes", "fp8"], "dtypes=fp8 is not known: legal are fp32, bf16, fp16"),
        (["--processes", "1"], "processes=1 is not legal"),
        (["--members", "3"], "members=3 is not legal: groups have 2 to 2 members"),
        (["--sizes", "0"], "sizes=0 is not legal"),
        (["--out", "/nowhere/x.json"], "/nowhere is not a folder"),
    ],
)
def test_what_is_not_legal_ends_with_2(
    change: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--processes", "2", "--out", str(tmp_path / "x.json"), *change]
    assert collective_sweep.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_sizes_are_those_that_the_buffers_can_have() -> None:
    for members in (2, 3, 4, 7):
        wanted = Wanted(processes=members, device="cpu", members=(members,), sizes=(1000, 1 << 20))
        for case in cases(wanted):
            width = 2 if case.dtype == "bf16" else 4
            if case.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL):
                assert case.bytes % (members * width) == 0
            assert case.bytes == 0 or abs(case.bytes - 1000) < 200 or case.bytes > 1e6
            assert fitting(case) == case


def test_group_sizes_and_their_ranks() -> None:
    assert usual_members(2) == [2] and usual_members(6) == [2, 3, 4, 6]
    assert usual_members(16) == [2, 3, 4, 8, 16]
    assert groups_of("host", 2, 4, 1) == [[0, 1], [2, 3]]
    assert groups_of("host", 3, 4, 1) == [[0, 1, 2]]
    assert groups_of("host", 2, 2, 2) == [[0, 1], [2, 3]]
    assert groups_of("network", 2, 2, 2) == [[0, 2], [1, 3]]


def test_a_repetition_lasts_from_the_last_arrival_to_the_last_departure() -> None:
    early, late = [(0.0, 5.0, 1.0), (10.0, 14.0, 2.0)], [(3.0, 5.5, 3.0), (11.0, 13.0, 2.0)]
    assert collective_timing.processor([early, late], 0.5) == 1.0
    assert collective_timing.of_group([early, late], 1.0, True) == [2.5, 3.0]
    assert collective_timing.of_group([early, late], 0.5, False) == [2.5, 2.0]


class Event:
    """A device event on a clock that the calls below move."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_a_device_is_timed_by_events_around_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    def run() -> None:
        did.append("run")
        Event.now += 0.25

    def refill() -> None:
        did.append("refill")
        Event.now += 8.0  # not the collective's

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: did.append("synchronize"))
    prepared = Prepared(run, refill)
    spans = collective_timing.on_device(prepared, 3, lambda: did.append("together"))
    assert spans == [(0.0, 0.25, 0.0)] * 3
    # one more, in which the late ones are waited for, and nothing is waited for in between
    assert did == ["refill", "together", "run", *["refill", "run"] * 3, "synchronize"]


def test_a_device_takes_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wanted = dataclasses.replace(WANTED, device="cuda")
    with pytest.raises(SweepError, match=r"processes=2 is not legal: 1 device\(s\) are here"):
        sweep(wanted, tmp_path / "x.json")


GOOD = Sample(kind=CollectiveKind.BROADCAST, dtype="fp32", members=2, bytes=8, seconds=((1e-5,),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": [[0.0]]}, "not positive"),
        ({"seconds": []}, "no times"),
        ({"members": 1}, "no group"),
        ({"kind": "gossip"}, "'gossip' is not a CollectiveKind"),
        ({"seconds": [["x"]]}, "'x' is not a float"),
    ],
)
def test_files_that_hold_no_times_are_refused(change: dict, words: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    save(
        Sweep(backend="gloo", accelerator="cpu", product="P", processes=2, host_cores=2,
              versions={}, samples=(GOOD,)),
        path,
    )  # fmt: skip
    plain = json.loads(path.read_text())
    plain["samples"][0] |= change
    path.write_text(json.dumps(plain))
    with pytest.raises(SamplesError, match=words) as refused:
        load(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_of_another_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SamplesError, match="can't be read"):
        load(tmp_path / "none.json")
    other = tmp_path / "other.json"
    other.write_text('{"schema": 2}')
    with pytest.raises(SamplesError, match="of schema 1"):
        load(other)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks as torchrun starts them on two hosts of two, here all on one."""
    folder = tmp_path_factory.mktemp("launched")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "primus_ext.observe.collective_sweep", "--out",
               str(folder / "two.json"), "--device", "cpu", "--kinds", "all_reduce", "broadcast",
               "--dtypes", "fp32", "--sizes", "1024", "1048576", "--rounds", "1",
               "--seconds", "0.01"]  # fmt: skip
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        })
        for rank in range(4)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    return folder / "two.json"


def test_a_launcher_s_ranks_measure_both_tiers(launched: Path) -> None:
    found = load(launched)
    assert (found.processes, found.hosts) == (4, 2)
    tiers = {(s.tier, s.members) for s in found.samples}
    assert tiers == {("host", 2), ("network", 2)}
    assert len(found.samples) == 8  # two kinds, two sizes, two tiers
    model = MeasuredCollectives([found], "two.json")
    assert set(model.curves) == {2}
    across = Collective(CollectiveKind.ALL_REDUCE, "dp", 1 << 20, "fp32")
    for where in (Placement(2, 1, 2), Placement(2, 2, 1)):
        assert model.answer(across, where, Host(2, 2)) is not None
    # four ranks need a reduce-scatter inside the hosts, which was not measured
    assert model.answer(across, Placement(4, 2, 2), Host(2, 2)) is None


def test_what_a_sample_stands_for() -> None:
    rounds = ((3.0, 1.0, 2.0), (5.0, 4.0, 9.0), (2.5, 2.5, 100.0))
    sample = dataclasses.replace(GOOD, seconds=rounds)
    assert sample.typical == 2.5 and sample.quietest == 1.0
    assert sample.spread == pytest.approx(0.2)  # 0.5, 2.5 and 0 of 2.5
    assert Case(kind=GOOD.kind, dtype="fp32", members=2, bytes=2048).__str__() == (
        "broadcast of 2,048 bytes (fp32)"
    )
