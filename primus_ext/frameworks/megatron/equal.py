"""Which model chunks of a rank do the same work, so that one recording serves them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
# Says which one a module is, not what it does.
_IDENTITY = {"layer_number", "vp_stage", "layer_offset", "pp_layer_offset", "name", "training"}
# Options that make a layer look up its own number while it runs.
_BY_NUMBER = ("no_rope_freq", "first_last_layers_bf16")


def representatives(chunks: Sequence[nn.Module], config: Any) -> list[int]:
    """For each chunk the index of the first one that does the same work.

    Args:
        chunks: Unwrapped model chunks of one rank.
        config: Their transformer config.
    """
    if any(getattr(config, name, None) for name in _BY_NUMBER):
        return list(range(len(chunks)))
    known: dict[tuple, int] = {}
    return [known.setdefault(content(chunk), i) for i, chunk in enumerate(chunks)]


def content(chunk: nn.Module) -> tuple:
    """Everything that the modules of a chunk are made of, as far as it shapes work or memory.

    Classes, plain attributes, and shape, dtype and kind of parameters and buffers, by name.
    """
    return tuple(
        (
            name,
            type(module),
            _plain_attributes(module),
            tuple((n, _tensor(p)) for n, p in module._parameters.items()),
            tuple((n, _tensor(b)) for n, b in module._buffers.items()),
        )
        for name, module in chunk.named_modules()
    )


def _plain_attributes(module: nn.Module) -> tuple:
    return tuple(
        sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if key not in _IDENTITY and _is_plain(value)
        )
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _tensor(tensor: Any) -> tuple | None:
    if tensor is None:
        return None
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad
