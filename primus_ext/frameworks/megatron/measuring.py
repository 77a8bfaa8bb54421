"""Steps of one rank on a real device, the other ranks virtual, and how long their parts take.

Megatron's own training loop runs the user's program: its schedule, data-parallel wrapper, precision
contexts and optimizer at the shard shapes of the target.  Collectives are answered at once, and
what the answers take is left out; they are priced where the step is composed.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from primus_ext.emulate import session, virtual_cuda, virtual_peers, virtual_world
from primus_ext.frameworks.megatron import microbatch, pace, parts, plans, rank, real_rank, roles
from primus_ext.measurement import ChunkSamples, PartSamples, RankMeasurement, Samples
from primus_ext.observe import device_memory, kernel_profile
from primus_ext.observe.part_timer import PartKey, PartTimer
from primus_ext.observe.stopwatch import Stopwatch
from primus_ext.trace import ScopeKind

ANSWER = "answer"
BETWEEN = "between"
ONCE = ("zero", "finalize", "optimizer", BETWEEN)
"""Keys of what happens once a step."""
MOST_BESIDE = 4
"""Most processes that are measured at the same time, for each core."""
_NO_OTHER = (ScopeKind.OTHER, "")


class Observer:
    """Stands where the recorder stands; nothing is recorded."""

    def __init__(self) -> None:
        self.group_names: dict[str, str] = {}

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing is left to undo."""


def ranks(
    original: Callable[..., Any], call: inspect.BoundArguments,
    members: Sequence[tuple[tuple[int, ...], int | None]],
) -> list[RankMeasurement]:  # fmt: skip
    """Measure one rank of each kind.

    On a CPU they run at the same time, with copies of them up to the ranks of a node: memory and
    cores are shared as in the job itself.  A GPU is asked for one rank (``ranks`` of the request),
    which runs in this process: a fork could not use the device.

    Where a GPU runs out of memory nothing is returned, and the session warns with its sentence.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        members: Pipeline ranks of each kind, and the global rank to be, if not the first.

    Raises:
        ProgramError: A GPU was asked for several.
    """
    active, asked = session.current(), pace.Asked.of(session.current().request)
    if not virtual_cuda.is_host(active.request["device"]):
        if len(members) != 1:
            raise session.ProgramError("ranks: one rank a process is measured on a GPU")
        try:
            return [_measure(original, call, *members[0], asked, pace.Free())]
        except torch.OutOfMemoryError as error:
            rank_number = members[0][1]
            active.warnings.append(
                f"nothing was measured: rank {rank_number} ran out of device memory "
                f"({session.first_line(error)}); the times are simulated"
            )
            return []
    world = plans.arguments().world_size
    if "shrunk" in active.request and world > 1:
        return _real_world(original, call, world, asked)
    together = _together(members, active.request)
    found: list[RankMeasurement] = []
    for group in together:
        barrier = multiprocessing.get_context("fork").Barrier(len(group))
        gate = pace.gate(active.request, barrier)
        mine = dataclasses.replace(asked, beside=len(group))
        forks = [
            session.Fork(functools.partial(_measure, original, call, *member, mine, gate))
            for member in group
        ]
        found += session.results(forks)
    return found


def _real_world(
    original: Callable[..., Any], call: inspect.BoundArguments, world: int, asked: pace.Asked
) -> list[RankMeasurement]:
    """Measure all ranks of a small world, each a process, over the real backend."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(virtual_cuda.free_port()))
    gate = pace.gate(
        session.current().request, multiprocessing.get_context("fork").Barrier(world)
    )
    mine = dataclasses.replace(asked, beside=world)
    args = plans.arguments()
    forks = [
        session.Fork(functools.partial(
            _measure, original, call, (roles.pp_rank(member, args),), member, mine, gate, True
        ))
        for member in range(world)
    ]  # fmt: skip
    return session.results(forks)


def _together(
    members: Sequence[tuple[tuple[int, ...], int | None]], request: dict[str, Any]
) -> list[list[tuple[tuple[int, ...], int | None]]]:
    """Which members are measured at the same time."""
    local = min(int(request["gpus_per_node"]), MOST_BESIDE * (os.cpu_count() or 1))
    size = -(-len(members) // local) * local  # the last ones are no less disturbed
    copies = [members[place % len(members)] for place in range(size)]
    return [copies[start : start + local] for start in range(0, size, local)]


def _measure(
    original: Callable[..., Any], call: inspect.BoundArguments, pp_ranks: tuple[int, ...],
    member: int | None, asked: pace.Asked, gate: pace.Gate, real_world: bool = False,
) -> RankMeasurement:  # fmt: skip
    """Be one rank and measure it; runs in a fork."""
    if member is None:
        member = roles.global_rank(pp_ranks[0], plans.arguments())
    loop = functools.partial(steps, pp_ranks=pp_ranks, asked=asked, gate=gate)
    return rank.run(original, call, member, loop, Observer(), real_world=real_world)


def steps(
    _observer: Any, member: int, training: inspect.BoundArguments,
    pp_ranks: tuple[int, ...], asked: pace.Asked, gate: pace.Gate,
) -> RankMeasurement:  # fmt: skip
    """Run and time the steps, in place of training.

    Args:
        member: Global rank.
        training: Arguments of Megatron's training loop.
        pp_ranks: Pipeline ranks that hold the same modules.
        asked: How many steps.
        gate: Passed before every step, so that processes beside this one run theirs then.
    """
    import megatron.training.training as module

    watch = Stopwatch(on_gpu=torch.cuda.is_available())
    if virtual_world.is_joined():
        virtual_peers.answer(functools.partial(watch.inside, ANSWER))
    timers = _instrument(watch, training) if asked.parts else []
    counted = asked.warm_up + asked.steps
    _feed(training, counted + asked.profile)
    found: list[dict[Hashable, float]] = []
    profile = kernel_profile.Profile(watch.on_gpu)
    step, memory = module.train_step, {}

    def timed(*args: Any, **kwargs: Any) -> Any:
        if len(found) == counted:  # the hooks are still: a profiler sees nothing of them
            memory.update(device_memory.highest())
            with profile:
                return step(*args, **kwargs)
        gate.pass_()
        if len(found) == asked.warm_up:
            device_memory.reset()
        watch.start(BETWEEN)
        try:
            return step(*args, **kwargs)
        finally:
            found.append(watch.stop())
            gate.done(sum(found[-1].values()) - found[-1].get(ANSWER, 0.0))

    module.train_step = timed
    module.training_log = lambda *_, **__: False
    module.train(*training.args, **training.kwargs)
    result = _measurement(found[asked.warm_up :], timers, member, pp_ranks, asked)
    return dataclasses.replace(
        result, kernels=profile.kernels(), **(memory or device_memory.highest())
    )


def _feed(training: inspect.BoundArguments, iterations: int) -> None:
    """Give Megatron's loop batches, a number of steps, and nothing else to do."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    args = plans.arguments()
    args.train_iters, args.eval_iters, args.log_interval = iterations, 0, iterations + 1
    args.eval_interval = args.save_interval = None
    chunks = len(training.arguments["model"])
    streams = [RerunDataIterator(_same(microbatch.batches(args))) for _ in range(chunks)]
    training.arguments["train_data_iterator"] = streams if chunks > 1 else streams[0]
    real_rank.let_any_value_pass()


def _same(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first batch again and again: making one must cost nothing."""
    first = next(batches)
    while True:
        yield dict(first)


def _instrument(watch: Stopwatch, training: inspect.BoundArguments) -> list[PartTimer]:
    """Tell the stopwatch what runs: parts of every chunk, and what happens once a step."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_model_config, unwrap_model

    model, optimizer = training.arguments["model"], training.arguments["optimizer"]
    timers = [
        PartTimer(watch, index, parts.parts(chunk))
        for index, chunk in enumerate(unwrap_model(model))
    ]
    _watch_microbatches(schedules, watch, timers)
    optimizer.step = _during(watch, "optimizer", optimizer.step)
    optimizer.zero_grad = _during(watch, "zero", optimizer.zero_grad)
    for chunk in model:
        chunk.zero_grad_buffer = _during(watch, "zero", chunk.zero_grad_buffer)
    config = get_model_config(model[0])
    if config.finalize_model_grads_func is None:
        from megatron.core.distributed import finalize_model_grads

        config.finalize_model_grads_func = finalize_model_grads
    config.finalize_model_grads_func = _during(
        watch, "finalize", config.finalize_model_grads_func
    )
    return timers


def _watch_microbatches(schedules: Any, watch: Stopwatch, timers: list[PartTimer]) -> None:
    """Every forward and backward of a chunk that the schedule runs."""
    forward, backward = schedules.forward_step, schedules.backward_step
    signature = inspect.signature(forward)
    chunk_of: dict[int, int] = {}  # by output, which the schedule holds until its backward

    @functools.wraps(forward)
    def forward_step(*args: Any, **kwargs: Any) -> Any:
        chunk = signature.bind(*args, **kwargs).arguments.get("vp_stage") or 0
        before = watch.key
        timers[chunk].begin("forward")
        try:
            out = forward(*args, **kwargs)
        finally:
            watch.switch(before)
        if len(timers) > 1:
            chunk_of[id(out[0])] = chunk
        return out

    @functools.wraps(backward)
    def backward_step(received: Any, output: Any, *rest: Any) -> Any:
        chunk = chunk_of.pop(id(output)) if len(timers) > 1 else 0
        before = watch.key
        timers[chunk].begin("backward")
        try:
            return backward(received, output, *rest)
        finally:
            watch.switch(before)

    schedules.forward_step, schedules.backward_step = forward_step, backward_step


def _during(watch: Stopwatch, key: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with watch.inside(key):
            return call(*args, **kwargs)

    return timed


def _measurement(
    found: list[dict[Hashable, float]], timers: list[PartTimer], member: int,
    pp_ranks: tuple[int, ...], asked: pace.Asked,
) -> RankMeasurement:  # fmt: skip
    """What the timelines of the counted steps come to."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    count = get_num_microbatches()
    table: dict[Hashable, list[float]] = defaultdict(lambda: [0.0] * len(found))
    for place, durations in enumerate(found):
        for key, seconds in durations.items():
            table[key][place] = seconds

    def samples(key: Hashable, share: int = 1) -> Samples:
        return Samples(tuple(seconds / share for seconds in table[key]))

    def part(chunk: int, kind: ScopeKind, name: str) -> PartSamples:
        ahead, back = (PartKey(chunk, way, kind, name) for way in ("forward", "backward"))
        return PartSamples(
            kind=kind, name=name, forward=samples(ahead, count), backward=samples(back, count)
        )

    chunks = tuple(
        ChunkSamples(
            vpp_stage=index,
            parts=tuple(part(index, *key) for key in (*timer.order, _NO_OTHER)),
        )
        for index, timer in enumerate(timers)
    )
    return RankMeasurement(
        rank=member, pp_ranks=pp_ranks, device=_device(), beside=asked.beside,
        microbatches=count, steps=len(found), chunks=chunks,
        step={key: samples(key) for key in ONCE},
        answers=samples(ANSWER), warm_up=asked.warm_up,
        whole=Samples(tuple(sum(durations.values()) for durations in found)),
        versions=plans.versions(),
    )  # fmt: skip


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
