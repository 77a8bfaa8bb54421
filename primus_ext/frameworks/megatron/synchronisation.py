"""What a step communicates beside its microbatches: gradients, parameters and statistics.

Reductions of gradient buckets and gathers of parameters are kept apart from the rest of the step:
where they run (beside the last backward, beside the next forward) is decided by the timeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from primus_ext.observe.recorder import Recorder
from primus_ext.trace import Call

REDUCE, GATHER = "reduce", "gather"
"""Phases of the calls that synchronise gradients and parameters."""
_SYNC = {"start_grad_sync": REDUCE, "start_param_sync": GATHER}


def _bucket_groups(model: list[Any]) -> Iterator[Any]:
    for chunk in model:
        yield from getattr(chunk, "bucket_groups", ())
        yield from getattr(chunk, "expert_parallel_bucket_groups", ())


def mark(recorder: Recorder, model: list[Any]) -> None:
    """Let calls that reduce gradient buckets or gather parameters say so in their phase.

    Args:
        recorder: The recorder.
        model: Chunks in their data-parallel wrappers.
    """

    def marked(original: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, recorder.phase = recorder.phase, phase
            try:
                return original(*args, **kwargs)
            finally:
                recorder.phase = before

        return run

    for group in _bucket_groups(model):
        for name, phase in _SYNC.items():
            setattr(group, name, marked(getattr(group, name), phase))


def apart(
    recorder: Recorder, args: Any, model: list[Any], step: tuple[Call, ...]
) -> tuple[tuple[Call, ...], tuple[Call, ...], int]:
    """Take the synchronisation out of a step, and add what is agreed on beside it.

    Args:
        recorder: The recorder.
        args: Validated Megatron arguments.
        model: Chunks in their data-parallel wrappers.
        step: Calls of a step recorded after :func:`mark`.

    Returns:
        The step; the collectives that reduce gradients and gather parameters; how often the latter
        are issued.
    """
    sync, kernels = record(recorder, model)
    often = gathers(recorder, step, sync)
    sync += tuple(call for call in sync if call.phase == GATHER) * (often - 1)
    rest = without_marked(step) + kernels + record_statistics(recorder, args)
    return rest, sync, often


def without_marked(step: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls of a step but those that :func:`mark` marks."""
    return tuple(call for call in step if call.phase not in _SYNC.values())


def gathers(recorder: Recorder, step: tuple[Call, ...], sync: tuple[Call, ...]) -> int:
    """How often a step gathers all parameters.

    Without overlap each of Megatron's chained optimizers (dense parameters, experts) gathers those
    of both.

    Args:
        recorder: The recorder.
        step: Calls of the step, after :func:`mark`.
        sync: What :func:`record` recorded.
    """

    def count(calls: tuple[Call, ...]) -> int:
        remote = [c for c in calls if recorder.ops[c.op].collective is not None]
        return sum(call.phase == GATHER for call in remote)

    return max(1, count(step) // max(1, count(sync)))


def record(
    recorder: Recorder, model: list[Any]
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """Reduce every gradient bucket and gather all parameters once, after :func:`mark`.

    Args:
        recorder: The recorder.
        model: Chunks in their data-parallel wrappers.

    Returns:
        The collectives, and the kernels that prepare them (scaling, looking for NaN), whose phase
        is ``step``.
    """
    with recorder.collect("step") as calls:
        for group in _bucket_groups(model):
            group.start_grad_sync()
            if group.ddp_config.overlap_grad_reduce:
                group.finish_grad_sync()
        for group in _bucket_groups(model):
            settings = group.ddp_config
            if not (settings.use_distributed_optimizer or settings.overlap_param_gather):
                continue
            group.start_param_sync()
            if settings.overlap_param_gather:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            group.param_gather_dispatched = False
    made = [call for _, _, call in calls]
    remote = [recorder.ops[call.op].collective is not None for call in made]
    collectives = tuple(call for call, is_remote in zip(made, remote, strict=True) if is_remote)
    kernels = tuple(
        dataclasses.replace(call, phase="step", waits=())
        for call, is_remote in zip(made, remote, strict=True)
        if not is_remote
    )
    return collectives, kernels


def record_statistics(recorder: Recorder, args: Any) -> tuple[Call, ...]:
    """What ranks agree on in every step beside Megatron's ``train_step`` as it was recorded.

    Whether a rank wants to rerun the step and whether all stepped (switched off while recording),
    and in ``training_log`` the learning rate and the losses of experts and of multi-token
    prediction.

    Args:
        recorder: The recorder.
        args: Validated Megatron arguments.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training.utils import (
        logical_and_across_model_parallel_group,
        reduce_max_stat_across_model_parallel_group,
    )

    reruns: Any = get_rerun_state_machine()
    with recorder.collect("step") as calls:
        if args.rerun_mode != "disabled":
            reruns._reduce_any(False)
        logical_and_across_model_parallel_group(True)
        reduce_max_stat_across_model_parallel_group(1.0)
        _tracked(args)
    return tuple(call for _, _, call in calls)


def _tracked(args: Any) -> None:
    """Losses of experts and of multi-token prediction, by layer."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    if args.num_experts is not None:
        tracker, names = get_moe_metrics_tracker(), []
        for part in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
            if part in args.moe_router_load_balancing_type:
                names.append(f"{part.removesuffix('aux_loss')}load_balancing_loss")
        if args.moe_z_loss_coeff is not None:
            names.append("z_loss")
        for name in names:
            tracker.ensure_initialized(name, args.num_layers + (args.mtp_num_layers or 0))
        tracker._sync_metrics(names)
    if args.mtp_num_layers is not None:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.reduce_metrics_in_tracker()
