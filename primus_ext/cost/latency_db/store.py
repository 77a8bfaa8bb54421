"""The database file: SQLite, one file, written by several processes at once.

A row is committed whole or not at all, and what was committed outlives a writer that is killed.
Writers wait for each other.  Equal rows are stored once, so that an import can be repeated.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext import trace_io
from primus_ext.cost.latency_db import kinds, rows, signature
from primus_ext.cost.latency_db.rows import Device, Origin, Row, Source, Versions
from primus_ext.trace import Op, to_plain

VARIABLE = "PRIMUS_EXT_DB"
"""Environment variable: path of the database file."""
SCHEMA = 1
"""Version of the tables below; a file with another one is refused."""
_APPLICATION = 0x70784C44
"""SQLite's ``application_id``, which tells a database of this package from any other."""
_PATIENCE_S = 60.0
"""How long a writer waits for others."""
_TABLES = """
CREATE TABLE IF NOT EXISTS device (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS op (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, name TEXT NOT NULL, family TEXT NOT NULL,
    kind TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS op_kind ON op (kind);
CREATE TABLE IF NOT EXISTS measurement (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE,
    op INTEGER NOT NULL REFERENCES op, device INTEGER NOT NULL REFERENCES device,
    versions TEXT NOT NULL, source TEXT NOT NULL, origin TEXT NOT NULL, samples TEXT NOT NULL,
    median REAL NOT NULL, spread REAL NOT NULL, clock TEXT NOT NULL, kernel TEXT NOT NULL,
    warmup INTEGER NOT NULL, clock_hz REAL NOT NULL, taken TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS measurement_op ON measurement (op, device);
"""
_SELECT = """
SELECT op.text, device.text, m.versions, m.source, m.samples, m.clock, m.kernel, m.warmup,
       m.clock_hz, m.taken
FROM measurement m JOIN op ON op.id = m.op JOIN device ON device.id = m.device
"""


class DatabaseError(ValueError):
    """The file can't be used; the message is one sentence."""


def default_path(environment: Mapping[str, str]) -> Path:
    """Where the database is, if nothing else is said.

    Args:
        environment: ``os.environ``: ``PRIMUS_EXT_DB``, else ``XDG_DATA_HOME``, else ``HOME``.
    """
    if environment.get(VARIABLE):
        return Path(environment[VARIABLE])
    base = environment.get("XDG_DATA_HOME") or str(
        Path(environment.get("HOME", "~"), ".local", "share")
    )
    return Path(base).expanduser() / "primus_ext" / "latency.sqlite"


class LatencyDatabase:
    """Measured times of ops.  One object serves one process (and its threads in turn)."""

    def __init__(self, path: Path, create: bool = True) -> None:
        """Open a database.

        Args:
            path: The file.
            create: Make it, and its folder, where there is none.

        Raises:
            DatabaseError: It is no database of this package, or of another version, or can't be
                opened or made.
        """
        self.path = path
        if not create and not path.exists():
            raise DatabaseError(f"the latency database {path} does not exist")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(f"the latency database {path} can't be used: {error}") from error

    def __enter__(self) -> LatencyDatabase:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _prepare(self) -> None:
        """Check whose file it is, and make the tables in a new one."""
        with self._transaction() as file:
            application = file.execute("PRAGMA application_id").fetchone()[0]
            version = file.execute("PRAGMA user_version").fetchone()[0]
            used = file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if used and application != _APPLICATION:
                raise DatabaseError(f"{self.path} is a database of something else")
            if used and version != SCHEMA:
                raise DatabaseError(
                    f"the latency database {self.path} has schema version {version}, and this "
                    f"release reads version {SCHEMA}: export it with the release that wrote it"
                )
            if not used:
                for statement in _TABLES.split(";"):
                    file.execute(statement)
                file.execute(f"PRAGMA application_id = {_APPLICATION}")
                file.execute(f"PRAGMA user_version = {SCHEMA}")
        self._write_ahead()

    def _write_ahead(self) -> None:
        """Let readers go on beside a writer, where the file system allows it.

        Where it does not (network file systems lack shared memory) SQLite keeps its rollback
        journal, which is as safe and slower.  Changing over needs the file alone for a moment, and
        SQLite does not wait for that by itself.
        """
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._file.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > give_up:
                    raise
                time.sleep(0.01)
        self._file.execute("PRAGMA synchronous = FULL")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it, or nothing; other writers wait."""
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield self._file
        except BaseException:
            self._file.execute("ROLLBACK")
            raise
        self._file.execute("COMMIT")

    def add(self, new: Iterable[Row]) -> int:
        """Store rows; when it returns they are on the disk.

        Returns:
            How many were not there before.

        Raises:
            DatabaseError: The file can't be written.
        """
        made = list(new)
        try:
            with self._transaction() as file:
                return sum(_insert(file, row) for row in made)
        except sqlite3.Error as error:
            raise DatabaseError(f"{self.path} can't be written: {error}") from error

    def rows(
        self, *, kind: str | None = None, device: Device | None = None, accelerator: str = "",
        origin: Origin | None = None, keys: Sequence[str] | None = None,
    ) -> Iterator[Row]:  # fmt: skip
        """Stored rows, oldest first.

        Args:
            kind: Only of one kind of work (:func:`primus_ext.cost.latency_db.kinds.kind_of`).
            device: Only of this very device.
            accelerator: Only of this product, by our name for it; '' for any.
            origin: Only measured here, or only imported.
            keys: Only with these signatures.
        """
        tests: list[tuple[str, Any]] = []
        if kind is not None:
            tests.append(("op.kind = ?", kind))
        if device is not None:
            tests.append(("device.text = ?", _device_text(device)))
        if accelerator:
            tests.append(("json_extract(device.text, '$.accelerator') = ?", accelerator))
        if origin is not None:
            tests.append(("m.origin = ?", str(origin)))
        if keys is not None:
            tests.append(("op.key IN (SELECT value FROM json_each(?))", json.dumps(list(keys))))
        where = " WHERE " + " AND ".join(test for test, _ in tests) if tests else ""
        found = self._file.execute(f"{_SELECT}{where} ORDER BY m.id", [value for _, value in tests])
        ops: dict[str, Op] = {}
        for record in found:
            yield _row(record, ops)

    def keys(self, device: Device, origin: Origin | None = Origin.MEASURED) -> set[str]:
        """Keys of the signatures that have a steady time on a device.

        Args:
            device: This very one.
            origin: Where from; None for anywhere.
        """
        found = self._file.execute(
            "SELECT DISTINCT op.key FROM measurement m JOIN op ON op.id = m.op "
            "JOIN device ON device.id = m.device "
            "WHERE device.text = ? AND m.spread <= ? AND (? IS NULL OR m.origin = ?)",
            (_device_text(device), rows.STEADY_SPREAD, origin, origin),
        )
        return {record[0] for record in found}

    def devices(self) -> list[Device]:
        """All that have rows."""
        found = self._file.execute(
            "SELECT text FROM device WHERE id IN (SELECT device FROM measurement) ORDER BY id"
        )
        return [trace_io.from_plain(Device, json.loads(record[0])) for record in found]

    def counts(self) -> list[dict[str, Any]]:
        """Rows by device, origin, clock and family: how many rows, signatures and samples.

        ``seconds`` is what the samples took on the device, ``unsteady`` how many rows scatter.
        """
        found = self._file.execute(
            "SELECT json_extract(device.text, '$.product'), m.origin, m.clock, op.family, "
            "count(*), count(DISTINCT op.id), sum(json_array_length(m.samples)), "
            "sum(m.median * json_array_length(m.samples)), sum(m.spread > ?) "
            "FROM measurement m JOIN op ON op.id = m.op JOIN device ON device.id = m.device "
            "GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4",
            (rows.STEADY_SPREAD,),
        )
        names = ("device", "origin", "clock", "family", "rows", "signatures", "samples", "seconds",
                 "unsteady")  # fmt: skip
        return [dict(zip(names, record, strict=True)) for record in found]

    def prune(
        self, *, source: str = "", product: str = "", before: str = "", unsteady: bool = False,
        superseded: bool = False,
    ) -> int:  # fmt: skip
        """Remove rows for which everything holds that is asked, and what no row refers to any more.

        Args:
            source: Part of the name of their source.
            product: Part of the name of their device.
            before: Taken before this time (ISO 8601).
            unsteady: Whose samples scatter.
            superseded: Which have a later row of the same op, device, versions and source.

        Returns:
            How many were removed.

        Raises:
            DatabaseError: Nothing was asked.
        """
        tests: list[tuple[str, list[Any]]] = []
        if source:
            tests.append(("instr(json_extract(source, '$.name'), ?) > 0", [source]))
        if product:
            tests.append((
                "device IN (SELECT id FROM device "
                "WHERE instr(json_extract(text, '$.product'), ?) > 0)", [product],
            ))  # fmt: skip
        if before:
            tests.append(("taken != '' AND taken < ?", [before]))
        if unsteady:
            tests.append(("spread > ?", [rows.STEADY_SPREAD]))
        if superseded:
            tests.append((
                "id NOT IN (SELECT max(id) FROM measurement "
                "GROUP BY op, device, versions, source, kernel, clock)", [],
            ))  # fmt: skip
        if not tests:
            raise DatabaseError("nothing says which rows to remove")
        where = " AND ".join(test for test, _ in tests)
        with self._transaction() as file:
            values = [value for _, some in tests for value in some]
            removed = file.execute(f"DELETE FROM measurement WHERE {where}", values).rowcount
            for table in ("op", "device"):
                file.execute(
                    f"DELETE FROM {table} WHERE id NOT IN (SELECT {table} FROM measurement)"
                )
        return removed


def _device_text(device: Device) -> str:
    return json.dumps(to_plain(device), sort_keys=True)


def _plain_text(value: Versions | Source) -> str:
    return json.dumps(to_plain(value), sort_keys=True)


def _insert(file: sqlite3.Connection, row: Row) -> int:
    device, written = _device_text(row.device), signature.text(row.op)
    key, kind = signature.key_of(written), kinds.kind_of(row.op)
    file.execute("INSERT OR IGNORE INTO device (text) VALUES (?)", (device,))
    file.execute(
        "INSERT OR IGNORE INTO op (key, name, family, kind, text) VALUES (?, ?, ?, ?, ?)",
        (key, row.op.name, str(row.op.family), kind, written),
    )
    return file.execute(
        "INSERT OR IGNORE INTO measurement (digest, op, device, versions, source, origin, samples, "
        "median, spread, clock, kernel, warmup, clock_hz, taken) VALUES (?, "
        "(SELECT id FROM op WHERE key = ?), (SELECT id FROM device WHERE text = ?), "
        "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            rows.digest(row), key, device, _plain_text(row.versions),
            _plain_text(row.source), str(row.source.origin), json.dumps(row.samples), row.median,
            row.spread, str(row.clock), row.kernel, row.warmup, row.clock_hz, row.taken,
        ),
    ).rowcount  # fmt: skip


def _row(record: tuple, ops: dict[str, Op]) -> Row:
    op, device, versions, source, samples, clock, kernel, warmup, clock_hz, taken = record
    if op not in ops:
        ops[op] = signature.parse(op)
    return Row(
        op=ops[op],
        device=trace_io.from_plain(Device, json.loads(device)),
        versions=trace_io.from_plain(Versions, json.loads(versions)),
        source=trace_io.from_plain(Source, json.loads(source)),
        samples=tuple(json.loads(samples)),
        clock=rows.Clock(clock),
        kernel=kernel,
        warmup=warmup,
        clock_hz=clock_hz,
        taken=taken,
    )
