"""Record a model chunk at several microbatches and sequence lengths, for many parallel shapes.

One process imports everything; each shape is a fork of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from primus_ext.frameworks.megatron import (
    microbatch,
    parts,
    plans,
    probe,
    rank,
    recording,
    roles,
    shapes,
)
from primus_ext.observe.recorder import LiveBytes, Recorder
from primus_ext.observe.scopes import Scopes
from primus_ext.parametric import Condition, Point, Recording
from primus_ext.trace import Segment

_BLOCKS = {"blockwise": 128, "mxfp8": 32, "delayed": 16, "tensorwise": 16}
"""Rows that a quantized tile needs (Transformer Engine's recipes)."""


def record(
    original: Callable[..., Any], call: inspect.BoundArguments, shape: dict[str, Any]
) -> dict[str, Any]:
    """Record one shape; meant to run in a fork.

    Args:
        original: Megatron's ``pretrain``.
        call: The user's arguments to it.
        shape: ``arguments``, value by Megatron's argument name; ``points``, pairs of microbatch
            and sequence length; optionally ``pp_rank`` (0).  A middle stage of three with one
            layer is that layer alone.

    Returns:
        ``recordings`` (:class:`~primus_ext.parametric.Recording`, of the first model chunk),
        ``conditions`` and ``cpu_seconds`` of every point.
    """
    changed = shapes.reshaped(call, shape["arguments"])
    points = [(int(m), int(s)) for m, s in shape["points"]]
    member = roles.global_rank(int(shape.get("pp_rank", 0)), plans.arguments())
    return rank.run(original, changed, member, functools.partial(_points, points=points))


def conditions(args: Any, config: Any) -> list[Condition]:
    """Where token counts divide, so that ops and sizes are those of the recorded structure.

    Args:
        args: Validated Megatron arguments.
        config: Transformer config.
    """
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    share = Fraction(1, cp * (tp if args.sequence_parallel else 1))
    found = [Condition(share, 1, "the sequence does not divide over tp and cp")]
    if config.num_moe_experts:
        each = Fraction(config.moe_router_topk, cp * tp)
        found.append(
            Condition(each, config.num_moe_experts, "tokens do not divide over the experts")
        )
    if args.fp8:
        rows = _BLOCKS.get(str(args.fp8_recipe), 128)
        found.append(Condition(share, rows, f"tokens are no multiple of {rows}, as FP8 needs"))
        if config.num_moe_experts:
            each = Fraction(config.moe_router_topk, cp * tp * config.num_moe_experts)
            found.append(Condition(each, rows, "an expert's tokens must be padded for FP8"))
    return found


def _points(
    recorder: Recorder, _rank: int, training: inspect.BoundArguments, points: Sequence[Point]
) -> dict[str, Any]:
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.utils import get_model_config, unwrap_model

    args = plans.arguments()
    model, optimizer = training.arguments["model"], training.arguments["optimizer"]
    config = get_model_config(model[0])
    config.timers = None
    config.grad_scale_func = optimizer.scale_loss
    bare: Any = unwrap_model(model)
    model[0].train()
    get_rerun_state_machine().should_run_forward_backward(None)
    recording.leave_parameters_alone(model[0])
    scopes = Scopes(recorder, parts.parts(bare[0]))
    make = functools.partial(
        microbatch.Microbatch, recorder, training.arguments["forward_step_func"], model, 0, scopes,
        config,
    )  # fmt: skip
    found: list[Recording] = []
    seconds: list[float] = []
    with probe.thinned(bare[0]):
        microbatch.record(make, recorder.memory, 0, [], first=True)
        for mbs, seq in points:
            args.micro_batch_size, args.seq_length = mbs, seq
            started = time.process_time()
            found.append(_recording(recorder, make, (mbs, seq)))
            seconds.append(time.process_time() - started)
    return {
        "recordings": found, "conditions": conditions(args, config), "cpu_seconds": seconds
    }  # fmt: skip


def _recording(recorder: Recorder, make: Callable[..., Any], point: Point) -> Recording:
    # The first visit of a shape fills caches; one after another point frees what that one left.
    microbatch.record(make, recorder.memory, 0, [])
    with _deltas(recorder) as (deltas, starts):
        chunk = microbatch.record(make, recorder.memory, 0, [])
    ahead, back = starts[-2:]
    calls = [(recorder.ops[call.op], call.phase, call.module) for call in _calls(chunk.segments)]
    return Recording(
        point=point,
        calls=tuple(calls),
        forward=tuple(deltas[ahead:back]),
        backward=tuple(deltas[back:]),
        boundary_bytes=chunk.boundary_bytes,
    )


def _calls(segments: Sequence[Segment]) -> Iterator[Any]:
    for segment in segments:
        for _ in range(segment.count):
            yield from segment.forward
            yield from segment.backward


class _Watched(LiveBytes):
    """Notes every change of the bytes that a microbatch made."""

    deltas: list[int]
    now: int

    @property
    def fresh(self) -> int:  # type: ignore[override]
        return self.now

    @fresh.setter
    def fresh(self, value: int) -> None:
        if value != self.now:
            self.deltas.append(value - self.now)
        self.now = value


@contextlib.contextmanager
def _deltas(recorder: Recorder) -> Iterator[tuple[list[int], list[int]]]:
    """Allocations and frees inside, in bytes, and where among them each phase began."""
    memory, collect = recorder.memory, recorder.collect
    deltas: list[int] = []
    starts: list[int] = []

    def collect_from(phase: str) -> Any:
        starts.append(len(deltas))
        return collect(phase)

    recorder.collect = collect_from
    kind, now = type(memory), memory.fresh
    del memory.fresh
    memory.__class__ = _Watched
    setattr(memory, "now", now)
    setattr(memory, "deltas", deltas)
    try:
        yield deltas, starts
    finally:
        del recorder.collect
        now = memory.fresh
        memory.__class__ = kind
        memory.fresh = now
