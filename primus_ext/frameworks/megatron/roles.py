"""Which ranks do the same work: pipeline ranks are grouped by the layers that they hold."""

from __future__ import annotations

from typing import Any

from primus_ext.emulate.session import ProgramError
from primus_ext.frameworks.megatron import expert_load, hybrid
from primus_ext.frameworks.megatron.moe_layers import layer_is_moe


def stage_chunks(config: Any, pp_rank: int) -> list[tuple[str, ...]]:
    """What each model chunk of a pipeline rank holds, in order, as names of kinds of layers.

    Megatron's own functions say how many layers a chunk has and where it starts.

    Raises:
        ProgramError: Megatron can't split the layers like this.
    """
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    moe, main = layer_is_moe(config), hybrid.pattern(config)
    chunks = []
    for chunk in range(vpp or 1):
        held = chunk_layers(config, pp_rank, chunk)
        layers = ["moe" if moe[i] else "dense" for i in held]
        if config.mtp_num_layers and config.num_layers - 1 in held:
            layers.append("norm")  # the decoder's final norm comes before the predictions
        layers += ["mtp"] * _predictions(config, pp_rank, chunk)
        if main is not None:
            layers = hybrid.chunk(main, config, pp_rank, chunk)[1]
        first = pp_rank == 0 and chunk == 0
        last = pp_rank == pp - 1 and chunk == (vpp or 1) - 1
        chunks.append((*(["embedding"] if first else []), *layers, *(["output"] if last else [])))
    return chunks


def chunk_layers(config: Any, pp_rank: int, chunk: int) -> range:
    """Global indices of the transformer layers of one chunk.

    Raises:
        ProgramError: the layers can't be split over the stages.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    main = hybrid.pattern(config)
    if main is not None:
        return hybrid.chunk(main, config, pp_rank, chunk)[0]
    layout = config.pipeline_model_parallel_layout
    vpp = config.virtual_pipeline_model_parallel_size
    vp_stage = chunk if vpp else None
    try:
        if layout is not None:
            stages = [column for chunks in zip(*layout.layout, strict=True) for column in chunks]
            counts = [stage.count(LayerType.decoder) for stage in stages]
            index = chunk * config.pipeline_model_parallel_size + pp_rank
            start = sum(counts[:index])
            return range(start, start + counts[index])
        count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
        start = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    except (AssertionError, ValueError) as error:
        raise ProgramError(
            f"num_layers={config.num_layers} can't be split over "
            f"pp={config.pipeline_model_parallel_size} stages: {error}"
        ) from error
    return range(start, start + count)


def _predictions(config: Any, pp_rank: int, chunk: int) -> int:
    """Multi-token-prediction layers that a layout puts into a chunk."""
    stage = chunk * config.pipeline_model_parallel_size + pp_rank
    return predictions_before(config, stage + 1) - predictions_before(config, stage)


def predictions_before(config: Any, stage: int) -> int:
    """Multi-token-prediction layers in the virtual stages before ``stage`` (a layout puts them)."""
    from megatron.core.transformer.enums import LayerType

    layout = config.pipeline_model_parallel_layout
    if layout is None:  # they are in the last stage
        return 0
    stages = [column for chunks in zip(*layout.layout, strict=True) for column in chunks]
    return sum(held.count(LayerType.mtp) for held in stages[:stage])


def distinct_stages(arguments: Any, config: Any) -> list[tuple[int, ...]]:
    """Pipeline ranks grouped by what they hold; the first of each group is run."""
    groups: dict[tuple, list[int]] = {}
    for pp_rank in range(config.pipeline_model_parallel_size):
        # with recorded counts no two layers are alike
        counts = tuple(expert_load.counts_of(name) for name in moe_layers(config, pp_rank))
        groups.setdefault((*stage_chunks(config, pp_rank), counts), []).append(pp_rank)
    return [tuple(members) for members in groups.values()]


def expert_rank(pp_rank: int, rank: int, arguments: Any) -> int:
    """The expert-parallel rank of a rank of a pipeline stage (order tp-ep)."""
    etp = arguments.expert_tensor_parallel_size or arguments.tensor_model_parallel_size
    behind = rank - global_rank(pp_rank, arguments)
    return behind // etp % arguments.expert_model_parallel_size


def moe_layers(config: Any, pp_rank: int) -> list[str]:
    """Keys, in a table of token counts, of the mixture-of-experts layers of a pipeline rank."""
    moe = layer_is_moe(config)
    chunks = range(config.virtual_pipeline_model_parallel_size or 1)
    held = [layer for chunk in chunks for layer in chunk_layers(config, pp_rank, chunk)]
    return [str(layer + 1) for layer in held if moe[layer]] + _moe_predictions(config, pp_rank)


def _moe_predictions(config: Any, pp_rank: int) -> list[str]:
    """Keys of its multi-token predictions, whose experts are those of the last layer."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    moe = layer_is_moe(config)
    if not config.mtp_num_layers or not moe or not moe[-1] or hybrid.pattern(config) is not None:
        return []
    if config.pipeline_model_parallel_layout is None:
        last = pp_rank == pp - 1
        return [f"mtp.{number + 1}" for number in range(config.mtp_num_layers if last else 0)]
    found = []
    for stage in range(pp_rank, pp * vpp, pp):
        first, end = predictions_before(config, stage), predictions_before(config, stage + 1)
        found += [f"mtp.{number + 1}" for number in range(first, end)]
    return found


def heaviest(pp_rank: int, arguments: Any, config: Any) -> int:
    """How far behind the first rank of its stage the one with most tokens for its experts is."""
    ep_rank = expert_load.heaviest_ep_rank(moe_layers(config, pp_rank), config)
    etp = arguments.expert_tensor_parallel_size or arguments.tensor_model_parallel_size
    return ep_rank * etp


def global_rank(pp_rank: int, arguments: Any) -> int:
    """The rank with tp, cp and dp rank 0 in a pipeline stage (orders tp-cp-ep-dp-pp, -pp-dp)."""
    if arguments.use_tp_pp_dp_mapping:
        return pp_rank * arguments.tensor_model_parallel_size * arguments.context_parallel_size
    return pp_rank * (arguments.world_size // arguments.pipeline_model_parallel_size)


def pp_rank(rank: int, arguments: Any) -> int:
    """The pipeline rank of a global rank (orders tp-cp-ep-dp-pp and tp-cp-ep-pp-dp)."""
    pp = arguments.pipeline_model_parallel_size
    if arguments.use_tp_pp_dp_mapping:
        inner = arguments.tensor_model_parallel_size * arguments.context_parallel_size
        return rank // inner % pp
    return rank // (arguments.world_size // pp)
