"""Settings of PyTorch's caching allocator, from the environment variable that torch reads.

Names, defaults and rules are those of torch 2.14 (``c10/core/AllocatorConfig.h``,
``c10/cuda/CUDAAllocatorConfig.h``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Reader = Callable[[dict[str, Any], str], None]
MIB = 2**20
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set counts, on every platform."""
_INTERVALS = 16
"""Roundup divisions are kept for sizes from 1 MiB to 64 GiB, one for each power of two."""
_HOST_OR_TIMING = frozenset(
    {
        "pinned_use_background_threads", "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb", "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register", "pinned_reserve_segment_size_mb",
        "pinned_num_register_threads", "pinned_free_catch_all", "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
    }
)  # fmt: skip
"""Legal keys that change host memory or timing only."""


class AllocatorConfigError(ValueError):
    """The variable can't be understood, or asks for what is not modelled; one sentence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """What decides where an allocation goes; bytes."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of this size and more are not split; None: all may be."""
    max_non_split_rounding: int = 20 * MIB
    """By how much such a block may exceed the request it is given to."""
    large_segment_size: int = 20 * MIB
    """Segment for requests above 1 MiB and below 10 MiB; page of an expandable segment."""
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    """Roundup divisions of the sizes from 1 MiB on, by power of two; 0 or 1: none."""
    garbage_collection_threshold: float = 0.0
    """Share of the allowed memory above which unused segments are given back; 0: never.  Torch
    acts on it only where a share of the device is set."""
    memory_fraction: float = 1.0
    """Share of the device that the process may reserve (``per_process_memory_fraction``)."""

    def roundup_divisions(self, size: int) -> int:
        """Divisions between powers of two that a request of ``size`` bytes is rounded up to."""
        index = size.bit_length() - MIB.bit_length()
        return self.divisions[min(max(index, 0), _INTERVALS - 1)]


def parse(text: str) -> AllocatorConfig:
    """The settings in a value of ``PYTORCH_ALLOC_CONF``.

    Args:
        text: ``key:value`` pairs with commas between them; a list stands in brackets.

    Raises:
        AllocatorConfigError: a key is unknown, a value is not legal, or another allocator is
            asked for.
    """
    found: dict[str, Any] = {}
    for key, value in _pairs(text):
        try:
            _READERS[key](found, value)
        except KeyError:
            if key not in _HOST_OR_TIMING and key != "graph_capture_record_stream_reuse":
                known = ", ".join(sorted(_READERS))
                raise AllocatorConfigError(
                    f"PYTORCH_ALLOC_CONF key {key} is unknown; modelled: {known}"
                ) from None
        except AllocatorConfigError:
            raise
        except ValueError as error:
            raise AllocatorConfigError(
                f"PYTORCH_ALLOC_CONF {key}:{value} is not legal: {error}"
            ) from error
    return AllocatorConfig(**found)  # type: ignore[arg-type]


def from_environment(environment: Mapping[str, Any]) -> AllocatorConfig:
    """The settings that torch takes from its environment, the defaults where there are none.

    Args:
        environment: Variables of the user's command; others are ignored.

    Raises:
        AllocatorConfigError: as :func:`parse`.
    """
    return parse(str(environment.get(variable(environment), "")))


def variable(environment: Mapping[str, Any]) -> str:
    """The variable that torch reads; '' where none is set."""
    return next((name for name in VARIABLES if name in environment), "")


def _pairs(text: str) -> list[tuple[str, str]]:
    """Keys and values; commas inside brackets belong to the value."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("".join(text[start:position].split()))
            start = position + 1
    pairs = []
    for part in parts:
        key, colon, value = part.partition(":")
        if part and not (key and colon and value):
            raise AllocatorConfigError(
                f"PYTORCH_ALLOC_CONF={text} is not legal: {part!r} is no key:value"
            )
        if part:
            pairs.append((key, value))
    return pairs


def _expandable(found: dict[str, Any], value: str) -> None:
    if value not in ("True", "False"):
        raise ValueError("it must be True or False")
    found["expandable_segments"] = value == "True"


def _backend(_found: dict[str, Any], value: str) -> None:
    if value != "native":
        raise AllocatorConfigError(
            f"PYTORCH_ALLOC_CONF backend:{value} is not modelled; modelled: backend:native"
        )


def _at_least_a_segment(field: str) -> Reader:
    """A size of at least the large segments as they are set so far, in MiB."""

    def read(found: dict[str, Any], value: str) -> None:
        least = found.get("large_segment_size", AllocatorConfig().large_segment_size)
        if int(value) * MIB < least:
            raise ValueError(f"it must be at least {least // MIB}")
        found[field] = int(value) * MIB

    return read


def _large_segment(found: dict[str, Any], value: str) -> None:
    if int(value) <= 10:
        raise ValueError("it must be above 10")
    found["large_segment_size"] = int(value) * MIB


def _threshold(found: dict[str, Any], value: str) -> None:
    if not 0.0 < float(value) < 1.0:
        raise ValueError("it must be above 0 and below 1")
    found["garbage_collection_threshold"] = float(value)


def _fraction(found: dict[str, Any], value: str) -> None:
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError("it must be from 0 to 1")
    found["memory_fraction"] = float(value)


def _divisions(found: dict[str, Any], value: str) -> None:
    if not value.startswith("["):
        if int(value) == 0:
            raise ValueError("0 must be a power of two")
        found["divisions"] = (_division(value),) * _INTERVALS
        return
    table, first, last = [0] * _INTERVALS, True, 0
    for pair in value.strip("[]").split(","):
        bound, _, count = pair.partition(":")
        if bound == ">":
            table[last + 1 :] = [_division(count)] * (_INTERVALS - last - 1)
            continue
        if int(bound) < 1 or int(bound) & (int(bound) - 1):
            raise ValueError(f"{bound} must be a power of two")
        index = min(int(bound).bit_length() - 1, _INTERVALS - 1)
        if first:  # the first one counts for all smaller sizes too
            table[:index] = [_division(count)] * index
        table[index], first, last = _division(count), False, index
    found["divisions"] = tuple(table)


def _division(text: str) -> int:
    value = int(text)
    if value < 0 or value & (value - 1):
        raise ValueError(f"{text} must be 0 or a power of two")
    return value


_READERS: dict[str, Reader] = {
    "expandable_segments": _expandable,
    "backend": _backend,
    "max_split_size_mb": _at_least_a_segment("max_split_size"),
    "max_non_split_rounding_mb": _at_least_a_segment("max_non_split_rounding"),
    "large_segment_size_mb": _large_segment,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _threshold,
    "per_process_memory_fraction": _fraction,
}
