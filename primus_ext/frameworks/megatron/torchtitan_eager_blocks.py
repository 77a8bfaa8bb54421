"""As :mod:`~primus_ext.frameworks.megatron.torchtitan_blocks`, of layers that were not compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_ext.frameworks.megatron import torchtitan_blocks


def install(request: Mapping[str, Any]) -> None:
    """Apply the patch, before the program imports Megatron-LM."""
    torchtitan_blocks.install(request, eager=True)
