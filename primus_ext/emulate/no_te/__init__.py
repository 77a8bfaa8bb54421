"""Layers that stand for Transformer Engine's where the package is not installed.

They save for the backward pass what Transformer Engine's layers save in bf16, and run the same
opaque operators (``primus_te``), but they are not its code: quantized recipes, context parallelism,
overlap of tensor-parallel communication and Transformer Engine's own caches are not there.
"""

from __future__ import annotations

import importlib.util

from primus_ext.emulate.no_te import patches

__all__ = ["absent", "install"]


def absent() -> bool:
    """Whether Transformer Engine's Python package can't be imported here."""
    try:
        return importlib.util.find_spec("transformer_engine") is None
    except (ImportError, ValueError):
        return True


def install() -> None:
    """Let Megatron's specs take these layers; before Megatron is imported.  Idempotent."""
    from primus_ext.emulate import registry

    registry.apply_all(patches.GROUP)
