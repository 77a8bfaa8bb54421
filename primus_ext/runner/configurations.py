"""A list of models and layouts, and which ops all of them run.

Layers are recorded at a few small points, from which every microbatch and sequence length follows
exactly (:mod:`primus_ext.runner.layer_records`).  Those small points are candidates of a sweep as
well: they have the model's own dimensions and few tokens, so they cost little to measure.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.latency_db import signature
from primus_ext.runner import bulk, child, emulation
from primus_ext.runner.layer_records import LayerRecords, Refused, Wanted
from primus_ext.runner.outcome import UsageError, say
from primus_ext.runner.trace_cache import TraceCache, folder
from primus_ext.trace import Op, RankTrace

PROGRAM = "primus_ext.frameworks.megatron.gpt_program"
_SMALL = ((1, 1), (2, 1), (1, 2))
"""Microbatches and multiples of the unit of the sweep; of those that layers are recorded at."""
_KEYS = {"name", "source", "arguments", "gpus", "unit", "mbs", "seq", "degrees"}
_NEEDED = {"name", "arguments", "gpus", "unit", "mbs", "seq"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model with the layouts and batches that are wanted of it."""

    name: str
    arguments: tuple[str, ...]
    """Of Megatron-LM."""
    gpus: int
    """Ranks of the job."""
    unit: int
    """Tokens whose multiples every layout divides; the sequence of the smallest recording."""
    mbs: tuple[int, ...]
    seq: tuple[int, ...]
    degrees: tuple[Mapping[str, Any], ...] = ({},)
    """Megatron arguments by name in which a layout differs."""
    source: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """Ops of all configurations."""

    configurations: dict[str, collections.Counter[Op]]
    """By name: how often one microbatch and one optimizer step run each op (canonical)."""
    sweep: dict[str, frozenset[Op]]
    """Of each configuration, ops of the same layers with fewer tokens."""
    refused: dict[str, str]
    """Configurations that the framework does not allow, and its sentence."""


def read(path: Path) -> list[Model]:
    """Models of a YAML file: ``common`` arguments, and ``models``.

    Raises:
        UsageError: It is no such file.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("models"), list):
        raise UsageError(f"{path} has no list named models")
    common = str(content.get("common", "")).split()
    return [_model(path, common, entry) for entry in content["models"]]


def _model(path: Path, common: Sequence[str], entry: Any) -> Model:
    if not isinstance(entry, dict) or entry.keys() - _KEYS or _NEEDED - entry.keys():
        raise UsageError(
            f"{path}: a model has the keys {', '.join(sorted(_NEEDED))}, and may have "
            f"{', '.join(sorted(_KEYS - _NEEDED))}; this one is {entry!r}"
        )
    try:
        return Model(
            name=str(entry["name"]),
            arguments=(*common, *str(entry["arguments"]).split()),
            gpus=int(entry["gpus"]),
            unit=int(entry["unit"]),
            mbs=tuple(int(value) for value in entry["mbs"]),
            seq=tuple(int(value) for value in entry["seq"]),
            degrees=tuple(dict(value) for value in entry.get("degrees", ({},))),
            source=str(entry.get("source", "")),
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: model {entry['name']!r}: {error}") from error


def needs(models: Sequence[Model], accelerator: str, progress: child.Progress) -> Needs:
    """What all configurations of all models run.

    Args:
        models: The models.
        accelerator: Product that their programs are recorded for.
        progress: Told how far it is.

    Raises:
        UsageError: No such product.
        ChildError: A child failed.
    """
    found = Needs({}, {}, {})
    steps = _steps(models, accelerator, found.refused)
    directory = folder(os.environ)
    cache = None if directory is None else TraceCache(directory)
    for number, model in enumerate(models):
        progress(number, len(models), model.name)
        with tempfile.TemporaryDirectory(prefix="primus_ext_") as name:
            request = {**_request(model, accelerator, {}), "cwd": name}
            records = LayerRecords(
                request, (), model.unit, Path(name), cache, lambda _done, _total, _text: None
            )
            for degrees in model.degrees:
                _add(found, records, model, degrees, steps.get(_named(model, degrees)))
    return found


def _add(
    found: Needs, records: LayerRecords, model: Model, degrees: Mapping[str, Any],
    step: collections.Counter[Op] | None,
) -> None:  # fmt: skip
    if step is None:  # refused, and noted
        return
    points = list(itertools.product(model.mbs, model.seq))
    small = [(mbs, times * model.unit) for mbs, times in _SMALL]
    layout = _named(model, degrees)
    try:
        recordings = records.get([Wanted.of(degrees, *point) for point in (*points, *small)])
    except Refused as error:
        found.refused[layout] = str(error)
        return
    ops = [_measurable(op for op, _, _ in recording.calls) for recording in recordings]
    for (mbs, seq), counted in zip(points, ops, strict=False):
        name = f"{layout} mbs={mbs} seq={seq}"
        found.configurations[name] = counted + step
        found.sweep[name] = frozenset(itertools.chain(*ops[len(points) :]))


def _steps(
    models: Sequence[Model], accelerator: str, refused: dict[str, str]
) -> dict[str, collections.Counter[Op]]:
    """Ops of the optimizer step of every layout."""
    requests = {
        _named(model, degrees): _request(model, accelerator, degrees)
        for model in models
        for degrees in model.degrees
    }
    found: dict[str, collections.Counter[Op]] = {}

    def told(name: str, answer: bulk.Answer) -> None:
        if answer.refused:
            refused[name] = answer.refused
            say(f"{name}: {answer.refused}")
            return
        trace = trace_io.from_plain(RankTrace, json.loads(answer.text)["traces"][0])
        found[name] = _measurable(trace.ops[call.op] for call in trace.step)

    bulk.answers(requests, told)
    return found


def _measurable(ops: Iterator[Op]) -> collections.Counter[Op]:
    return collections.Counter(
        signature.canonical(op)
        for op in ops
        if op.family in signature.MEASURABLE and op.collective is None
    )


def _named(model: Model, degrees: Mapping[str, Any]) -> str:
    return " ".join([model.name, *(f"{name}={value}" for name, value in degrees.items())])


def _request(model: Model, accelerator: str, degrees: Mapping[str, Any]) -> dict[str, Any]:
    """A job as the bootstrap is asked for it, without ``cwd``."""
    try:
        cluster = load_cluster(accelerator, max(1, model.gpus // 8), min(8, model.gpus))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {
        "mode": "simulate",
        "script": None,
        "module": PROGRAM,
        "args": [*model.arguments, *_options(degrees)],
        "name": model.name,
        "origins": False,
        **emulation.question(cluster),
    }


def _options(degrees: Mapping[str, Any]) -> Iterator[str]:
    """Degrees as options of the command line."""
    for name, value in degrees.items():
        if value is False or value is None:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])
