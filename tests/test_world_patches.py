"""What stands in for Megatron's loops over all ranks gives the same as those loops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from primus_ext.emulate import virtual_world
from primus_ext.frameworks.megatron import world_patches


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.world_patches_check"], capture_output=True, text=True,
        cwd=Path(__file__).parent.parent, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_groups_are_those_of_megatron(compared: dict[str, Any]) -> None:
    assert compared["groups"]["agree"] == compared["groups"]["checked"] > 300


def test_shards_are_those_of_megatron(compared: dict[str, Any]) -> None:
    assert compared["shards"] == [True] * 6


def test_every_replaced_name_exists(compared: dict[str, Any]) -> None:
    assert compared["missing"] == []


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="7 ranks"):
        world_patches.orthogonal_groups(7, [2, 3], [True, False])
    with pytest.raises(AssertionError, match="can't be split"):
        world_patches.Shards(torch.arange(24), 5)


def test_outside_a_virtual_world_nobody_is_a_stranger() -> None:
    assert not virtual_world.is_stranger_to([1, 2])
