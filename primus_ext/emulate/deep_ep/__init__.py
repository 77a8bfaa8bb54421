"""A stand-in for DeepEP (``deep_ep``), the library behind Megatron's flex token dispatcher.

Megatron's own ``fused_a2a.py`` runs over it unmodified.  Dispatch and combine are opaque operators
(namespace ``primus_deep_ep``) with a kernel for fake tensors and one for real CPU tensors.  What
they allocate, and how large the library's own buffers are, follows deepseek-ai/DeepEP, branch
``hybrid-ep``, commit 94a9f8f (the one branch that has both ``Buffer`` and ``HybridEPBuffer``).

With tensors that have no values the number of tokens that arrive is not in any tensor: whoever
calls the dispatcher says beforehand what it :func:`~primus_ext.emulate.deep_ep.load.expect`-s.

Not emulated: the low-latency kernels, FP8 and NVFP4 dispatch, the PCIe mode (calling them raises).
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

from primus_ext.emulate.deep_ep.held import held_bytes

__all__ = ["held_bytes", "install"]


def install() -> None:
    """Put ``deep_ep`` in ``sys.modules``, in place of any installed one.  Idempotent."""
    from primus_ext.emulate.deep_ep import buffer, config, events, hybrid

    if getattr(sys.modules.get("deep_ep"), "_primus_stand_in", False):
        return
    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    for module in (package, utils):  # importlib.util.find_spec asks for it
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    shared = {
        "Config": config.Config,
        "EventHandle": events.EventHandle,
        "EventOverlap": events.EventOverlap,
    }
    vars(utils).update(shared)
    vars(package).update(
        shared,
        Buffer=buffer.Buffer,
        HybridEPBuffer=hybrid.HybridEPBuffer,
        utils=utils,
        __path__=[],
        _primus_stand_in=True,
    )
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = package, utils
