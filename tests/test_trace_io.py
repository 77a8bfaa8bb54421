"""Dataclasses to JSON and back, for every dataclass that crosses a process."""

from __future__ import annotations

import dataclasses
import json
import typing
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext import plan as plans
from primus_ext import trace as traces_module
from primus_ext.plan import Plan, ProgramRef
from primus_ext.project.result import Projection
from primus_ext.trace import Op, RankTrace, Segment, to_plain
from primus_ext.trace_io import FormatError, from_plain, plan_from_plain, traces_from_plain
from tests.synthetic import Job, plan, traces

KINDS = [
    kind
    for module in (traces_module, plans)
    for kind in vars(module).values()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
]
SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy for any type that the dataclasses use."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return st.one_of(SCALARS, st.lists(SCALARS, max_size=3).map(tuple))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(a) for a in arguments])
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values(arguments[1]), max_size=2)
    if arguments:
        return st.one_of(*[values(a) for a in arguments])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {f.name: values(hints[f.name]) for f in dataclasses.fields(kind)}
        return st.builds(kind, **fields)
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    return {
        bool: st.booleans(),
        int: st.integers(-(2**60), 2**60),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8),
        type(None): st.none(),
    }[kind]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_round_trip_through_json_changes_nothing(kind: type, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    back = from_plain(kind, json.loads(json.dumps(to_plain(value))))
    assert back == value
    assert type(back) is type(value)


def test_whole_traces_and_plans_come_back_hashable() -> None:
    job = Job(tp=8, pp=4, vpp=2, dp=2, recompute=True)
    sent = json.loads(json.dumps({"plan": to_plain(plan(job)), "traces": to_plain(traces(job))}))
    assert plan_from_plain(sent["plan"]) == plan(job)
    back = traces_from_plain(sent["traces"])
    assert back == traces(job)
    assert all(hash(op) == hash(same) for op, same in zip(back[0].ops, traces(job)[0].ops,
                                                         strict=True))  # fmt: skip


def test_there_are_dataclasses_to_test() -> None:
    assert {Op, RankTrace, Segment, Plan, ProgramRef} <= set(KINDS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("segments"), "missing or unknown fields: ['segments']"),
        (lambda d: d.update(extra=1), "missing or unknown fields: ['extra']"),
        (lambda d: d.update(vpp_stage="0"), "'0' is not a int"),
        (lambda d: d.update(vpp_stage=True), "True is not a int"),
        (lambda d: d.update(vpp_stage=None), "None is not a int"),
        (lambda d: d.update(segments={}), "{} is not a list"),
        (lambda d: d["segments"][0].update(kind="layer"), "'layer' is not a ScopeKind"),
        (lambda d: d.update(memory=[]), "[] is not a ChunkMemory"),
    ],
)
def test_values_of_another_shape_are_refused(change: Any, words: str) -> None:
    chunk = traces(Job())[0].chunks[0]
    plain = json.loads(json.dumps(to_plain(chunk)))
    change(plain)
    with pytest.raises(FormatError) as refused:
        from_plain(type(chunk), plain)
    assert words in str(refused.value)


def test_traces_must_be_a_list() -> None:
    with pytest.raises(FormatError, match="dict is not a list of traces"):
        traces_from_plain({})


def test_unsupported_types_are_a_mistake_of_ours() -> None:
    @dataclasses.dataclass
    class Odd:
        x: set[int]

    with pytest.raises(TypeError, match="not supported"):
        from_plain(Odd, {"x": []})


def test_a_projection_comes_back_too() -> None:
    from primus_ext.cluster_data import load_cluster
    from primus_ext.project.compose import project

    job = Job(dp=8)
    found = project(plan(job), traces(job), load_cluster("h100", 1, 8), mode="simulate")
    back = from_plain(Projection, json.loads(json.dumps(to_plain(found))))
    assert to_plain(back) == to_plain(found)
