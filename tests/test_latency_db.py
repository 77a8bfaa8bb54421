"""The latency database: what is kept, what is refused, and what a killed writer leaves."""

from __future__ import annotations

import dataclasses
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_ext.cli import main
from primus_ext.cost.latency_db import (
    DatabaseError,
    LatencyDatabase,
    Origin,
    default_path,
    files,
    signature,
)
from primus_ext.cost.latency_db import rows as row_data
from primus_ext.cost.latency_db.signature import SignatureError
from primus_ext.trace import Collective, CollectiveKind, Family, Op, TensorSpec
from tests.latency_rows import CPU, product, row

VALUES = st.one_of(st.booleans(), st.integers(-(2**40), 2**40), st.sampled_from(["tn", "bf16", ""]),
                   st.lists(st.integers(0, 99), max_size=3).map(tuple))  # fmt: skip
SPECS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 2**20), max_size=4).map(tuple),
    st.sampled_from(["fp32", "bf16", "int64"]),
)
OPS = st.builds(
    Op,
    st.sampled_from(["aten.mm", "aten.add", "fused.swiglu"]),
    st.sampled_from(signature.MEASURABLE),
    st.lists(SPECS, max_size=3).map(tuple),
    st.lists(SPECS, max_size=2).map(tuple),
    st.integers(0, 2**60),
    st.integers(0, 2**50),
    st.dictionaries(st.sampled_from("abcmnk"), VALUES, max_size=4).map(lambda d: tuple(d.items())),
)


@given(OPS, st.integers(0, 3))
def test_spelling_does_not_change_a_signature(op: Op, turn: int) -> None:
    attrs = [*op.attrs[turn:], *op.attrs[:turn]]
    named = tuple(
        dataclasses.replace(spec, origins=tuple(f"d{i}" for i in range(len(spec.shape))))
        for spec in op.inputs
    )
    as_lists = tuple((name, list(v) if isinstance(v, tuple) else v) for name, v in attrs)
    again = dataclasses.replace(op, inputs=named, attrs=as_lists)
    assert signature.text(again) == signature.text(op)
    assert signature.parse(signature.text(op)) == signature.canonical(op)


@given(OPS, OPS)
def test_different_work_has_different_signatures(one: Op, other: Op) -> None:
    def told(op: Op) -> list:  # with the types of values: True is no 1
        attrs = sorted(op.attrs)
        return [op.name, op.family, op.inputs, op.outputs, op.flops, op.bytes, repr(attrs)]

    assert (signature.key(one) == signature.key(other)) == (told(one) == told(other))


def test_a_causal_mask_has_one_right_side() -> None:
    def attention(causal: bool, window: tuple[int, int]) -> str:
        return signature.key(
            Op("a", Family.ATTENTION, (), (), 1, 1, (("causal", causal), ("window", window)))
        )

    assert attention(True, (-1, -1)) == attention(True, (-1, 0))
    assert attention(False, (-1, -1)) != attention(False, (-1, 0))
    assert attention(True, (128, 0)) != attention(True, (-1, 0))


def test_what_is_not_one_devices_work_has_no_signature() -> None:
    collective = Collective(CollectiveKind.ALL_REDUCE, "tp", 8, "bf16")
    op = Op("c10d.allreduce_", Family.COLLECTIVE, (), (), 0, 0, (), collective)
    with pytest.raises(SignatureError, match="c10d.allreduce_"):
        signature.key(op)


def test_equal_rows_are_kept_once_and_come_back_equal(tmp_path: Path) -> None:
    made = [row(product(8), 1e-3, 2e-3), row(product(16), 3e-3)]
    with LatencyDatabase(tmp_path / "new" / "a.sqlite") as database:
        assert database.add([*made, made[0]]) == 2
        assert database.add(made) == 0
        assert list(database.rows()) == made
        assert database.devices() == [CPU]
        other = dataclasses.replace(CPU, threads=2)
        assert list(database.rows(device=other)) == []
        assert [r.op.attr("m") for r in database.rows(keys=[signature.key(product(16))])] == [16]


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with LatencyDatabase(tmp_path / "a.sqlite") as database:
        good = row(product(8))
        bad = row(product(9))
        object.__setattr__(bad, "kernel", object())  # nothing that a file can hold
        with pytest.raises(Exception, match="object"):
            database.add([good, bad])
        assert list(database.rows()) == []
        assert database.add([good]) == 1


def test_samples_that_are_no_times_are_refused() -> None:
    for samples in ((0.0,), (-1.0,), (float("nan"),), (float("inf"),)):
        with pytest.raises(ValueError, match="seconds above 0"):
            row(product(8), *samples)


def test_four_writers_and_a_kill_lose_no_committed_row(tmp_path: Path) -> None:
    path, batches, size = tmp_path / "a.sqlite", 30, 5
    command = [sys.executable, "-m", "tests.latency_rows", str(path)]
    writers = [
        subprocess.Popen(
            [*command, str(writer), str(batches), str(size)], stdout=subprocess.PIPE, text=True
        )
        for writer in range(4)
    ]
    victim = writers[0]
    assert victim.stdout is not None
    told = [victim.stdout.readline() for _ in range(7)]  # it is in the middle of its work
    victim.send_signal(signal.SIGKILL)
    committed = [len(told) + len(victim.stdout.read().splitlines())]
    for writer in writers[1:]:
        assert writer.stdout is not None
        committed.append(len(writer.stdout.read().splitlines()))
    assert [writer.wait() for writer in writers] == [-signal.SIGKILL, 0, 0, 0]
    assert committed[1:] == [batches] * 3 and 7 <= committed[0] < batches
    with LatencyDatabase(path, create=False) as database:
        found = {r.op.attr("m") for r in database.rows()}
        assert database._file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.add([row(product(10**6))]) == 1  # and no lock was left
    for writer, count in enumerate(committed):
        first = writer * batches * size + 1
        assert set(range(first, first + count * size)) <= found
    # a batch that was committed as the writer died may be there, but whole
    assert len(found) in (sum(committed) * size, (sum(committed) + 1) * size)


def test_another_schema_is_refused_in_one_sentence(tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.sqlite"
    LatencyDatabase(path).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 7")
    file.close()
    with pytest.raises(DatabaseError, match="version 7, and this release reads version 1"):
        LatencyDatabase(path)
    assert main(["db", "stats", "--db", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    text, foreign = tmp_path / "text", tmp_path / "foreign"
    text.write_text("no database")
    with sqlite3.connect(foreign) as file:
        file.execute("CREATE TABLE mine (a)")
    file.close()
    for path, words in ((text, "not a database"), (foreign, "of something else")):
        with pytest.raises(DatabaseError, match=words):
            LatencyDatabase(path)
    with pytest.raises(DatabaseError, match="does not exist"):
        LatencyDatabase(tmp_path / "none", create=False)


def test_where_the_database_is() -> None:
    home = {"HOME": "/home/u"}
    assert default_path(home) == Path("/home/u/.local/share/primus_ext/latency.sqlite")
    data = {**home, "XDG_DATA_HOME": "/data"}
    assert default_path(data) == Path("/data/primus_ext/latency.sqlite")
    assert default_path({**data, "PRIMUS_EXT_DB": "/x.sqlite"}) == Path("/x.sqlite")


def test_an_exported_file_reads_back_to_the_same_rows(tmp_path: Path, capsys) -> None:
    one, other, out = (str(tmp_path / name) for name in ("a.sqlite", "b.sqlite", "rows.jsonl"))
    made = [
        row(product(8), 1.1e-3, 2.7e-3),
        row(product(8), 0.1, origin=Origin.IMPORTED),
        row(Op("fused.swiglu", Family.MEMORY, (TensorSpec((4, 8), "bf16"),), (), 0, 64), 1e-6),
    ]
    with LatencyDatabase(Path(one)) as database:
        database.add(made)
    assert main(["db", "export", "--db", one, "--out", out]) == 0
    assert main(["db", "import", "--db", other, out]) == 0
    assert main(["db", "import", "--db", other, out]) == 0
    assert "3 rows read, 0 of them new" in capsys.readouterr().out
    with LatencyDatabase(Path(other), create=False) as database:
        assert list(database.rows()) == made
    assert main(["db", "export", "--db", one, "--out", out, "--origin", "imported"]) == 0
    assert list(files.read(Path(out))) == made[1:2]


def test_damaged_files_are_refused_by_line(tmp_path: Path, capsys) -> None:
    path, database = tmp_path / "rows.jsonl", str(tmp_path / "a.sqlite")
    good = list(files.text([row(product(8))]))
    for lines, words in (
        ([good[0].replace('"version": 1', '"version": 9'), good[1]], "version 9"),
        ([good[0], good[1][:-9]], "line 2"),
        ([good[0], good[1].replace('"fp32"', "7")], "line 2"),
        ([good[0], good[1].replace('"warmup":2', '"warmup":2,"more":1')], "line 2"),
    ):
        path.write_text("".join(lines))
        assert main(["db", "import", "--db", database, str(path)]) == 2
        assert words in capsys.readouterr().err


def test_spread_tells_a_device_that_slows_down() -> None:
    calm = row(product(8), *[1.0e-3, 1.01e-3, 1.0e-3, 0.99e-3, 1.0e-3, 1.02e-3, 1.0e-3])
    slowing = row(product(8), *[1.0e-3, 1.0e-3, 1.1e-3, 1.2e-3, 1.3e-3, 1.4e-3, 1.5e-3])
    assert calm.steady and not slowing.steady
    assert row_data.spread((2.0,)) == 0.0


def test_prune_removes_what_is_asked_and_nothing_else(tmp_path: Path) -> None:
    calm, later = row(product(8), 1e-3), row(product(8), 1.1e-3)
    shaky = row(product(16), 1e-3, 2e-3, 3e-3)
    taken_in = row(product(32), 1e-3, origin=Origin.IMPORTED)
    with LatencyDatabase(tmp_path / "a.sqlite") as database:
        database.add([calm, later, shaky, taken_in])
        assert database.prune(product="another") == 0
        assert database.keys(CPU) == {signature.key(product(8))}
        assert database.prune(unsteady=True) == 1
        assert database.prune(superseded=True) == 1
        assert list(database.rows()) == [later, taken_in]
        with pytest.raises(DatabaseError, match="which rows"):
            database.prune()


def test_stats_counts_by_device_origin_and_family(tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.sqlite"
    with LatencyDatabase(path) as database:
        database.add([row(product(8), 1e-3, 1e-3), row(product(9), 2e-3, 4e-3, 6e-3)])
        (count,) = database.counts()
    assert count["rows"] == 2 and count["samples"] == 5 and count["unsteady"] == 1
    assert count["seconds"] == pytest.approx(2e-3 + 12e-3)
    assert main(["db", "stats", "--db", str(path)]) == 0
    assert "a CPU" in capsys.readouterr().out
