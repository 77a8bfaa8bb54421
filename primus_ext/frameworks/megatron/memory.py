"""Static tensors of a rank, and its process groups by short name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter

from primus_ext.emulate import deep_ep
from primus_ext.observe.recorder import Recorder
from primus_ext.trace import StaticEvents, StaticMemory

# Getter in megatron.core.parallel_state, arguments, short name.  The first name of a group wins.
_GETTERS = (
    ("get_tensor_model_parallel_group", {}, "tp"),
    ("get_context_parallel_group", {}, "cp"),
    ("get_expert_model_parallel_group", {}, "ep"),
    ("get_expert_tensor_parallel_group", {}, "etp"),
    ("get_expert_tensor_and_model_parallel_group", {}, "tp_ep"),
    ("get_pipeline_model_parallel_group", {}, "pp"),
    ("get_data_parallel_group", {}, "dp"),
    ("get_data_parallel_group", {"with_context_parallel": True}, "dp_cp"),
    ("get_expert_data_parallel_group", {}, "expert_dp"),
    ("get_tensor_and_context_parallel_group", {}, "tp_cp"),
    ("get_tensor_and_data_parallel_group", {"with_context_parallel": True}, "tp_dp_cp"),
    ("get_model_parallel_group", {}, "mp"),
    ("get_embedding_group", {}, "embd"),
)


def _named_groups() -> list[tuple[str, Any]]:
    from megatron.core import parallel_state

    found = []
    for getter, kwargs, name in _GETTERS:
        try:
            group = getattr(parallel_state, getter)(**kwargs)
        except AssertionError:  # this rank is not in such a group
            continue
        if group is not None and not isinstance(group, list):
            found.append((name, group))
    return found


def group_names() -> dict[str, str]:
    """Torch's name of a process group to the short name of the project."""
    names: dict[str, str] = {}
    for name, group in _named_groups():
        names.setdefault(group.group_name, name)
    return names


def all_groups() -> dict[str, tuple[int, ...]]:
    """Global ranks of the groups of this rank, by short name."""
    return {
        name: tuple(dist.get_process_group_ranks(group)) for name, group in _named_groups()
    }


@dataclasses.dataclass(frozen=True, slots=True)
class StaticSizes:
    """Sizes before the first microbatch; workspaces show up later."""

    parameters: int
    gradients: int
    optimizer: int
    live: int
    numbers: dict[str, frozenset[int]]
    """Numbers of the allocations in the log of the setup, by part."""

    def with_step(self, step_peak: int, recorder: Recorder, leftovers: int) -> StaticMemory:
        """Add what the microbatches and the step left behind, and the step's peak.

        Args:
            step_peak: Highest live bytes of the step above the state before.
            recorder: It has seen every allocation.
            leftovers: Bytes that modules keep of the last microbatch; they are not static.
        """
        static = self.parameters + self.gradients + self.optimizer
        return StaticMemory(
            parameters=self.parameters,
            gradients=self.gradients,
            optimizer=self.optimizer,
            workspaces=recorder.memory.live - static - leftovers,
            step_peak_bytes=step_peak,
            libraries=deep_ep.held_bytes(),
        )

    def events(
        self, recorder: Recorder, built: int, stepped: int, step: tuple[int, ...]
    ) -> StaticEvents:
        """Allocations around the microbatches, those that stay named by their part.

        Args:
            recorder: After everything was recorded.
            built: Events of the setup before the first optimizer step.
            stepped: Events of the setup up to its end.
            step: Events of a later step.
        """
        kinds, logs = recorder.kinds, recorder.memory.logs
        parts = {n: part for part, numbers in self.numbers.items() for n in numbers}
        live = logs.setup.live()
        found, number = [], 0
        for event in logs.setup.events[:stepped]:
            if event < 0:
                found.append(event)
                continue
            part = parts.get(number, "workspaces") if number in live else "setup"
            found.append(kinds.in_phase(event, part))
            number += 1
        left: dict[bool, list[int]] = {False: [], True: []}
        for kind in [kind for n, kind in live.items() if n >= number] + logs.live():
            late = kinds.table[kind].phase != "forward"
            left[late].append(kinds.in_phase(kind, "workspaces"))
        return StaticEvents(
            setup=tuple(found[:built]),
            workspaces=tuple(left[False]),
            late_workspaces=tuple(left[True]),
            first_step=tuple(found[built:]),
            step=step,
        )


def bytes_of(tensors: Any, seen: set[int]) -> int:
    """Bytes of distinct storages that were not seen before."""
    size = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            size += storage.nbytes()
    return size


def static(recorder: Recorder, bare: list[Any], model: list[Any], optimizer: Any) -> StaticSizes:
    """Split what lives between two steps into parameters, gradients and optimizer.

    Args:
        recorder: It has seen every allocation.
        bare: Unwrapped model chunks.
        model: Chunks in their data-parallel wrappers (their buffers hold the gradients).
        optimizer: After its first step.
    """
    seen: set[int] = set()
    buffers = [b for chunk in model for b in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    weights = [p.data for chunk in bare for p in chunk.parameters()]
    weights += [b.param_data for b in buffers if b.param_data is not None]
    weights += [b for chunk in bare for b in chunk.buffers()]
    tensors = {
        "parameters": weights,
        "gradients": [b.grad_data for b in buffers],
        "optimizer": optimizer_tensors(optimizer),
    }
    sizes, numbers, log = {}, {}, recorder.memory.logs.setup
    for part, members in tensors.items():
        known = set(seen)
        sizes[part] = bytes_of(members, seen)
        numbers[part] = frozenset(log.number(key) for key in seen - known)
    return StaticSizes(**sizes, live=recorder.memory.live, numbers=numbers)


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Main parameters and states of every optimizer below a (chained) Megatron optimizer."""
    found: list[torch.Tensor] = []
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(member, "optimizer", member)
        for group in inner.param_groups:
            found += [p.data for p in group["params"]]
        found += [t for t in tree_iter(list(inner.state.values())) if isinstance(t, torch.Tensor)]
    return found
