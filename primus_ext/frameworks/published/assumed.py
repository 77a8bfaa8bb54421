"""Knobs that a partial row does not state, from one committed file.

``assumed_knobs.yaml`` says for which rows what is assumed, from which document, and why.  A row
that states a knob keeps what it states.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("assumed_knobs.yaml")
KNOBS: Mapping[str, frozenset[str]] = {
    "model": frozenset({"vocab_size"}),
    "parallelism": frozenset({
        "tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel", "distributed_optimizer",
        "zero_stage", "pp_schedule",
    }),
    "batch": frozenset({"mbs", "gbs", "seq_len"}),
    "precision": frozenset({"compute", "scaling", "grad_reduce"}),
    "recompute": frozenset({"granularity", "method", "num_layers"}),
    "flags": frozenset({
        "flash_attention", "dropout", "sliding_window", "cross_entropy_fusion",
        "gradient_accumulation_fusion", "bias_swiglu_fusion", "optimizer_states",
        "overlap_grad_reduce", "overlap_param_gather", "moe_router_force_load_balancing",
        "moe_dispatcher", "moe_permute_fusion", "moe_shared_expert_overlap", "sync_free_moe_stage",
        "pp_layout",
    }),
}  # fmt: skip
"""What may be assumed, by part of a row: knobs that the mapping reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assumption:
    """The value of one knob, and how it is known."""

    part: str
    key: str
    value: Any
    document: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is assumed of some rows."""

    source: str
    """How the name of their source begins."""
    where: Mapping[str, Any]
    """What they state, by ``part.key``; None: what they do not state."""
    assumptions: tuple[Assumption, ...]

    def holds_for(self, run: Mapping[str, Any]) -> bool:
        """Whether a row is one of them."""
        return str(run["source"].get("name")).startswith(self.source) and all(
            _matches(_stated(run, path), value) for path, value in self.where.items()
        )


def completed(run: dict[str, Any]) -> dict[str, Any]:
    """A row with what it leaves open filled in; its ``assumed`` names each knob that was.

    Args:
        run: As in the runs file; it is not changed.
    """
    if "assumed" in run:
        return run
    found = [entry for entry in entries() if entry.holds_for(run)]
    if not found:
        return run
    filled, notes = copy.deepcopy(run), []
    for one in (assumption for entry in found for assumption in entry.assumptions):
        knobs = filled.setdefault(one.part, {})
        if knobs.get(one.key) is None:
            knobs[one.key] = one.value
            notes.append(f"{one.part}.{one.key} is not stated: {one.value} assumed")
    return {**filled, "assumed": notes}


def _stated(run: Mapping[str, Any], path: str) -> Any:
    part, key = path.split(".")
    return (run.get(part) or {}).get(key)


def _matches(stated: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and isinstance(stated, str):
        return fnmatch.fnmatch(stated, wanted)
    return stated == wanted


@functools.lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """What stands in the file."""
    return read(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def read(file: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Entries of an assumptions file.

    Raises:
        ValueError: a knob that the mapping does not read, a document that the file does not list,
            or an assumption without a reason.
    """
    return tuple(
        Entry(
            entry["source"],
            entry.get("where") or {},
            tuple(_assumption(path, told, file["documents"])
                  for path, told in entry["assume"].items()),
        )
        for entry in file["entries"]
    )  # fmt: skip


def _assumption(path: str, told: Mapping[str, Any], documents: Mapping[str, str]) -> Assumption:
    part, _, key = path.partition(".")
    if key not in KNOBS.get(part, ()):
        legal = ", ".join(f"{p}.{k}" for p, keys in KNOBS.items() for k in sorted(keys))
        raise ValueError(f"{path} is no knob that can be assumed; legal: {legal}")
    if told["from"] not in documents:
        raise ValueError(
            f"{path} is from {told['from']}, which is no document of the file; "
            f"legal: {', '.join(documents)}"
        )
    if told["is"] is None or not str(told.get("why") or ""):
        raise ValueError(f"{path} is assumed without a value or a reason")
    return Assumption(part, key, told["is"], told["from"], told["why"])
