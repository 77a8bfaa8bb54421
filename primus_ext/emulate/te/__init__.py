"""Transformer Engine's Python code without its compiled extension.

``transformer_engine_torch`` is replaced by a module whose functions are opaque custom operators
(namespace ``primus_te``) with a kernel for fake tensors and one for real CPU tensors.  What
Transformer Engine saves for the backward pass, which attention backend it picks and which buffers
it makes comes from its own Python code.

Not emulated (calling it raises ``NotImplementedError`` with the name): userbuffers communication
overlap, NCCL EP, FP8 attention, paged key/value caches, cuSOLVERMp, NVSHMEM.  Not modelled: the
temporary workspaces of the norm kernels and of cuDNN.
"""

from __future__ import annotations

import os
import sys

from primus_ext.emulate.te.caches import reset

__all__ = ["install", "reset"]


def install(*, compute_capability: tuple[int, int]) -> None:
    """Put the stand-in in place; before Transformer Engine or Megatron is imported.  Idempotent.

    The virtual accelerator (:mod:`primus_ext.emulate.virtual_cuda`) must be installed too.

    Args:
        compute_capability: Of the target, e.g. ``(9, 0)``; Transformer Engine's layouts of FP8
            data and its attention backends depend on it.

    Raises:
        RuntimeError: If Transformer Engine was imported already, or if the stand-in was installed
            for another target.
    """
    from primus_ext.emulate import registry
    from primus_ext.emulate.te import module, offload, patches, target  # noqa: F401 (declare)

    present = sys.modules.get(module.MODULE_NAME)
    if present is not None and getattr(present, "_primus_stand_in", False):
        if target.target().compute_capability != compute_capability:
            raise RuntimeError(
                "the Transformer Engine stand-in is installed for compute capability "
                f"{target.target().compute_capability}; a process has one, so "
                f"{compute_capability} can't be"
            )
        return
    if "transformer_engine" in sys.modules or present is not None:
        raise RuntimeError("the stand-in must be installed before transformer_engine is imported")
    # the core library (libtransformer_engine.so) is not installed; this variable makes
    # transformer_engine.common skip it
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    target.set_target(compute_capability)
    stand_in = module.build()
    setattr(stand_in, "_primus_stand_in", True)
    sys.modules[module.MODULE_NAME] = stand_in
    registry.apply_all(patches.GROUP)
