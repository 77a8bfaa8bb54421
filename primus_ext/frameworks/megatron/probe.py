"""Record a thinned chunk at other batch sizes, to learn where dimensions come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from primus_ext.frameworks.megatron import microbatch, parts, plans
from primus_ext.observe import origins
from primus_ext.observe.recorder import Recorder
from primus_ext.plan import is_packed
from primus_ext.trace import ChunkTrace, Op


def labelled_ops(
    recorder: Recorder,
    makers: Sequence[Callable[[list[Any]], microbatch.Microbatch]],
    bare: list[Any],
    config: Any,
    chunks: Sequence[ChunkTrace],
) -> tuple[Op, ...]:
    """The op table of ``chunks`` with the origin of every dimension that could be named.

    Each chunk is recorded twice more with one layer of each kind, with the microbatch and with
    the sequence doubled.
    """
    args = plans.arguments()
    if is_packed(vars(args)) and args.pipeline_model_parallel_size > 1:
        return tuple(recorder.ops)  # a stage is sent one packed sequence, which can't be doubled
    plan = plans.read(args, config)
    names = origins.Names.of(plan, args.padded_vocab_size)
    known = len(recorder.ops)
    labelled: dict[int, Op] = {}
    for chunk in chunks:
        index, probes = chunk.vpp_stage, []
        for field in ("micro_batch_size", "seq_length"):
            with _doubled(args, field), thinned(bare[index]):
                probe = microbatch.record(makers[index], recorder.memory, index, [])
                if not origins.covers(probe.segments, chunk.segments, recorder.ops):
                    # the first visit of a shape fills caches
                    probe = microbatch.record(makers[index], recorder.memory, index, [])
                probes.append(probe.segments)
        labelled.update(
            origins.match(chunk.segments, (probes[0], probes[1]), recorder.ops, names)
        )
    table = [labelled.get(i, op) for i, op in enumerate(recorder.ops[:known])]
    del recorder.ops[known:]
    return tuple(table)


@contextlib.contextmanager
def _doubled(args: Any, field: str) -> Iterator[None]:
    value = getattr(args, field)
    setattr(args, field, 2 * value)
    try:
        yield
    finally:
        setattr(args, field, value)


@contextlib.contextmanager
def thinned(chunk: nn.Module) -> Iterator[None]:
    """The chunk with the first layer and one more of each kind.

    Where activations are offloaded it stays whole: which layers are depends on their number.
    """
    decoder: Any = getattr(chunk, "decoder", None)
    layers = getattr(decoder, "layers", None)
    config: Any = getattr(chunk, "config", None)
    offloads = getattr(config, "cpu_offloading", False) or getattr(
        config, "fine_grained_activation_offloading", False
    )
    if offloads or not isinstance(layers, nn.ModuleList) or len(layers) < 3:
        yield
        return
    kinds = {id(module): kind for kind, _, module in parts.parts(chunk)}
    kept, seen = [layers[0]], set()
    for layer in list(layers)[1:]:
        if kinds[id(layer)] not in seen:
            seen.add(kinds[id(layer)])
            kept.append(layer)
    count = decoder.num_layers_per_pipeline_rank
    decoder.layers, decoder.num_layers_per_pipeline_rank = nn.ModuleList(kept), len(kept)
    try:
        yield
    finally:
        decoder.layers, decoder.num_layers_per_pipeline_rank = layers, count
