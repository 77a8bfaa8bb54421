"""As :mod:`~primus_ext.frameworks.megatron.torchtitan_blocks`, of layers that were not compiled."""

from __future__ import annotations

from primus_ext.frameworks.megatron import torchtitan_blocks


def install() -> None:
    """Apply the patch, before the program imports Megatron-LM."""
    torchtitan_blocks.install(eager=True)
