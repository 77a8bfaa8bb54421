"""What is known of the program so far."""

from __future__ import annotations

import dataclasses
from typing import Any


class NotProjectable(ValueError):
    """The run can't be projected; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedProgram:
    """Megatron arguments of a run, its target, and the approximations made."""

    argv: tuple[str, ...]
    accelerator: str
    nodes: int
    gpus_per_node: int
    approximations: tuple[str, ...]
    emulations: tuple[str, ...] = ()
    """Modules that make the installed Megatron-LM behave like the one that ran; they go into the
    ``frameworks`` of the request."""
    conditions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Flags of the plan that the trace does not show: who issues the kernels, which of several
    kernels of one kind they are."""
    network: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the run states of its network, for :func:`primus_ext.cluster_data.load_cluster`."""


@dataclasses.dataclass(slots=True)
class Draft:
    """Arguments and notes of one run while its parts are written."""

    run: dict[str, Any]
    argv: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    emulations: list[str] = dataclasses.field(default_factory=list)
    conditions: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, *words: Any) -> None:
        """Append arguments; numbers become text."""
        self.argv += [str(word) for word in words]

    def note(self, text: str) -> None:
        """Name an approximation, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def framework(self) -> str:
        """Name of the software that ran, e.g. ``Megatron-LM``; '' where it is not stated."""
        return str(self.run.get("software", {}).get("framework") or "")

    @property
    def fsdp(self) -> bool:
        """Whether parameters were sharded over the data-parallel ranks."""
        parallelism = self.run["parallelism"]
        return bool(parallelism.get("fsdp")) or (parallelism.get("zero_stage") or 0) > 1

    def flag(self, *names: str) -> Any:
        """The first of these flags that the run states; None if it states none."""
        flags = self.run.get("flags") or {}
        return next((flags[name] for name in names if flags.get(name) is not None), None)

    def is_on(self, *names: str) -> bool | None:
        """A flag as a truth value (files hold true, 1 and "True"); None where not stated."""
        value = self.flag(*names)
        return None if value is None else str(value).lower() in ("true", "1")

    def stated(self, part: dict[str, Any], key: str) -> Any:
        """A knob that can't be assumed.

        Raises:
            NotProjectable: the run does not state it.
        """
        value = part.get(key)
        if value is None:
            source = self.run.get("source", {}).get("name")
            nothing = "" if "assumed" in self.run else f", and nothing is assumed for {source}"
            raise NotProjectable(f"{key} is not stated{nothing}")
        return value
