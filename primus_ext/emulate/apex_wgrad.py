"""Stand-in of APEX's ``fused_weight_gradient_mlp_cuda``: wgrad accumulated into the main gradient.

Megatron's own linear layers (the output layer) use it where gradient accumulation fusion is on,
which is its default; every training image for GPUs ships it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import torch

MODULE = "fused_weight_gradient_mlp_cuda"

_library = torch.library.Library("primus_apex", "DEF")
_library.define("wgrad_gemm_accum(Tensor input, Tensor grad_output, Tensor(a!) main_grad) -> ()")


def _cpu(data: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    rows = data.reshape(-1, data.shape[-1])
    grads = grad_output.reshape(-1, grad_output.shape[-1])
    main_grad += (grads.t().float() @ rows.float()).to(main_grad.dtype)


_library.impl("wgrad_gemm_accum", _cpu, "CPU")
torch.library.register_fake("primus_apex::wgrad_gemm_accum", lambda *_: None, lib=_library)


def install() -> None:
    """Make the module importable, unless the real one is.  Idempotent."""
    if MODULE in sys.modules:
        return
    module = ModuleType(MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(MODULE, None)
    op = torch.ops.primus_apex.wgrad_gemm_accum
    module.wgrad_gemm_accum_fp32 = op  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = op  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
