"""One microbatch through one model chunk, and what happens once per step."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.frameworks.megatron import offloading, packed, plans, roles
from primus_ext.frameworks.megatron.real_values import fill, put
from primus_ext.observe.allocations import Log
from primus_ext.observe.recorder import LiveBytes, Recorder
from primus_ext.observe.scopes import OUTPUT, Scopes, segments
from primus_ext.trace import Call, ChunkEvents, ChunkMemory, ChunkTrace, ScopeKind

Recorded = list[tuple[ScopeKind, str, Call]]


def batches(args: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What a GPT data loader yields: token ids, labels, loss mask and positions ``[mbs, seq]``."""
    shape = (args.micro_batch_size, args.seq_length)
    while True:
        yield {
            "tokens": fill(torch.empty(shape, dtype=torch.int64), args.padded_vocab_size),
            "labels": fill(torch.empty(shape, dtype=torch.int64), args.padded_vocab_size),
            "loss_mask": put(torch.empty(shape, dtype=torch.float32), 1.0),
            "position_ids": put(torch.empty(shape, dtype=torch.int64)),
            **packed.documents(args),
        }


class Microbatch:
    """One microbatch of one model chunk, run as Megatron's schedule runs it."""

    def __init__(
        self, recorder: Recorder, forward_step_func: Callable[..., Any], model: list[Any],
        index: int, scopes: Scopes, config: Any, losses: list[Any],
    ) -> None:  # fmt: skip
        """Prepare a microbatch.

        Args:
            recorder: Active recorder.
            forward_step_func: The user's forward step.
            model: All wrapped chunks of the rank.
            index: Which of them.
            scopes: Hooks of that chunk.
            config: Its model config.
            losses: Gets what the forward step reports of its losses; kept until the step ends.
        """
        self._recorder, self._step = recorder, forward_step_func
        self._chunk, self._index, self._interleaved = model[index], index, len(model) > 1
        self._scopes, self._config, self._losses = scopes, config, losses
        # Only the schedule without interleaving hands lists of tensors around.
        pipeline = config.pipeline_model_parallel_size > 1
        self._hand = _in_list if pipeline and not self._interleaved else _bare
        self.has_embedding, self.has_output = _position(self._chunk)
        self._received: Any = None
        self._gradient: Any = None
        self._output: Any = None
        self._tokens: Any = None
        self._sent: tuple[int, ...] = ()
        self.host_bytes = 0
        """Held in host memory from the end of the forward to the backward."""
        self.boundary = 0
        """Bytes of the activation sent to the next stage (0 on the last)."""
        self.stub = 0
        """Bytes of what is left of the output after its backward: ``ChunkMemory.stub_bytes``."""
        self.graph = 0
        """Bytes that the output's graph keeps after its backward: ``ChunkMemory.graph_bytes``."""
        self.crossing: dict[str, int] = {}
        """Numbers in the innermost log of what crosses the boundaries: see ``ChunkEvents``."""
        self.last = False
        """Whether gradients may be reduced as in the last microbatch of a step."""

    def _synchronisation(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.last else self._chunk.no_sync()

    def forward(self, first: bool = False) -> Recorded:
        """Run the forward; its output is handed on and freed.

        Args:
            first: Whether it is the first microbatch of the step (quantized weights are made
                then, and the main gradient is written instead of accumulated).
        """
        from megatron.core.pipeline_parallel import schedules

        for module in self._chunk.modules():
            if hasattr(module, "is_first_microbatch"):  # Transformer Engine's layers keep it
                module.is_first_microbatch = first
        config, peak = self._config, self._recorder.memory
        on_host = self._recorder.host.live
        with self._synchronisation(), self._recorder.collect("forward") as calls:
            self._received = None if self.has_embedding else _received(config, self._index)
            self._output, self._tokens = schedules.forward_step(
                self._step, batches(plans.arguments()), self._chunk, 1, self._hand(self._received),
                self._losses, config, config.context_parallel_size, is_first_microbatch=first,
                current_microbatch=0, vp_stage=self._index if self._interleaved else None,
                is_last_stage=self.has_output,
            )  # fmt: skip
        self.forward_peaks = peak.fresh_peak, peak.peak
        self.host_bytes = self._recorder.host.live - on_host
        if not self.has_output:
            output = tensors(self._output)[0]
            self._note("output", output)
            self.boundary = output.numel() * output.element_size()
            self._sent = tuple(output.shape)
            schedules.deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
            if config.deallocate_pipeline_outputs:
                self.stub = output.element_size()
        elif not self.has_embedding:  # without a pipeline Megatron deletes the loss at once
            self.stub = peak.size_of(tensors(self._output))
        if self._interleaved:  # this schedule forgets the number of tokens at once
            self._tokens = None
        return calls

    def _note(self, name: str, tensor: torch.Tensor | None) -> None:
        memory = self._recorder.memory
        self.crossing[name] = memory.number(tensor, memory.logs.innermost)

    def counted(self) -> int:
        """Bytes of the number of tokens: see ``ChunkMemory.counted_bytes``."""
        return self._recorder.memory.size_of(tensors(self._tokens))

    def backward(self, *, forget: bool = True) -> Recorded:
        """Run the backward and forget the microbatch.

        Args:
            forget: Whether also the output, as by :meth:`forget_output`.
        """
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.utils import get_attr_wrapped_model

        recorder, scopes, config = self._recorder, self._scopes, self._config
        recorder.memory.reset_peak()
        with self._synchronisation(), recorder.collect("backward") as calls:
            scopes.in_backward = True
            recorder.scope = (ScopeKind.OUTPUT, OUTPUT)
            if not self.has_output:
                self._gradient = fill(torch.empty(self._sent, dtype=config.pipeline_dtype))
            received, gradient = self._hand(self._received), self._hand(self._gradient)
            schedules.backward_step(received, self._output, gradient, config)
            del received, gradient
            scopes.in_backward = False
        self.backward_peak = recorder.memory.peak
        self._note("gradient", self._gradient)
        if self._received is not None:  # what a pipeline keeps of a transfer is the schedule's
            get_attr_wrapped_model(self._chunk, "set_input_tensor")([None])
            transfers = (self._received, self._received.grad, self._gradient)
            self._note("received", self._received)
            self._note("input_gradient", self._received.grad)
            recorder.memory.untrack(tensors(transfers))
        self._received = self._gradient = self._tokens = None
        if forget:
            self.forget_output()
        offloading.end_of_step(config)
        gc.collect()
        return calls

    def forget_output(self) -> None:
        """Refer to the output and its graph no longer, as a schedule at its next forward."""
        held = self._recorder.memory.live
        self._output = None
        if self.stub:
            self.graph = held - self._recorder.memory.live - self.stub


def record(make: Callable[[list[Any]], Microbatch], memory: LiveBytes, index: int,
           losses: list[Any], first: bool = False) -> ChunkTrace:  # fmt: skip
    """Forward and backward of one microbatch.

    Args:
        make: A microbatch that reports its losses to the list.
        memory: The recorder's.
        index: Of the chunk.
        losses: Where they go.
        first: See :meth:`Microbatch.forward`.
    """
    gc.collect()
    memory.mark()
    one = make(losses)
    # What the first one makes is part of the setup.
    inner = contextlib.nullcontext(memory.logs.setup) if first else memory.logs.inner(passing=True)
    with inner as log:
        forward = one.forward(first)
        ahead = len(log.events)
        logged, counted = memory.size_of(tensors(losses)), one.counted()
        saved = memory.fresh - logged - counted
        base = memory.live - memory.fresh  # leftovers of the microbatch before are gone
        backward = one.backward()
    sizes = ChunkMemory(
        saved_bytes=saved,
        forward_peak_bytes=one.forward_peaks[0],
        backward_peak_bytes=one.backward_peak - base - logged - counted,
        logged_bytes=logged,
        counted_bytes=counted,
        stub_bytes=one.stub,
        graph_bytes=one.graph,
        leftover_bytes=memory.live - base - logged,
        forward_peak_after_bytes=one.forward_peaks[1] - base,
        host_bytes=one.host_bytes,
    )
    return ChunkTrace(
        vpp_stage=index,
        segments=segments(forward, backward),
        memory=sizes,
        boundary_bytes=one.boundary,
        events=None if first else _events(log, ahead, one.crossing, memory, losses),
    )


def _events(
    log: Log, ahead: int, crossing: dict[str, int], memory: LiveBytes, losses: list[Any]
) -> ChunkEvents:
    """What a log holds after a microbatch; ``ahead`` events are the forward's."""
    numbers = {memory.number(tensor, log) for tensor in tensors(losses)} - {-1}
    return ChunkEvents(
        forward=tuple(log.events[:ahead]),
        backward=tuple(log.events[ahead:]),
        **crossing,
        kept=tuple(n for n in log.live() if n not in numbers),
        logged=tuple(sorted(numbers)),
    )


def _position(chunk: Any) -> tuple[bool, bool]:
    """Whether the chunk has the embedding, and whether it has the output."""
    from megatron.core.utils import get_attr_wrapped_model

    names = ("pre_process", "post_process")
    embedding, output = (get_attr_wrapped_model(chunk, name) for name in names)
    return bool(embedding), bool(output)


def received_shape(config: Any, stage: int) -> tuple[int, int, int]:
    """Shape of the activation that a virtual stage receives: ``[seq, mbs, hidden]``.

    Behind a stage with multi-token prediction the sequence comes once more for each prediction.
    """
    args = plans.arguments()
    length = args.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        length //= config.tensor_model_parallel_size
    length *= 1 + roles.predictions_before(config, stage)
    return length, args.micro_batch_size, config.hidden_size


def _received(config: Any, chunk: int) -> torch.Tensor:
    """The activation that a chunk receives."""
    from megatron.core import parallel_state

    stage = chunk * config.pipeline_model_parallel_size
    stage += parallel_state.get_pipeline_model_parallel_rank()
    shape = received_shape(config, stage)
    return fill(torch.empty(shape, dtype=config.pipeline_dtype, requires_grad=True))


def record_step(
    recorder: Recorder, training: inspect.BoundArguments, losses: list[Any]
) -> tuple[tuple[Call, ...], int, tuple[int, ...], Any]:
    """Megatron's own ``train_step`` with the microbatches left out.

    Zeroing of the gradients, their finalisation, the optimizer step and the reduction of the
    losses.  Reductions of gradient buckets and gathers of parameters are left out: they are in
    the buckets of the trace, to be overlapped with the timeline.

    Args:
        recorder: Active recorder.
        training: Arguments of Megatron's training loop.
        losses: What one microbatch's forward step reported.

    Returns:
        The calls, the highest live bytes above the state before, allocations and frees, and what
        the training loop keeps until its next step is through.
    """
    import megatron.training.training as module
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    given, memory = training.arguments, recorder.memory
    model, config = given["model"], get_model_config(given["model"][0])

    def finalize(**_: Any) -> list[Any]:
        per_token = config.calculate_per_token_loss
        tokens = torch.zeros((), dtype=torch.int32, device="cuda") if per_token else None
        finalize_model_grads(model, tokens)
        return losses

    for chunk in model:
        chunk.start_grad_sync()
    gc.collect()
    before = memory.live
    memory.reset_peak()
    with memory.logs.inner() as log, recorder.collect("step") as calls:
        kept = module.train_step(
            given["forward_step_func"], None, model, given["optimizer"],
            given["opt_param_scheduler"], config, finalize, iteration=0,
        )  # fmt: skip
    peak = memory.peak - before
    gc.collect()
    return tuple(call for _, _, call in calls), peak, tuple(log.events), kept


def _in_list(value: Any) -> list[Any]:
    return [value]


def _bare(value: Any) -> Any:
    return value


def tensors(values: Any) -> list[torch.Tensor]:
    """Tensors in a structure of lists, tuples and dictionaries."""
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
