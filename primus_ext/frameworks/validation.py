"""What a user can get wrong in a training configuration, said in one sentence.

Megatron-LM judges: its argument validation, its configuration classes and its layer split run as
they are, and :func:`judged_by_megatron` turns what they raise into a :class:`ConfigError` that
names the user's keys and values.  :func:`check_arguments` adds the rules that Megatron-LM applies
only after the process groups exist.
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
_MODEL_SIZE = ("tensor_model_parallel_size", "pipeline_model_parallel_size",
               "context_parallel_size")
# Megatron-LM's wording -> the arguments it is about, where the words don't name them
_ABOUT = (
    ("total_model_size", ("world_size", *_MODEL_SIZE)),
    ("divisible by the pipeline-model-parallel size",
     ("num_layers", "pipeline_model_parallel_size")),
    ("global batch size (", ("global_batch_size", "micro_batch_size", "data_parallel_size")),
    ("interleaved schedule is used",
     ("num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_size")),
    ("num_experts must be non None", ("expert_model_parallel_size", "num_experts")),
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


def check_arguments(args: Any, keys: Mapping[str, str]) -> None:
    """Rules that Megatron-LM applies only while it builds groups, modules and schedules.

    Args:
        args: Megatron's validated namespace.
        keys: Megatron argument name to the user's key.

    Raises:
        ConfigError: If the job would be stopped later.
    """
    etp, ep = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    experts = etp * ep * args.pipeline_model_parallel_size
    if args.num_experts and args.world_size % experts:
        _refuse(args, keys, ("expert_tensor_parallel_size", "expert_model_parallel_size",
                             "pipeline_model_parallel_size"),
                f"their product {experts} must divide the world size {args.world_size} "
                "(etp is tp by default)")
    _divides(args, keys, "tensor_model_parallel_size", "ffn_hidden_size")
    if args.num_experts:
        _divides(args, keys, "expert_tensor_parallel_size", "moe_ffn_hidden_size")
    if args.sequence_parallel:
        shards = args.tensor_model_parallel_size * args.context_parallel_size
        if args.seq_length % shards:
            _refuse(args, keys, ("seq_length",),
                    f"with sequence parallelism it must be a multiple of tp x cp = {shards}")
    _check_interleaving(args, keys)


def _check_interleaving(args: Any, keys: Mapping[str, str]) -> None:
    pp = args.pipeline_model_parallel_size
    if not args.virtual_pipeline_model_parallel_size:
        return
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if microbatches % pp:
        _refuse(args, keys, ("global_batch_size",),
                f"it gives {microbatches} microbatches, and the interleaved schedule needs a "
                f"multiple of pp = {pp}, so of "
                f"{pp * args.micro_batch_size * args.data_parallel_size} sequences")


def _divides(args: Any, keys: Mapping[str, str], divisor: str, name: str) -> None:
    if getattr(args, name) % getattr(args, divisor):
        _refuse(args, keys, (divisor,), f"it must divide {name} = {getattr(args, name)}")


def _refuse(args: Any, keys: Mapping[str, str], names: tuple[str, ...], why: str) -> NoReturn:
    settings = ", ".join(f"{keys.get(n, n)}={getattr(args, n)}" for n in names)
    raise ConfigError(f"{settings} is not legal: {why}")


def _raised_by_megatron(trace: TracebackType | None) -> bool:
    return any(
        frame.f_globals.get("__name__", "").startswith("megatron.")
        for frame, _ in traceback.walk_tb(trace)
    )


def _sentence(error: BaseException, keys: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """The user's settings that the error is about, and Megatron-LM's own words."""
    frames = list(traceback.walk_tb(error.__traceback__))
    statement = _statement(frames[-1][0], traceback.extract_tb(error.__traceback__)[-1])
    words = " ".join(str(error).split())
    about = next((names for text, names in _ABOUT if text in words), None)
    if about is None:
        mentioned = _NAME.findall(words.replace("-", "_")) + _NAME.findall(statement)
        about = tuple(dict.fromkeys(n for n in mentioned if n in values))
    known = dict(values)
    source = frames[-1][0].f_locals.get("args")
    settings = ", ".join(
        f"{keys.get(n, n)}={getattr(source, n, known.get(n))}"
        for n in about
        if n in known or hasattr(source, n)
    )
    reason = words or f"it requires {statement.removeprefix('assert ').replace('args.', '')}"
    subject = f"{settings} is" if settings else "the configuration is"
    return f"{subject} not legal for Megatron-LM: {reason.rstrip('.')}"


def _statement(frame: Any, summary: traceback.FrameSummary) -> str:
    """Source text of the statement that raised, on one line."""
    first, last = summary.lineno or 0, summary.end_lineno or summary.lineno or 0
    lines = [linecache.getline(frame.f_code.co_filename, n) for n in range(first, last + 1)]
    return " ".join(" ".join(lines).split())
