"""What a user can get wrong in a training configuration, said in one sentence.

Megatron-LM judges: its argument validation, its configuration classes and its layer split run as
they are, and :func:`judged_by_megatron` turns what they raise into a :class:`ConfigError` that
names the user's keys and values.  :func:`check_sizes` and :func:`check_arguments` add what
Megatron-LM takes without a word, or refuses only once process groups and modules are built.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TP, _PP, _CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_VPP, _LAYOUT = "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout"
_BATCH = ("global_batch_size", "micro_batch_size")

# Arguments that are counts of something; Megatron-LM computes with negative ones.
POSITIVE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "vocab_size", "max_position_embeddings", "num_experts", "moe_ffn_hidden_size",
    "moe_router_topk", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "moe_shared_expert_intermediate_size", "mtp_num_layers", "seq_length",
    "train_iters", "log_interval", "save_interval", "recompute_num_layers", _TP, _PP, _CP, _EP,
    _ETP, _VPP, *_BATCH,
)  # fmt: skip

# Megatron-LM's words (a pattern), the arguments they are about, and, where its words say little,
# better ones.
_EXPLAINED = (
    ("total_model_size", ("world_size", _TP, _PP, _CP),
     "the number of processes must be a multiple of tp x pp x cp"),
    ("divisible by the pipeline-model-parallel size|num_layers=.* should be divisible",
     ("num_layers", _PP), "the layers must divide evenly over the stages, or have a layout"),
    ("num_layers_per_pipeline_rank", ("num_layers", _PP, _VPP),
     "the layers must divide evenly over the chunks of all stages, or have a layout"),
    ("global batch size|eval_global_batch_size", _BATCH,
     "a step must hold a multiple of mbs x data-parallel ranks, "
     "that is of {micro_batch_size} x {data_parallel_size} sequences"),
    ("interleaved schedule is used", (_VPP, _PP), None),
    ("num_experts must be non None", (_EP, "num_experts"), "the model has no experts to spread"),
    ("layout|layer character|decoder layers", (_LAYOUT, "num_layers"), None),
)


class ConfigError(ValueError):
    """The configuration can't be trained; the message is one sentence for the user."""


def positive_int(key: str, value: Any) -> int:
    """``value`` as a positive integer.

    Raises:
        ConfigError: If it is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}={value} is not legal: it must be a positive integer")
    return value


def check_sizes(arguments: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Refuse counts that are no positive integers.

    Args:
        arguments: Megatron argument name to value; None and absent ones are left alone.
        keys: Megatron argument name to the user's key.

    Raises:
        ConfigError: For the first bad one.
    """
    for name in POSITIVE:
        if arguments.get(name) is not None:
            positive_int(keys.get(name, name), arguments[name])


@contextlib.contextmanager
def judged_by_megatron(keys: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[None]:
    """Turn what Megatron-LM raises about the configuration into a :class:`ConfigError`.

    Args:
        keys: Megatron argument name to the user's key, for the keys with another name.
        values: Megatron argument name to the value in force.
    """
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError, RuntimeError, TypeError, KeyError) as error:
        if not _raised_by_megatron(error.__traceback__):
            raise
        raise ConfigError(_sentence(error, keys, values)) from error


def check_arguments(args: Any, transformer: Any, keys: Mapping[str, str]) -> None:
    """Rules that Megatron-LM applies only while it builds groups, modules and schedules.

    Args:
        args: Megatron's validated namespace.
        transformer: Its TransformerConfig.
        keys: Megatron argument name to the user's key.

    Raises:
        ConfigError: If the job would be stopped later.
    """
    _check_layers(args, transformer, keys)
    _divides(args, keys, _TP, "ffn_hidden_size")
    _divides(args, keys, _TP, "moe_shared_expert_intermediate_size")
    if args.num_experts:
        _check_experts(args, keys)
    shards = args.tensor_model_parallel_size * args.context_parallel_size
    if args.sequence_parallel and args.seq_length % shards:
        _refuse(args, keys, ("seq_length",),
                f"with sequence parallelism it must be a multiple of tp x cp = {shards}")
    if args.virtual_pipeline_model_parallel_size:
        _check_interleaving(args, keys)


def _check_layers(args: Any, transformer: Any, keys: Mapping[str, str]) -> None:
    """Megatron's own split, for every stage."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if transformer.pipeline_model_parallel_layout is not None:
        return  # judged when the configuration was made
    with judged_by_megatron(keys, vars(args)):
        for stage in range(args.pipeline_model_parallel_size):
            get_num_layers_to_build(transformer, vp_stage=0, pp_rank=stage)


def _check_experts(args: Any, keys: Mapping[str, str]) -> None:
    _divides(args, keys, _ETP, "moe_ffn_hidden_size")
    ranks = getattr(args, _ETP) * getattr(args, _EP) * getattr(args, _PP)
    if args.world_size % ranks:
        _refuse(args, keys, (_ETP, _EP, _PP),
                f"their product {ranks} must divide the number of processes {args.world_size} "
                "(etp is as tp where it is not set)")
    if args.moe_router_topk > args.num_experts:
        _refuse(args, keys, ("moe_router_topk",),
                f"a token can't choose more than all {args.num_experts} experts")


def _check_interleaving(args: Any, keys: Mapping[str, str]) -> None:
    stages = args.pipeline_model_parallel_size
    in_flight = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size // in_flight % stages:
        _refuse(args, keys, ("global_batch_size",),
                "the interleaved schedule needs a multiple of pp microbatches, that is of "
                f"{stages * in_flight} sequences")


def _divides(args: Any, keys: Mapping[str, str], divisor: str, name: str) -> None:
    value = getattr(args, name)
    if value is not None and value % getattr(args, divisor):
        _refuse(args, keys, (divisor,), f"it must divide {name} = {value}")


def _refuse(args: Any, keys: Mapping[str, str], names: tuple[str, ...], why: str) -> NoReturn:
    raise ConfigError(f"{_settings(names, keys, vars(args))} is not legal: {why}")


def _settings(names: tuple[str, ...], keys: Mapping[str, str], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{keys.get(n, n)}={values[n]}" for n in names if n in values)


def _raised_by_megatron(trace: TracebackType | None) -> bool:
    return any(
        frame.f_globals.get("__name__", "").startswith("megatron.")
        for frame, _ in traceback.walk_tb(trace)
    )


def _sentence(error: BaseException, keys: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """The user's settings that the error is about, and why they are not legal."""
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    statement = _statement(frame, traceback.extract_tb(error.__traceback__)[-1])
    words = " ".join(str(error).split())
    args = frame.f_locals.get("args")  # further than ``values`` where Megatron was working on it
    known = {**values, **getattr(args, "__dict__", {})}
    explained = next((e for e in _EXPLAINED if re.search(e[0], words)), None)
    if explained is not None:
        names, reason = explained[1], (
            explained[2].format_map(_Known(known)) if explained[2] else words
        )
    else:
        mentioned = _NAME.findall(words.replace("-", "_")) + _NAME.findall(statement)
        names = tuple(dict.fromkeys(n for n in mentioned if n in values))
        reason = words or f"it requires {statement.removeprefix('assert ').replace('args.', '')}"
    settings = _settings(names, keys, known)
    subject = f"{settings} is" if settings else "the configuration is"
    return f"{subject} not legal for Megatron-LM: {reason.rstrip('.')}"


class _Known(dict[str, Any]):
    """Values for a sentence; what is not known stays a name."""

    def __missing__(self, name: str) -> str:
        return name


def _statement(frame: Any, summary: traceback.FrameSummary) -> str:
    """Source text of the statement that raised, on one line."""
    first, last = summary.lineno or 0, summary.end_lineno or summary.lineno or 0
    lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
    return " ".join(" ".join(lines).split())
