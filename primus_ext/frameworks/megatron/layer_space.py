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

import torch

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
from primus_ext.trace import ChunkTrace, Segment

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
        ``conditions``, and of every point ``cpu_seconds`` and ``saved_by_module``: bytes that
        live between forward and backward, by the module that made them.
    """
    changed = shapes.reshaped(call, shape["arguments"])
    points = [(int(m), int(s)) for m, s in shape["points"]]
    member = roles.global_rank(int(shape.get("pp_rank", 0)), plans.arguments())
    loop = functools.partial(_points, points=points)
    return rank.run(original, changed, member, loop, frozen=False)


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
    visits = _Visits(recorder, make)
    found: list[Recording] = []
    seconds: list[float] = []
    with probe.thinned(bare[0]):
        for mbs, seq in points:
            args.micro_batch_size, args.seq_length = mbs, seq
            started = time.process_time()
            found.append(visits.record((mbs, seq)))
            seconds.append(time.process_time() - started)
    return {
        "recordings": found, "conditions": conditions(args, config), "cpu_seconds": seconds,
        "saved_by_module": visits.saved,
    }  # fmt: skip


class _Visits:
    """Microbatches at one point after another.

    The first one of a size may fill caches (offsets of sequences, rope's tables), and then leaves
    tensors that later ones don't.  Most go by the length of the sequences: a forward fills them.
    """

    def __init__(self, recorder: Recorder, make: Callable[..., Any]) -> None:
        self._recorder, self._make = recorder, make
        self.saved: list[dict[str, int]] = []
        """Of the recordings that were returned."""
        self._lengths: set[int] = set()
        self._usual: list[tuple[str, str, str]] | None = None
        """Op, module and phase of what a microbatch leaves that fills no cache."""

    def record(self, point: Point) -> Recording:
        """What a microbatch of this size is once caches are filled."""
        if self._usual is None:
            microbatch.record(self._make, self._recorder.memory, 0, [], first=True)
        elif point[1] not in self._lengths:
            self._fill_caches()
        self._lengths.add(point[1])
        found, chunk = self._visit(point)
        left = _left(self._recorder, chunk)
        if self._usual is None:
            self._usual = left
        elif left != self._usual:
            found, chunk = self._visit(point)
        self.saved.append(_saved(self._recorder, chunk))
        return found

    def _fill_caches(self) -> None:
        memory = self._recorder.memory
        memory.mark()
        with memory.logs.inner(passing=True), torch.no_grad():
            self._make([]).forward()

    def _visit(self, point: Point) -> tuple[Recording, ChunkTrace]:
        recorder = self._recorder
        with _deltas(recorder) as (deltas, starts):
            chunk = microbatch.record(self._make, recorder.memory, 0, [])
        ahead, back = starts[-2:]
        recording = Recording(
            point=point,
            calls=tuple((recorder.ops[c.op], c.phase, c.module) for c in _calls(chunk.segments)),
            forward=tuple(deltas[ahead:back]),
            backward=tuple(deltas[back:]),
            boundary_bytes=chunk.boundary_bytes,
        )
        return recording, chunk


def _left(recorder: Recorder, chunk: ChunkTrace) -> list[tuple[str, str, str]]:
    """Op, module and phase of the tensors that a microbatch leaves, in order."""
    events = chunk.events
    if events is None:
        raise ValueError("a microbatch without events says nothing of what it leaves")
    made = [event for event in (*events.forward, *events.backward) if event >= 0]
    kinds = [recorder.kinds.table[made[number]] for number in events.kept]
    return [(kind.op, kind.module, kind.phase) for kind in kinds]


def _saved(recorder: Recorder, chunk: ChunkTrace) -> dict[str, int]:
    """Bytes that live after the forward, by module."""
    if chunk.events is None:
        raise ValueError("a microbatch without events says nothing of what it saves")
    made = [event for event in chunk.events.forward if event >= 0]
    live = dict(enumerate(made))
    for event in chunk.events.forward:
        if event < 0:
            del live[-event - 1]
    found: dict[str, int] = {}
    for kind in map(recorder.kinds.table.__getitem__, live.values()):
        found[kind.module] = found.get(kind.module, 0) + kind.bytes
    return found


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
