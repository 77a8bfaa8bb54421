"""The cache of traces: what makes a key, what makes an entry useless, and that none is torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from primus_ext.runner import child, trace_cache, tracing
from primus_ext.runner.trace_cache import TraceCache
from tests.emulation import COMMON, H100

ROOT = Path(__file__).parent.parent
SCRATCH = Path("/scratch/of/this/run")
ANSWER: dict[str, Any] = {"traces": [1, 2], "inputs": {"hashes": {}, "stats": {}}}
REQUEST = {"script": "a.py", "args": ["tp=2", f"dir={SCRATCH}/run"], "cwd": "/job"}


@pytest.fixture
def cache(tmp_path: Path) -> TraceCache:
    return TraceCache(tmp_path / "cache")


def key(cache: TraceCache, request: dict[str, Any] = REQUEST, **environment: str) -> str:
    return cache.key(request, ["-u"], {"A": "1", **environment}, SCRATCH)


def test_an_answer_comes_back_without_its_inputs(cache: TraceCache) -> None:
    assert cache.load("k", SCRATCH) is None
    cache.store("k", {**ANSWER, "program": f"{SCRATCH}/run"}, SCRATCH)
    other = Path("/another/run")
    assert cache.load("k", other) == {"traces": [1, 2], "program": f"{other}/run"}


def test_the_key_is_everything_that_is_known_before(
    cache: TraceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key(cache)
    again = {**REQUEST, "args": ["tp=2", "dir=/elsewhere/run"]}
    assert cache.key(again, ["-u"], {"A": "1"}, Path("/elsewhere")) == first
    assert key(cache, {**REQUEST, "overrides_removed": ["+projection=on"]}) == first
    assert key(cache, SHLVL="3", SSH_TTY="x") == first
    changed = [
        key(cache, {**REQUEST, "args": ["tp=4"]}),
        key(cache, {**REQUEST, "cwd": "/other"}),
        key(cache, NVTE_FLASH_ATTN="0"),
        cache.key(REQUEST, [], {"A": "1"}, SCRATCH),
    ]
    for change in ({"torch": "9.9"}, {"recorder": "edited"}):
        known = trace_cache.releases()
        monkeypatch.setattr(trace_cache, "releases", lambda known=known, c=change: {**known, **c})
        changed.append(key(TraceCache(Path("unused"))))  # one looks them up once
        monkeypatch.undo()
    assert len({first, *changed}) == 7


def test_the_hash_of_our_own_source_sees_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "emulate" / "x.py"
    source.parent.mkdir()
    source.write_text("a = 1\n")
    for name in ("observe", "frameworks"):
        (tmp_path / name).mkdir()
    for name in ("trace.py", "plan.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(trace_cache, "_PACKAGE", tmp_path)
    before = trace_cache.releases()["recorder"]
    source.write_text("a = 2\n")
    assert trace_cache.releases()["recorder"] != before


@pytest.mark.parametrize("damage", [b"", b"not zlib", None])
def test_a_damaged_file_is_named_and_replaced(
    cache: TraceCache, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes | None
) -> None:
    cache.store("k", ANSWER, SCRATCH)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    assert cache.load("k", SCRATCH) is None
    assert f"the cached trace {path} is damaged" in capsys.readouterr().err
    cache.store("k", ANSWER, SCRATCH)
    assert cache.load("k", SCRATCH) == {"traces": [1, 2]}


def test_what_a_job_could_not_account_for_is_not_kept(cache: TraceCache) -> None:
    cache.store("k", {**ANSWER, "inputs": None}, SCRATCH)
    assert cache.load("k", SCRATCH) is None


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    TraceCache(tmp_path / "file").store("k", ANSWER, SCRATCH)
    assert "the trace is not cached" in capsys.readouterr().err


def test_the_oldest_go_when_there_is_too_much(
    cache: TraceCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate(("old", "middle", "young")):
        cache.store(name, ANSWER, SCRATCH)
        os.utime(tmp_path / "cache" / f"{name}.trace", (10**9 + age, 10**9 + age))
    size = (tmp_path / "cache" / "old.trace").stat().st_size
    assert cache.load("old", SCRATCH) is not None  # and is the youngest now
    monkeypatch.setattr(trace_cache, "LIMIT_BYTES", 3 * size + 8)
    cache.store("next", ANSWER, SCRATCH)
    kept = [n for n in ("old", "middle", "young", "next") if cache.load(n, SCRATCH)]
    assert kept == ["old", "young", "next"]


def test_two_processes_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cache_writer", str(tmp_path), "k"]
    writers = [subprocess.Popen([*command, how], cwd=ROOT) for how in ("one", "two")]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert TraceCache(tmp_path).load("k", SCRATCH) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["k.trace"]


def test_a_writer_killed_in_the_middle_leaves_the_old_answer(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path)
    cache.store("k", ANSWER, SCRATCH)
    command = [sys.executable, "-m", "tests.cache_writer", str(tmp_path), "k", "dies"]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    (torn,) = tmp_path.glob("*.part-*")
    assert torn.stat().st_size > 0
    assert cache.load("k", SCRATCH) == {"traces": [1, 2]}
    os.utime(torn, (10**9, 10**9))
    cache.store("k", ANSWER, SCRATCH)
    assert not torn.exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/h"}, "/h/.cache/primus_ext/traces"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/primus_ext/traces"),
        ({"HOME": "/h", "PRIMUS_EXT_CACHE": "/own"}, "/own"),
        ({"HOME": "/h", "PRIMUS_EXT_CACHE": "off"}, None),
    ],
)
def test_where_it_lies(environment: dict[str, str], expected: str | None) -> None:
    assert trace_cache.folder(environment) == (None if expected is None else Path(expected))


PROGRAM = """
import sizes
from primus_ext.frameworks.megatron import gpt_program
open("settings.yaml").read()
gpt_program.main()
"""
SMALL = (
    "--num-layers 1 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 1 "
    "--vocab-size 127"
)


APART = """
import sys
from pathlib import Path
from primus_ext.runner import child, emulation, tracing
child.BOOTSTRAP = "no.such.module"
folder = Path({folder!r})
answer = tracing.answer({request!r}, [], folder, folder / "log", lambda *_: None)
cluster = emulation.load_cluster("h100", 1, 1)
projection, _ = emulation.priced_and_drawn(answer, "simulate", cluster, [])
print(projection.memory.verdict)
print([name for name in ("torch", "megatron") if name in sys.modules])
"""


def test_a_job_is_traced_once_until_a_file_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, log = tmp_path / "job", tmp_path / "child.log"
    job.mkdir()
    contents = {"train.py": PROGRAM, "sizes.py": "x = 1\n", "settings.yaml": "a: 1\n"}
    for name, text in contents.items():
        (job / name).write_text(text)
    request = {
        "script": str(job / "train.py"), "args": [*COMMON, *SMALL.split()], "cwd": str(job),
        "device": H100, "world_size": 1, "gpus_per_node": 1,
        "frameworks": ["primus_ext.frameworks.megatron"],
    }  # fmt: skip
    monkeypatch.setenv("PRIMUS_EXT_CACHE", str(tmp_path / "cache"))

    def ask() -> dict[str, Any]:
        scratch = Path(tempfile.mkdtemp(dir=tmp_path))
        return tracing.answer(request, [], scratch, log, lambda *_: None)

    fresh = ask()
    monkeypatch.setattr(child, "BOOTSTRAP", "no.such.module")  # from here on nothing can run
    cached = ask()
    assert "was not run" in log.read_text()
    assert cached == {name: value for name, value in fresh.items() if name != "inputs"}
    assert {Path(p).name for p in fresh["inputs"]["hashes"]} >= set(contents)
    code = APART.format(request=request, folder=tempfile.mkdtemp(dir=tmp_path))
    apart = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert apart.stdout.splitlines() == ["fits", "[]"], apart.stderr
    for name, text in contents.items():
        (job / name).write_text(text + "\n")
        with pytest.raises(child.ChildError):
            ask()
        (job / name).write_text(text)
        assert ask() == cached
