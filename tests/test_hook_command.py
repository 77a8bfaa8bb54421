"""Command lines: what is ours, what runs again, where the overrides go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_ext.hydra import typed
from primus_ext.runner import UsageError, command

SPLITS = [
    ("python train.py a=1", (), "train.py", None, ("a=1",)),
    ("python -u train.py a=1", ("-u",), "train.py", None, ("a=1",)),
    ("python -m pkg.train a=1 -m", (), None, "pkg.train", ("a=1", "-m")),
    ("python -X utf8 -Wignore -OO dir/train.py", ("-X", "utf8", "-Wignore", "-OO"),
     "dir/train.py", None, ()),
    ("python -um pkg", (), None, "pkg", ()),
    ("python -mpkg a=1", (), None, "pkg", ("a=1",)),
    ("python --check-hash-based-pycs always t.py -c x", ("--check-hash-based-pycs", "always"),
     "t.py", None, ("-c", "x")),
    ("/env/bin/python /env/bin/train +x=1", (), "/env/bin/train", None, ("+x=1",)),
]  # fmt: skip


@pytest.mark.parametrize(("line", "options", "script", "module", "arguments"), SPLITS)
def test_split(line: str, options: tuple, script: str, module: str, arguments: tuple):
    assert command.split(line.split()) == command.Command(
        options=options, script=script, module=module, arguments=arguments
    )


SHOW = "import json, sys; json.dump([sys.orig_argv, sys.flags.optimize, sys.argv], sys.stdout)"


@pytest.mark.parametrize("options", [["-X", "utf8", "-Bs", "-O"], ["-OO", "-Wignore", "-u"], []])
@pytest.mark.parametrize("as_module", [True, False])
def test_split_agrees_with_the_interpreter(options: list[str], as_module: bool, tmp_path: Path):
    """What CPython passes on to the program, and a second start from the parts."""
    (tmp_path / "show.py").write_text(SHOW)
    program = ["-m", "show"] if as_module else ["show.py"]
    line = [sys.executable, *options, *program, "a=1", "-m", "-c", "x"]

    def start(line: list[str]) -> list:
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    original, optimize, seen = start(line)
    parts = command.split(original)
    assert list(parts.arguments) == seen[1:] == ["a=1", "-m", "-c", "x"]
    again = ["-m", parts.module] if parts.module else [parts.script]
    assert start([sys.executable, *parts.options, *again, *parts.arguments])[1:] == [optimize, seen]


@pytest.mark.parametrize("line", ["python -c pass a=1", "python - a=1", "python", "python -i"])
def test_what_can_not_run_again(line: str):
    with pytest.raises(UsageError, match="can't be run a second time"):
        command.split(line.split())


def test_added_overrides_take_the_place_of_removed_ones():
    original = command.split(
        ["python", "t.py", "a=1", "+projection=on", "b=2", "+projection.out=D", "-cn", "x"]
    )
    ours = typed.read(original.arguments).tokens
    assert ours == ["+projection=on", "+projection.out=D"]
    assert command.replaced(original, ours, ["new=1"]).arguments == (
        "a=1", "new=1", "b=2", "-cn", "x",
    )  # fmt: skip


def test_without_a_removed_one_they_go_to_the_end():
    original = command.split(["python", "t.py", "a=1"])
    assert command.replaced(original, ["x"], ["new=1"]).arguments == ("a=1", "new=1")


tokens = st.sampled_from(["a=1", "+b=2", "-cn", "x", "c=[1,2]", "+projection=on", "~d"])


@given(st.lists(tokens), st.lists(tokens))
def test_users_tokens_keep_their_order(before: list[str], after: list[str]):
    original = command.split(["python", "t.py", *before, "+target_cluster=h100_8x8", *after])
    ours = typed.read(original.arguments).tokens
    kept = [token for token in before + after if token != "+projection=on"]
    new = command.replaced(original, ours, ["new=1"]).arguments
    assert [token for token in new if token != "new=1"] == kept and new.count("new=1") == 1


OURS = [
    "+projection=on", "+projection@_global_=on", "+projection='simulate'", "+projection.out=/d",
    "++projection.out=/d", "+projection.fail_on=oom", "+target_cluster=h100_8x8",
    "++projection=on", "hydra.callbacks.primus_projection.mode=on",
    "+hydra.callbacks.primus_projection.fail_on=oom", "+projection.typo=1", "+projection/on=x",
]  # fmt: skip
NOT_OURS = [
    "projection=64", "projection.dim=64", "++projection.dim=64", "++projection=64", "~projection",
    "+projection_dim=64", "+projections=on", "+my.projection=on", "target_cluster=x", "+recipe=x",
    "hydra.callbacks.mine.mode=on", "a=+projection=on", "--config-name=+projection", "hydra.x=null",
]  # fmt: skip


@pytest.mark.parametrize("token", OURS)
def test_ours(token: str):
    assert typed.read(["a=1", token]).tokens == [token]


@pytest.mark.parametrize("token", NOT_OURS)
def test_not_ours(token: str):
    read = typed.read([token])
    assert read.tokens == [] and read.problem is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("+projection.out=D", "+projection=MODE"),
        ("+target_cluster=h100_8x8", "+projection=MODE"),
        ("+projection=on +projection.nodes=4", "legal: +projection.out=, +projection.fail_on="),
        ("+projection=on +projection.out=", "+projection.out=FOLDER"),
        ("+projection=null", "one of on, simulate"),
        ("+projection=on,simulate", "one of on, simulate"),
        ("+projection@a.b=on", "must be written +projection=NAME"),
        ("+target_cluster@_global_=x +projection=on", "must be written +target_cluster=NAME"),
        ("+projection=on -m", "-m can't be combined"),
        ("--multirun +projection=on", "--multirun can't be combined"),
        ("+projection=on hydra.mode=MULTIRUN", "hydra.mode=MULTIRUN can't be combined"),
        ("+projection=on ~projection", "takes away again"),
        ("+projection=on ~hydra.callbacks", "takes away again"),
        ("+projection=on hydra.callbacks=null", "takes away again"),
        ("+projection=on +target_cluster=h100_1x8 ++target_cluster.nodes=3",
         "++target_cluster.nodes=3 does not reach the target"),
        ("+projection=on +target_cluster.gpus_per_node=4",
         "++hydra.callbacks.primus_projection.target_cluster.gpus_per_node=4"),
    ],
)
def test_problems(line: str, words: str):
    problem = typed.read(line.split()).problem
    assert problem is not None and words in problem and "\n" not in problem


@pytest.mark.parametrize(
    "line",
    [
        "+projection=on",
        "+target_cluster=h100_8x8 +projection=simulate +projection.out=D +projection.fail_on=oom",
        "a=1,2 +projection=on hydra.run.dir=x",
        "+projection@_global_=on -cn other",
        "+projection=on ++target_cluster.nodes=3",  # a key of the program's own
        "+projection=on +target_cluster=h100_1x8 ++target_cluster.owner=me target_cluster.nodes=3",
    ],
)
def test_no_problem(line: str):
    assert typed.read(line.split()).problem is None
