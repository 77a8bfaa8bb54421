"""Fully sharded data parallelism: torch FSDP2 and Megatron-FSDP.

Parameters are gathered, and gradients reduced, inside every microbatch, on streams of their own;
so the microbatch is recorded with its streams, whole, and there are no buckets beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.emulate import deep_ep, session
from primus_ext.frameworks.megatron import (
    memory,
    microbatch,
    parts,
    plans,
    probe,
    synchronisation,
)
from primus_ext.frameworks.megatron.recording import times_alone
from primus_ext.observe.recorder import LiveBytes, Recorder
from primus_ext.observe.scopes import Scopes, segments
from primus_ext.trace import (
    Call,
    ChunkMemory,
    ChunkTrace,
    MicrobatchTrace,
    RankTrace,
    StaticMemory,
)


def record(
    recorder: Recorder, rank: int, training: inspect.BoundArguments, pp_ranks: tuple[int, ...]
) -> RankTrace:
    """Record the microbatches and the step of one rank, in place of Megatron's training loop.

    Args:
        recorder: It has seen every allocation.
        rank: Global rank.
        training: Arguments of the training loop.
        pp_ranks: Pipeline ranks that hold the same modules.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    args, given = plans.arguments(), training.arguments
    model = given["model"]
    config = get_model_config(model[0])
    config.timers = None
    config.grad_scale_func = given["optimizer"].scale_loss
    # a model in two wrappers: the adapter's and Megatron-FSDP's own
    bare: Any = get_attr_wrapped_model(model[0], "pre_process", return_model_obj=True)
    model[0].train()
    # A rerun's copies of the batches lie in host memory; the virtual device would count them.
    get_rerun_state_machine().mode = RerunMode.DISABLED
    recorder.continuous = True
    scopes = Scopes(recorder, parts.parts(bare), before_others=True)
    held = sum(_local(p).numel() for p in bare.parameters())
    _, total, active = parts.counts([bare], args, config)
    make = functools.partial(
        microbatch.Microbatch, recorder, given["forward_step_func"], model, 0, scopes, config
    )
    # The first step makes gradients, without which the optimizer has no state, and caches.
    ends = [len(recorder.memory.logs.setup.events)]
    kept = [_Step(recorder, training, make, bare, 1).run()]
    ends.append(len(recorder.memory.logs.setup.events))
    recorder.forget()
    step = _Step(recorder, training, make, bare, min(3, get_num_microbatches()))
    kept.append(step.run())
    ends.append(len(recorder.memory.logs.setup.events))
    chunk = step.chunk()
    statistics = synchronisation.record_statistics(recorder, args)
    ops = tuple(recorder.ops)
    if session.current().request.get("origins", True):
        ops = probe.labelled_ops(recorder, [make], [bare], config, (chunk,))
    trace = RankTrace(
        rank=rank,
        pp_ranks=pp_ranks,
        groups={**memory.all_groups(), **recorder.groups_seen},
        ops=ops,
        chunks=(chunk,),
        step=step.calls + statistics,
        buckets=(),
        parameters=held,
        global_parameters=total,
        active_parameters=active,
        static=step.static(),
        recorded_events=_events(recorder, ends, model, given["optimizer"]),
        allocations=tuple(recorder.kinds.table),
    )
    return trace if session.current().request.get("memory", True) else times_alone(trace)


def _events(
    recorder: Recorder, ends: list[int], model: list[Any], optimizer: Any
) -> tuple[tuple[int, ...], ...]:
    """Allocations and frees up to each end, those that stay named by their part."""
    log, kinds = recorder.memory.logs.setup, recorder.kinds
    tensors = _parts(model, optimizer)
    parts = {
        log.number(_local(tensor).untyped_storage()._cdata): part
        for part in ("parameters", "gradients", "optimizer")
        for tensor in tensors[part]
    }
    live, events, number = log.live(), [], 0
    for event in log.events[: ends[-1]]:
        if event >= 0:
            if number in live:
                event = kinds.in_phase(event, parts.get(number, "workspaces"))
            events.append(event)
            number += 1
        else:
            events.append(event)
    starts = [0, *ends]
    return tuple(tuple(events[a:b]) for a, b in zip(starts, ends, strict=False))


class _Step:
    """One step by Megatron's own ``train_step``, with few microbatches, each recorded."""

    def __init__(
        self, recorder: Recorder, training: inspect.BoundArguments,
        make: Callable[[list[Any]], microbatch.Microbatch], bare: Any, count: int,
    ) -> None:  # fmt: skip
        self._recorder, self._given, self._make = recorder, training.arguments, make
        self._bare, self._count = bare, count
        self._chunks: list[ChunkTrace] = []
        self._starts: list[int] = []
        self.calls: tuple[Call, ...] = ()
        """What runs once per step."""
        self._sizes: _Static
        self._peak = 0

    def run(self) -> Any:
        """Run it; returns what the training loop keeps until its next step is through."""
        import megatron.training.training as module
        from megatron.core.utils import get_model_config

        given = self._given
        config = get_model_config(given["model"][0])
        with self._recorder.collect("step") as calls:
            kept = module.train_step(
                given["forward_step_func"], None, given["model"], given["optimizer"],
                given["opt_param_scheduler"], config, self._microbatches, iteration=0,
            )  # fmt: skip
        self._peak = self._recorder.memory.peak
        self.calls = tuple(call for _, _, call in calls)
        gc.collect()
        return kept

    def _microbatches(self, **_: Any) -> list[Any]:
        """What the schedule does: the microbatches, and the gradients are final."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.utils import get_model_config

        model, live = self._given["model"], self._recorder.memory
        gc.collect()
        self._sizes = _Static.of(model, self._given["optimizer"], live.live)
        losses: list[Any] = []
        for index in range(self._count):
            self._starts.append(live.live)
            one = self._make(losses)
            one.last = index == self._count - 1
            self._chunks.append(_recorded(one, live, losses, first=index == 0))
        self._sizes.add_gradients(self._bare)
        live.reset_peak()
        per_token = get_model_config(model[0]).calculate_per_token_loss
        finalize_model_grads(
            model, torch.zeros((), dtype=torch.int32, device="cuda") if per_token else None
        )
        return losses

    def chunk(self) -> ChunkTrace:
        """All microbatches."""
        usual = self._chunks[self._count // 2]
        return dataclasses.replace(
            usual,
            microbatches=tuple(
                MicrobatchTrace(
                    segments=() if chunk.segments == usual.segments else chunk.segments,
                    memory=chunk.memory,
                    extra_bytes=start - self._sizes.total,
                )
                for chunk, start in zip(self._chunks, self._starts, strict=True)
            ),
        )

    def static(self) -> StaticMemory:
        """Tensors that live through the step, and its peak above them."""
        sizes = self._sizes
        return StaticMemory(
            parameters=sizes.parameters,
            gradients=sizes.gradients,
            optimizer=sizes.optimizer,
            workspaces=sizes.workspaces,
            step_peak_bytes=self._peak - sizes.total,
            libraries=deep_ep.held_bytes(),
        )


def _recorded(
    one: microbatch.Microbatch, live: LiveBytes, losses: list[Any], first: bool
) -> ChunkTrace:
    """Forward and backward of one microbatch."""
    gc.collect()
    before = live.live
    logged = len(losses)
    live.reset_peak()
    forward = one.forward(first)
    forward_peak, saved = live.peak - before, live.live - before
    backward = one.backward()
    return ChunkTrace(
        vpp_stage=0,
        segments=segments(forward, backward),
        memory=ChunkMemory(
            saved_bytes=saved,
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=one.backward_peak - before,
            logged_bytes=live.size_of(
                t for t in tree_iter(losses[logged:]) if isinstance(t, torch.Tensor)
            ),
        ),
        boundary_bytes=0,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor."""
    return getattr(tensor, "_local_tensor", tensor)


@dataclasses.dataclass(slots=True)
class _Static:
    """Bytes that live through a step; gathered parameters, which come and go, don't count."""

    parameters: int
    gradients: int
    optimizer: int
    workspaces: int
    _seen: set[int]

    @classmethod
    def of(cls, model: list[Any], optimizer: Any, live: int) -> _Static:
        """Split what lives before the first microbatch of a step."""
        seen: set[int] = set()
        tensors = _parts(model, optimizer)
        parameters = _bytes(tensors["parameters"], seen)
        reduced = _bytes(tensors["gradients"], seen)
        states = _bytes(tensors["optimizer"], seen)
        gathered = _bytes(tensors["modules"], seen)
        rest = live - parameters - reduced - states - gathered
        return cls(parameters, reduced, states, rest, seen)

    def add_gradients(self, bare: Any) -> None:
        """Count gradients that are there only between the first backward and the step."""
        made = [p.grad for p in bare.parameters() if p.grad is not None]
        self.gradients += _bytes(made, self._seen)

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.workspaces


def _parts(model: list[Any], optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Tensors of each part, and all that the modules hold, gathered or not."""
    modules = [t for chunk in model for t in [*chunk.parameters(), *chunk.buffers()]]
    groups = [
        group
        for chunk in model
        for group in getattr(chunk, "param_and_grad_buffer", _NONE).parameter_groups
    ]
    weights = [t for group in groups for t in _data(group, _WEIGHT_BUFFERS)]
    main = [t for group in groups for t in _data(group, _MAIN_BUFFERS)]
    return {
        "parameters": weights or modules,
        "gradients": [t for group in groups for t in _data(group, _GRADIENT_BUFFERS)],
        "optimizer": [*main, *memory.optimizer_tensors(optimizer)],
        "modules": modules,
    }


_NONE = types.SimpleNamespace(parameter_groups=())
# Attributes of Megatron-FSDP's parameter groups (megatron-core 0.19).
_WEIGHT_BUFFERS = ("model_weight_buffer", "transpose_weight_buffer", "hfsdp_helper_wbuf")
_MAIN_BUFFERS = ("main_weight_buffer",)
_GRADIENT_BUFFERS = ("main_grad_buffer", "hfsdp_helper_gbuf")


def _data(group: Any, names: Iterable[str]) -> list[torch.Tensor]:
    """What the named buffers of a parameter group hold."""
    buffers = [getattr(group, name) for name in names]
    return [b.data for b in buffers if b is not None and b.data is not None]


def _bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    return memory.bytes_of([_local(tensor) for tensor in tensors], seen)
