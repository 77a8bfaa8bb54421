"""One microbatch through one model chunk, and what happens once per step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from primus_ext.frameworks.megatron import plans
from primus_ext.observe.recorder import Recorder
from primus_ext.observe.scopes import OUTPUT, Scopes, segments
from primus_ext.trace import Call, ChunkMemory, ChunkTrace, ScopeKind

Recorded = list[tuple[ScopeKind, str, Call]]


def batches(args: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What a GPT data loader yields: token ids, labels, loss mask and positions ``[mbs, seq]``."""
    shape = (args.micro_batch_size, args.seq_length)
    while True:
        yield {
            "tokens": torch.empty(shape, dtype=torch.int64),
            "labels": torch.empty(shape, dtype=torch.int64),
            "loss_mask": torch.empty(shape, dtype=torch.float32),
            "position_ids": torch.empty(shape, dtype=torch.int64),
        }


def record(
    recorder: Recorder,
    forward_step_func: Callable[..., Any],
    model: list[Any],
    index: int,
    scopes: Scopes,
    config: Any,
    first: bool = False,
) -> ChunkTrace:
    """Forward and backward of one microbatch through chunk ``index``, as Megatron's schedule does.

    Args:
        recorder: Active recorder.
        forward_step_func: The user's forward step.
        model: All wrapped chunks of the rank.
        index: Which of them.
        scopes: Hooks of that chunk.
        config: Its model config.
        first: Whether it is the first microbatch of the step (quantized weights are made then,
            and the main gradient is written instead of accumulated).
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_attr_wrapped_model

    chunk, memory = model[index], recorder.memory
    has_embedding, has_output = _position(chunk)
    for module in chunk.modules():
        if hasattr(module, "is_first_microbatch"):  # Transformer Engine's layers keep it
            module.is_first_microbatch = first
    gc.collect()
    before = memory.live
    with chunk.no_sync():
        memory.reset_peak()
        with recorder.collect("forward") as forward:
            received = None if has_embedding else _boundary(config, requires_grad=True)
            output, _ = schedules.forward_step(
                forward_step_func, batches(plans.arguments()), chunk, 1, [received], [], config,
                config.context_parallel_size, is_first_microbatch=first, current_microbatch=0,
                vp_stage=index if len(model) > 1 else None, is_last_stage=has_output,
            )  # fmt: skip
        boundary = 0 if has_output else output[0].numel() * output[0].element_size()
        forward_peak = memory.peak - before
        if not has_output:
            schedules.deallocate_output_tensor(output[0], config.deallocate_pipeline_outputs)
        saved = memory.live - before
        memory.reset_peak()
        with recorder.collect("backward") as backward:
            scopes.in_backward = True
            recorder.scope = (ScopeKind.OUTPUT, OUTPUT)
            gradient = None if has_output else _boundary(config, requires_grad=False)
            schedules.backward_step([received], output, [gradient], config)
            scopes.in_backward = False
        backward_peak = memory.peak - before
    if received is not None:  # the model keeps its last input; in a pipeline a newer one
        get_attr_wrapped_model(chunk, "set_input_tensor")([None])
    del output, received, gradient
    gc.collect()
    return ChunkTrace(
        vpp_stage=index,
        segments=segments(forward, backward),
        memory=ChunkMemory(
            saved_bytes=saved, forward_peak_bytes=forward_peak, backward_peak_bytes=backward_peak
        ),
        boundary_bytes=boundary,
    )


def _position(chunk: Any) -> tuple[bool, bool]:
    """Whether the chunk has the embedding, and whether it has the output."""
    from megatron.core.utils import unwrap_model

    bare: Any = unwrap_model(chunk)
    return bool(bare.pre_process), bool(bare.post_process)


def _boundary(config: Any, requires_grad: bool) -> torch.Tensor:
    """The activation (or its gradient) that a pipeline stage receives: ``[seq, mbs, hidden]``."""
    args = plans.arguments()
    length = args.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    shape = (length, args.micro_batch_size, config.hidden_size)
    return torch.empty(shape, dtype=config.pipeline_dtype, requires_grad=requires_grad)


def record_step(
    recorder: Recorder, model: list[Any], optimizer: Any, config: Any
) -> tuple[tuple[Call, ...], int]:
    """Gradient finalisation, optimizer step and the zeroing for the next one.

    Reductions of gradient buckets and gathers of parameters are left out: they are in the
    buckets of the trace, to be overlapped with the timeline.

    Returns:
        The calls, and the highest live bytes above the state before.
    """
    from megatron.core.distributed import finalize_model_grads

    memory = recorder.memory
    for chunk in model:
        chunk.start_grad_sync()
    gc.collect()
    before = memory.live
    memory.reset_peak()
    tokens = torch.empty((), dtype=torch.int32) if config.calculate_per_token_loss else None
    with recorder.collect("step") as calls:
        finalize_model_grads(model, tokens)
        optimizer.step()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
    peak = memory.peak - before
    gc.collect()
    return tuple(call for _, _, call in calls), peak
