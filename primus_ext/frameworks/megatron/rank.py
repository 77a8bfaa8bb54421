"""Run one rank of the job up to its training loop, and something else in place of that."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
from collections.abc import Callable
from typing import Any

from primus_ext.emulate import echoing_peers, real_peers, session, tripwire, virtual_world
from primus_ext.frameworks.megatron import (
    expert_load,
    fsdp,
    memory,
    plans,
    recording,
    roles,
    routing,
)
from primus_ext.observe.recorder import Recorder
from primus_ext.plan import is_sharded
from primus_ext.trace import RankTrace


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
    stands_in: int | None = None,
) -> RankTrace:
    """Be a rank of pipeline stage ``pp_ranks[0]`` and record it; meant to run in a fork.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        pp_ranks: Pipeline ranks that hold the same modules.
        rank: Global rank to be; by default the first of the stage, or the first whose experts get
            most of the tokens, where their numbers differ.
        stands_in: Its expert-parallel rank, to do what the busiest one does in every layer; None:
            what it does itself.
    """
    if stands_in is not None:
        expert_load.stand_in(stands_in)
    if rank is None:
        args = plans.arguments()
        config = plans.transformer_config(call.arguments["cfg_container"])
        rank = roles.global_rank(pp_ranks[0], args) + roles.heaviest(pp_ranks[0], args, config)
    record = fsdp.record if is_sharded(vars(plans.arguments())) else recording.record
    result = run(original, call, rank, functools.partial(record, pp_ranks=pp_ranks))
    routing.save(session.current().request.get("routing_out"))
    return result


def run(
    original: Callable[..., Any],
    call: inspect.BoundArguments,
    rank: int,
    loop: Loop,
    observer: Any = None,
    frozen: bool = True,
    real_world: bool = False,
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
        real_world: All ranks are processes, which Megatron itself joins by the variables of
            torchrun; nothing is virtual.
        frozen: Keep the model out of garbage collections, since the process ends with it.
    """
    import megatron.training.initialize as initialization
    import megatron.training.training as training

    args = plans.arguments()
    request = session.current().request
    local_size = int(request["gpus_per_node"])
    args.rank, args.local_rank = rank, rank % local_size
    _forget_outputs(args, call.arguments["cfg_container"])
    _whole_backwards(args, call.arguments["cfg_container"])
    if real_world:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % local_size),
                          WORLD_SIZE=str(args.world_size))  # fmt: skip
    elif "rendezvous" in request:
        real_peers.join(rank, args.world_size, request["rendezvous"])
    else:
        virtual_world.join(rank, args.world_size, local_size)

    recorder = observer or Recorder({})
    initialize, setup = training.initialize_megatron, training.setup_model_and_optimizer
    train = training.train
    world = contextlib.ExitStack()

    def setup_in_world(*a: Any, **k: Any) -> Any:
        recorder.group_names.update(memory.group_names())
        if request.get("storage", "none") == "none" and "measure" not in request:
            world.enter_context(virtual_world.no_storage())
            if isinstance(recorder, Recorder):  # which is entered next, so nothing is in between
                recorder.recalled = virtual_world.recalled
        elif observer is None and "rendezvous" not in request:
            world.enter_context(echoing_peers.EchoingPeers())
        world.enter_context(recorder)
        return setup(*a, **k)

    def in_place_of_training(*a: Any, **k: Any) -> None:
        training.train = train
        gc.collect()
        if frozen:
            gc.freeze()  # collections between microbatches need not look through the model
        bound = inspect.signature(train).bind(*a, **k)
        raise _Recorded(loop(recorder, rank, bound))

    def no_data(*_: Any, **__: Any) -> tuple[None, None, None]:
        args.do_train, args.do_valid, args.do_test = True, False, False
        return None, None, None

    initialization._compile_dependencies = lambda: None  # the data set index builder
    training.initialize_megatron = lambda *a, **k: initialize(*a, **{**k, "allow_no_cuda": True})
    training.setup_model_and_optimizer = setup_in_world
    if not args.enable_ft_package:  # it reads the whole command line again to see that
        training.ft_integration.setup = lambda: None
    training.set_jit_fusion_options = lambda *a, **k: None  # warms kernels up, changes nothing
    training.build_train_valid_test_data_iterators = no_data
    training.train = in_place_of_training
    try:
        with world, tripwire.allowed():  # the steps are ours, on tensors without storage
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
