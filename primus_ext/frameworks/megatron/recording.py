"""One microbatch of every model chunk and one step, in place of Megatron's training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from primus_ext.emulate import session
from primus_ext.frameworks.megatron import (
    equal,
    memory,
    microbatch,
    neighbours,
    parts,
    plans,
    probe,
    settle,
    synchronisation,
)
from primus_ext.observe.recorder import Recorder
from primus_ext.observe.scopes import Scopes
from primus_ext.trace import Bucket, ChunkMemory, ChunkTrace, RankTrace


def record(
    recorder: Recorder, rank: int, training: inspect.BoundArguments, pp_ranks: tuple[int, ...]
) -> RankTrace:
    """Record the rank that this process is.

    Args:
        recorder: Active since before the model was built.
        rank: Global rank.
        training: Arguments of Megatron's training loop.
        pp_ranks: Pipeline ranks that hold the same modules.
    """
    return _Recording(recorder, training).run(rank, pp_ranks)


class _Recording:
    """The order of its steps matters: what an earlier one leaves is not counted in a later one."""

    def __init__(self, recorder: Recorder, training: inspect.BoundArguments) -> None:
        from megatron.core.utils import get_model_config, unwrap_model

        self._recorder, self._training = recorder, training
        self._args = plans.arguments()
        self._model = training.arguments["model"]
        self._optimizer = training.arguments["optimizer"]
        self._config = get_model_config(self._model[0])
        self._bare = unwrap_model(self._model)
        self._quantized = self._args.fp8 or getattr(self._args, "fp4", None)
        self._pipeline = self._config.pipeline_model_parallel_size > 1
        self._only_timed = not session.current().request.get("memory", True)

    def run(self, rank: int, pp_ranks: tuple[int, ...]) -> RankTrace:
        """Everything, and the trace of it."""
        recorder, args = self._recorder, self._args
        self._prepare()
        built, stepped = self._make_optimizer_state()
        static = memory.static(recorder, self._bare, self._model, self._optimizer)
        self._same = self._equal_chunks()
        self._makers = self._microbatches()
        self._warm_up()
        recorder.forget()
        synchronisation.mark(recorder, self._model)
        losses: list[Any] = []
        chunks = self._chunks(losses)
        step, peak, step_events, kept = microbatch.record_step(recorder, self._training, losses)
        losses.clear()
        self._optimizer.zero_grad()  # the next step starts with it
        sizes = static.with_step(peak, recorder, sum(c.memory.leftover_bytes for c in chunks))
        events = static.events(recorder, built, stepped, step_events)
        kinds = tuple(recorder.kinds.table)
        del kept
        if self._pipeline and not self._only_timed:
            beside = functools.partial(neighbours.in_flight, beside=len(self._model) == 1)
            chunks = self._remembering(chunks, beside)
        step, sync, gathers = synchronisation.apart(recorder, args, self._model, step)
        ops = tuple(recorder.ops)
        if session.current().request.get("origins", True):
            distinct = [chunks[index] for index in sorted(set(self._same))]
            ops = probe.labelled_ops(recorder, self._makers, self._bare, self._config, distinct)
        # forwards without gradients
        if self._quantized and self._config.recompute_granularity and not self._only_timed:
            first = functools.partial(neighbours.first_of_step, pipeline=self._pipeline)
            chunks = self._remembering(chunks, first)
        local, total, active = parts.counts(self._bare, args, self._config)
        trace = RankTrace(
            rank=rank,
            pp_ranks=pp_ranks,
            groups={**memory.all_groups(), **recorder.groups_seen},
            ops=ops,
            chunks=tuple(chunks),
            step=step,
            sync=sync,
            buckets=_buckets(self._model, recorder, gathers),
            parameters=local,
            global_parameters=total,
            active_parameters=active,
            static=sizes,
            allocations=kinds,
            static_events=events,
        )
        return times_alone(trace) if self._only_timed else trace

    def _prepare(self) -> None:
        """Modules and settings as inside Megatron's loop."""
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

        self._config.timers = None
        self._config.grad_scale_func = self._optimizer.scale_loss
        # A rerun's copies of the batches lie in host memory; the virtual device would count them.
        get_rerun_state_machine().mode = RerunMode.DISABLED
        for chunk in self._model:
            chunk.train()
            leave_parameters_alone(chunk)

    def _make_optimizer_state(self) -> tuple[int, int]:
        """Number of allocations and frees before the first step, which makes it, and after."""
        setup = self._recorder.memory.logs.setup
        built = len(setup.events)
        self._optimizer.step()
        self._optimizer.zero_grad()  # and main gradients where those of the model are not FP32
        return built, len(setup.events)

    def _equal_chunks(self) -> list[int]:
        """For every chunk the first that is like it."""
        if session.current().request.get("every_chunk"):
            return list(range(len(self._bare)))
        return equal.representatives(self._bare, self._config)

    def _microbatches(self) -> list[Callable[[list[Any]], microbatch.Microbatch]]:
        """For every chunk what makes a microbatch of it."""
        forward_step_func = self._training.arguments["forward_step_func"]
        scopes = [Scopes(self._recorder, parts.parts(chunk)) for chunk in self._bare]
        return [
            functools.partial(
                microbatch.Microbatch, self._recorder, forward_step_func, self._model, index,
                scopes[index], self._config,
            )
            for index in range(len(self._model))
        ]  # fmt: skip

    def _warm_up(self) -> None:
        """Make workspaces and caches: they come with the first microbatch, some in every chunk.

        They go by shape, so a few layers fill them, unless every layer keeps something of its own:
        quantized weights, or the tables of a token dispatcher.
        """
        whole = self._quantized or self._args.num_experts
        for index, chunk in enumerate(self._bare):
            with contextlib.nullcontext() if whole else probe.thinned(chunk):
                make = self._makers[index]
                microbatch.record(make, self._recorder.memory, index, [], first=True)

    def _chunks(self, losses: list[Any]) -> list[ChunkTrace]:
        """A microbatch of every chunk; those that are alike are recorded once."""
        chunks: list[ChunkTrace] = []
        for index, first in enumerate(self._same):
            if first == index:
                make = self._makers[index]
                chunks.append(settle.settled(self._recorder, make, index, losses))
            else:
                chunks.append(dataclasses.replace(chunks[first], vpp_stage=index))
        return chunks

    def _remembering(
        self, chunks: list[ChunkTrace], measured: Callable[..., ChunkMemory]
    ) -> list[ChunkTrace]:
        """The chunks with what else of their memory is measured."""
        memories = {
            index: measured(self._makers[index], self._recorder.memory, chunks[index].memory)
            for index in sorted(set(self._same))
        }
        return [
            dataclasses.replace(chunk, memory=memories[first])
            for chunk, first in zip(chunks, self._same, strict=True)
        ]


def times_alone(trace: RankTrace) -> RankTrace:
    """A trace without allocations, marked as one from which no memory can be composed."""
    return dataclasses.replace(
        trace, allocations=(), static_events=None, recorded_events=(), only_timed=True,
        chunks=tuple(dataclasses.replace(chunk, events=None) for chunk in trace.chunks),
    )  # fmt: skip


def leave_parameters_alone(chunk: Any) -> None:
    """No parameter gathers while recording: they are in the buckets, to be overlapped later."""
    if chunk.remove_forward_pre_hook_handles:
        chunk.disable_forward_pre_hook()
    chunk.start_param_sync = lambda *args, **kwargs: None


def _buckets(model: list[Any], recorder: Recorder, gathers: int) -> tuple[Bucket, ...]:
    """Every gradient bucket of the data-parallel wrapper, in the order the backward fills them."""
    found = []
    for index, chunk in enumerate(model):
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            torch_group = buffer.data_parallel_group
            group = recorder.group_names.get(torch_group.group_name, torch_group.group_desc)
            for bucket in buffer.buckets:
                grads, params = bucket.grad_data, bucket.param_data
                found.append(
                    Bucket(
                        parameters=sum(p.numel() for p in bucket.params_list),
                        group=str(group),
                        grad_bytes=grads.numel() * grads.element_size(),
                        param_bytes=0
                        if params is None
                        else params.numel() * params.element_size(),
                        chunk=index,
                        gathers=gathers,
                    )
                )
    return tuple(found)
