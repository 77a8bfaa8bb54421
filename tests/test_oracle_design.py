"""The design of the memory oracle covers what it says, and its committed table is explained."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


oracle_design = script("oracle_design")
oracle = script("oracle")
ENTRIES = yaml.safe_load(oracle_design.DESIGN.read_text())
CONFIGS = [entry["knobs"] for entry in ENTRIES]


def test_there_are_sixty_legal_configurations() -> None:
    assert len(ENTRIES) >= 60
    assert len({entry["args"] for entry in ENTRIES}) == len(ENTRIES)
    for config in CONFIGS:
        assert all(oracle_design.legal(config, knob) for knob in oracle_design.KNOBS)


def test_every_value_of_every_knob_is_in_three() -> None:
    for knob, values in oracle_design.KNOBS.items():
        counts = Counter(config[knob] for config in CONFIGS)
        assert min(counts[value] for value in values) >= 3


def test_every_legal_pair_is_covered() -> None:
    covered: set[tuple] = set()
    for config in CONFIGS:
        covered |= set(itertools.combinations(((k, config[k]) for k in oracle_design.KNOBS), 2))
    pairs = set(oracle_design.all_pairs())
    assert covered <= pairs
    # what is not covered is forbidden: no random search finds a configuration with it
    assert oracle_design.legal_pairs() == covered
    assert len(pairs - covered) < 0.05 * len(pairs)


def test_the_file_is_what_the_script_makes() -> None:
    assert oracle_design.entries(CONFIGS) == ENTRIES


def test_an_illegal_configuration_of_the_file_is_replaced() -> None:
    broken = {**CONFIGS[0], "pipeline": "1", "stages": "first"}
    made = oracle_design.design([broken, *CONFIGS[1:]])
    assert broken not in made
    assert made[: len(CONFIGS) - 1] == CONFIGS[1:]


@pytest.mark.parametrize(("one", "other"), [(5, 3), ("no answer", 3), (5, "refused")])
def test_a_difference_needs_two_numbers(one: object, other: object) -> None:
    assert oracle.difference(one, other) == (2 if (one, other) == (5, 3) else "")


def table() -> list[dict[str, str]]:
    with oracle.TABLE.open() as file:
        return list(csv.DictReader(file))


def test_no_difference_of_the_table_is_unexplained_but_the_open_ones() -> None:
    rows = table()
    assert len({row["id"] for row in rows if row["virtual - composed"] == "0"}) >= 70
    assert len({row["id"] for row in rows if row["real - virtual"] == "0"}) >= 70
    assert {r["id"] for r in rows if r["reason"].startswith("open")} == set(oracle.OPEN)
    for row in rows:
        for column in ("virtual - composed", "real - virtual"):
            assert row[column] == "0" or row["reason"], row


def test_the_table_holds_every_configuration() -> None:
    assert len(table()) == sum(oracle.stage_count(entry) for entry in ENTRIES)


def test_a_failure_that_nobody_explained_says_what_it_was() -> None:
    row = {"virtual": 1, "real": "the job could not be traced: KeyError: 'x'\nmore"}
    row |= {"composed": 1, "virtual - composed": 0, "real - virtual": ""}
    told = oracle.reason({"id": "m1"}, row)
    assert told == "not explained: the job could not be traced: KeyError: 'x'"
