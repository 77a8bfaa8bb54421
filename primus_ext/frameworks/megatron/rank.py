"""Run one rank of the job up to its training loop and record one microbatch and one step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

from primus_ext.emulate import echoing_peers, real_peers, session, tripwire, virtual_world
from primus_ext.frameworks.megatron import (
    equal,
    fsdp,
    memory,
    microbatch,
    neighbours,
    parts,
    plans,
    probe,
    roles,
    routing,
    settle,
    synchronisation,
)
from primus_ext.observe.recorder import Recorder
from primus_ext.observe.scopes import Scopes
from primus_ext.plan import is_sharded
from primus_ext.trace import Bucket, ChunkTrace, RankTrace


class _Recorded(BaseException):
    """Leaves Megatron's ``pretrain`` with the result; not an Exception, so nobody handles it."""

    def __init__(self, result: Any) -> None:
        super().__init__("recorded")
        self.result = result


Loop = Callable[..., Any]
"""Runs in place of Megatron's training loop: the recorder and the rank, then the loop's own
arguments; its result is that of :func:`run`."""


def trace(
    original: Callable[..., Any],
    call: inspect.BoundArguments,
    pp_ranks: tuple[int, ...],
    rank: int | None = None,
) -> RankTrace:
    """Be a rank of pipeline stage ``pp_ranks[0]`` and record it; meant to run in a fork.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        pp_ranks: Pipeline ranks that hold the same modules.
        rank: Global rank to be; by default the first of the stage, or the first whose experts get
            most of the tokens, where their numbers were recorded.
    """
    if rank is None:
        args = plans.arguments()
        config = plans.transformer_config(call.arguments["cfg_container"])
        rank = roles.global_rank(pp_ranks[0], args) + roles.heaviest(pp_ranks[0], args, config)
    record = fsdp.record if is_sharded(vars(plans.arguments())) else _record
    result = run(original, call, rank, functools.partial(record, pp_ranks=pp_ranks))
    routing.save(session.current().request.get("routing_out"))
    return result


def run(
    original: Callable[..., Any],
    call: inspect.BoundArguments,
    rank: int,
    loop: Loop,
    observer: Any = None,
) -> Any:
    """Be one rank of the job up to its training loop, and run ``loop`` instead.

    Megatron's own ``pretrain`` builds the model and the optimizer; where it would build data sets
    nothing is built.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        rank: Global rank to be.
        loop: What runs where Megatron would train.
        observer: Entered before the model is built, and given to ``loop``; by default a recorder.
    """
    import megatron.training.initialize as initialization
    import megatron.training.training as training

    args = plans.arguments()
    request = session.current().request
    local_size = int(request["gpus_per_node"])
    args.rank, args.local_rank = rank, rank % local_size
    _forget_outputs(args, call.arguments["cfg_container"])
    _whole_backwards(args, call.arguments["cfg_container"])
    if "rendezvous" in request:
        real_peers.join(rank, args.world_size, request["rendezvous"])
    else:
        virtual_world.join(rank, args.world_size, local_size)

    recorder = observer or Recorder({})
    initialize, setup = training.initialize_megatron, training.setup_model_and_optimizer
    train = training.train
    world = contextlib.ExitStack()

    def setup_in_world(*a: Any, **k: Any) -> Any:
        recorder.group_names.update(memory.group_names())
        if request.get("storage", "none") == "none":
            world.enter_context(virtual_world.no_storage())
        elif observer is None and "rendezvous" not in request:
            world.enter_context(echoing_peers.EchoingPeers())
        world.enter_context(recorder)
        return setup(*a, **k)

    def in_place_of_training(*a: Any, **k: Any) -> None:
        training.train = train
        gc.collect()
        gc.freeze()  # the model stays: collections between microbatches need not look through it
        bound = inspect.signature(train).bind(*a, **k)
        raise _Recorded(loop(recorder, rank, bound))

    def no_data(*_: Any, **__: Any) -> tuple[None, None, None]:
        args.do_train, args.do_valid, args.do_test = True, False, False
        return None, None, None

    initialization._compile_dependencies = lambda: None  # the data set index builder
    training.initialize_megatron = lambda *a, **k: initialize(*a, **{**k, "allow_no_cuda": True})
    training.setup_model_and_optimizer = setup_in_world
    training.set_jit_fusion_options = lambda *a, **k: None  # warms kernels up, changes nothing
    training.build_train_valid_test_data_iterators = no_data
    training.train = in_place_of_training
    try:
        with tripwire.allowed():  # the steps are ours, on tensors without storage
            original(*call.args, **call.kwargs)
    except _Recorded as done:
        return done.result
    raise session.ProgramError("megatron.training.pretrain returned without training anything")


def _whole_backwards(args: Any, cfg_container: Any) -> None:
    """A backward computes its weight gradients, whatever ``delay_wgrad_compute`` says.

    With it they are left to Megatron's combined schedule, which is not what is recorded here, and
    would be missing.  When they run is settled where the schedule is simulated.
    """
    name = "delay_wgrad_compute"
    args.delay_wgrad_compute = False
    for section in vars(cfg_container).values():
        for config in (section, getattr(section, "transformer", None)):
            if getattr(config, name, False):
                setattr(config, name, False)


def _forget_outputs(args: Any, cfg_container: Any) -> None:
    """No checkpoint is read or written, no tracker is started."""
    for name in ("load", "save", "pretrained_checkpoint", "tensorboard_dir", "wandb_project",
                 "wandb_save_dir", "ckpt_convert_format"):  # fmt: skip
        if hasattr(args, name):
            setattr(args, name, None)
        for section in vars(cfg_container).values():
            if hasattr(section, name):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(section, name, None)
    args.enable_one_logger = False


def _record(
    recorder: Recorder, rank: int, training: inspect.BoundArguments, pp_ranks: tuple[int, ...]
) -> RankTrace:
    """The recording itself, in place of Megatron's training loop."""
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.utils import get_model_config, unwrap_model

    args = plans.arguments()
    forward_step_func = training.arguments["forward_step_func"]
    model, optimizer = training.arguments["model"], training.arguments["optimizer"]
    config = get_model_config(model[0])
    config.timers = None
    config.grad_scale_func = optimizer.scale_loss
    bare = unwrap_model(model)
    for chunk in model:
        chunk.train()
    # A rerun's copies of the batches lie in host memory; the virtual device would count them.
    get_rerun_state_machine().mode = RerunMode.DISABLED
    for chunk in model:
        _leave_parameters_alone(chunk)
    logs = recorder.memory.logs
    built = len(logs.setup.events)
    optimizer.step()  # the first step makes the optimizer's state
    optimizer.zero_grad()  # and main gradients where those of the model are not FP32
    stepped = len(logs.setup.events)
    static = memory.static(recorder, bare, model, optimizer)
    same = list(range(len(bare)))
    if not session.current().request.get("every_chunk"):
        same = equal.representatives(bare, config)
    scopes = [Scopes(recorder, parts.parts(chunk)) for chunk in bare]
    makers = [
        functools.partial(
            microbatch.Microbatch, recorder, forward_step_func, model, index, scopes[index], config
        )
        for index in range(len(model))
    ]
    quantized = args.fp8 or getattr(args, "fp4", None)
    for index, chunk in enumerate(bare):
        # Workspaces and caches appear with the first microbatch, some (rope) in every chunk.  They
        # go by shape, so a few layers fill them, unless every layer keeps something of its own:
        # quantized weights, or the tables of a token dispatcher.
        with contextlib.nullcontext() if quantized or args.num_experts else probe.thinned(chunk):
            microbatch.record(makers[index], recorder.memory, index, [], first=True)
    recorder.forget()
    synchronisation.mark(recorder, model)
    losses: list[Any] = []
    chunks: list[ChunkTrace] = []
    for index, first in enumerate(same):
        if first == index:
            chunks.append(settle.settled(recorder, makers[index], index, losses))
        else:
            chunks.append(dataclasses.replace(chunks[first], vpp_stage=index))
    step, step_peak, step_events, kept = microbatch.record_step(recorder, training, losses)
    losses.clear()
    optimizer.zero_grad()  # the next step starts with it
    leftovers = sum(chunk.memory.leftover_bytes for chunk in chunks)
    sizes = static.with_step(step_peak, recorder, leftovers)
    events = static.events(recorder, built, stepped, step_events)
    kinds = tuple(recorder.kinds.table)
    del kept
    if config.pipeline_model_parallel_size > 1:
        in_flight = {
            index: neighbours.in_flight(makers[index], recorder.memory, chunks[index].memory)
            for index in sorted(set(same))
        }
        chunks = [
            dataclasses.replace(chunk, memory=in_flight[first])
            for chunk, first in zip(chunks, same, strict=True)
        ]
    step, sync, gathers = synchronisation.apart(recorder, args, model, step)
    ops = tuple(recorder.ops)
    if session.current().request.get("origins", True):
        distinct = [chunks[index] for index in sorted(set(same))]
        ops = probe.labelled_ops(recorder, makers, bare, config, distinct)
    if quantized and config.recompute_granularity:  # forwards without gradients
        pipeline = config.pipeline_model_parallel_size > 1
        firsts = {
            index: neighbours.first_of_step(
                makers[index], recorder.memory, chunks[index].memory, pipeline
            )
            for index in sorted(set(same))
        }
        chunks = [
            dataclasses.replace(chunk, memory=firsts[first])
            for chunk, first in zip(chunks, same, strict=True)
        ]
    local, total, active = parts.counts(bare, args, config)
    return RankTrace(
        rank=rank,
        pp_ranks=pp_ranks,
        groups={**memory.all_groups(), **recorder.groups_seen},
        ops=ops,
        chunks=tuple(chunks),
        step=step,
        sync=sync,
        buckets=_buckets(model, recorder, gathers),
        parameters=local,
        global_parameters=total,
        active_parameters=active,
        static=sizes,
        allocations=kinds,
        static_events=events,
    )


def _leave_parameters_alone(chunk: Any) -> None:
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
