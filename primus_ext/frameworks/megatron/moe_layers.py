"""Which layers of a model are mixtures of experts, and where each stands among them."""

from __future__ import annotations

from typing import Any

from primus_ext.frameworks.megatron import hybrid


def layer_is_moe(config: Any) -> tuple[bool, ...]:
    """For each transformer layer, whether it is a mixture of experts.

    Args:
        config: Megatron's transformer config.
    """
    layers = config.num_layers
    if not config.num_moe_experts:
        return (False,) * layers
    symbols = hybrid.pattern(config)
    if symbols is not None:
        return tuple(symbol == "E" for symbol in symbols.replace("|", ""))
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return tuple(index % frequency == 0 for index in range(layers))
    return tuple(bool(f) for f in frequency)


def place(layer: str, config: Any) -> int:
    """Which of the mixture-of-experts layers one is, from 0; predictions come last.

    Args:
        layer: Its number from 1, or ``mtp.`` and the number of the multi-token-prediction layer.
        config: Megatron's transformer config.
    """
    moe = layer_is_moe(config)
    if layer.startswith("mtp."):
        return sum(moe) + int(layer.removeprefix("mtp.")) - 1
    return sum(moe[: int(layer) - 1])
