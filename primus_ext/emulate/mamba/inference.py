"""Names that Megatron imports for inference only; they have no body."""

from __future__ import annotations

from typing import Any, NoReturn

from primus_ext.emulate.session import ProgramError


def _refuse(name: str) -> NoReturn:
    raise ProgramError(f"{name} serves inference, which is not projected; legal: training")


def causal_conv1d_update(*_args: Any, **_kwargs: Any) -> NoReturn:
    """One decoding step."""
    _refuse("causal_conv1d_update")


def causal_conv1d_varlen_states(*_args: Any, **_kwargs: Any) -> NoReturn:
    """States at the ends of packed sequences."""
    _refuse("causal_conv1d_varlen_states")
