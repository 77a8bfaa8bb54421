"""Read operator-level evidence and understand its shapes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

_PAIR = re.compile(r"([a-z_]+)=(\d+)")
_CUBE = re.compile(r"m=n=k=(\d+)")
# Not evidence of what a kernel does on average: recalled, lower bounds, hand-picked best shapes.
_REFUSED = ("memory", "threshold", "best of search", "low-toggle")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measured figure."""

    gpu: str
    op: str
    dtype: str
    direction: str
    value: float
    unit: str
    source: str
    shape: dict[str, int]
    text: str
    """The shape as it stands in the file."""
    software: str
    gpus: int
    nodes: int
    microseconds: float


def read(paths: list[Path], also: tuple[str, ...] = ()) -> list[Row]:
    """All usable rows of the evidence files.

    Args:
        paths: Files with a list ``points``.
        also: Kinds of confidence to let in although they are refused otherwise.
    """
    rows: list[Row] = []
    for path in paths:
        for point in yaml.safe_load(path.read_text(encoding="utf-8"))["points"]:
            confidence = str(point.get("conf", ""))
            refused = [word for word in _REFUSED if word in confidence and word not in also]
            if not refused:
                rows.append(_row(point))
    return rows


def _row(point: dict[str, Any]) -> Row:
    text = str(point["shape"])
    cube = _CUBE.match(text)
    shape = dict.fromkeys("mnk", int(cube[1])) if cube else {
        key: int(value) for key, value in _PAIR.findall(text)
    }  # fmt: skip
    return Row(
        gpu=point["gpu"], op=point["op"], dtype=point["dtype"], direction=point["dir"],
        value=float(point["value"]), unit=point["unit"], source=point["src"], shape=shape,
        text=text,
        software=str(point.get("sw", "")), gpus=int(point.get("gpus", 0)),
        nodes=int(point.get("nodes", 0)), microseconds=float(point.get("us", 0)),
    )  # fmt: skip
