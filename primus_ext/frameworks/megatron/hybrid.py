"""Hybrid models: which kinds of layers each model chunk holds, from ``--hybrid-layer-pattern``.

The rules are those of ``megatron.core.models.hybrid.hybrid_layer_allocation`` (0.19), which needs
process groups to say the same: '|' separates chunks, in the order of pipeline ranks within virtual
stages; without one the layers are split evenly, but for given first and last stages.
"""

from __future__ import annotations

from typing import Any

from primus_ext.emulate.session import ProgramError

_WORDS = {"M": "mamba", "*": "attention", "+": "latent attention", "D": "sparse attention",
          "-": "mlp", "E": "moe", "G": "gated delta net"}  # fmt: skip


def pattern(config: Any) -> str | None:
    """The pattern of the main decoder, or None where the model is no hybrid."""
    if not getattr(config, "is_hybrid_model", False):
        return None
    from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern
    from megatron.training import get_args

    arguments: Any = get_args()
    return parse_hybrid_pattern(arguments.hybrid_layer_pattern).main_pattern or ""


def segments(main: str, config: Any) -> list[str]:
    """The symbols of every chunk, chunk by chunk over the pipeline ranks.

    Args:
        main: Pattern of the main decoder.
        config: Transformer config.

    Raises:
        ProgramError: the layers can't be split over the stages.
    """
    pp = config.pipeline_model_parallel_size
    if "|" in main:
        return main.split("|")
    first = config.num_layers_in_first_pipeline_stage
    last = config.num_layers_in_last_pipeline_stage
    ends = [n for n in (first, last) if n is not None]
    inner = pp - len(ends)
    rest = len(main) - sum(ends)
    if rest < 0 or (inner and rest % inner) or (not inner and rest):
        raise ProgramError(
            f"hybrid_layer_pattern={main!r} has {len(main)} layers, which can't be split over "
            f"pp={pp} stages; legal: a multiple, or '|' between the stages"
        )
    counts = [rest // inner if inner else 0] * inner
    counts = [*([] if first is None else [first]), *counts, *([] if last is None else [last])]
    starts = [sum(counts[:i]) for i in range(pp)]
    return [main[s : s + c] for s, c in zip(starts, counts, strict=True)]


def chunk(main: str, config: Any, pp_rank: int, chunk_index: int) -> tuple[range, tuple[str, ...]]:
    """Global indices of the layers of one chunk, and their kinds in words.

    Raises:
        ProgramError: the layers can't be split over the stages.
    """
    found = segments(main, config)
    index = chunk_index * config.pipeline_model_parallel_size + pp_rank
    if index >= len(found):
        raise ProgramError(
            f"hybrid_layer_pattern={main!r} has {len(found)} chunks, fewer than the pipeline "
            "stages; legal: one between every two '|' for each stage and virtual stage"
        )
    start = sum(len(segment) for segment in found[:index])
    kinds = tuple(_WORDS[symbol] for symbol in found[index])
    return range(start, start + len(kinds)), kinds
