"""Adam in one kernel for all parameters, over the operators of Transformer Engine's stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from primus_ext.emulate.session import ProgramError
from primus_ext.emulate.te import multi_tensor

_CHUNK = 2048 * 32


class FusedAdam(torch.optim.Optimizer):
    """Two moments in fp32 for each parameter; gradients in the parameter's dtype."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, adam_w_mode: bool = True,
        capturable: bool = False, **others: Any,
    ) -> None:  # fmt: skip
        """Take the arguments of ``transformer_engine.pytorch.optimizers.FusedAdam``.

        Raises:
            ProgramError: For what only Transformer Engine can do.
        """
        if capturable or others:
            names = ", ".join([*others, *(["capturable"] if capturable else [])])
            raise ProgramError(
                f"use_precision_aware_optimizer or optimizer_cuda_graph ({names}) can't be "
                "projected without transformer-engine; legal: False, or install transformer-engine"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay})  # fmt: skip
        self.adam_w_mode = int(adam_w_mode)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["step"] = group.get("step", 0) + 1
            updated = [p for p in group["params"] if p.grad is not None]
            if not updated:
                continue
            for p in updated:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p.data)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p.data)
            lists = [
                [p.grad for p in updated],
                [p.data for p in updated],
                [self.state[p]["exp_avg"] for p in updated],
                [self.state[p]["exp_avg_sq"] for p in updated],
            ]
            multi_tensor.multi_tensor_adam(
                _CHUNK, torch.zeros(1, dtype=torch.int32), lists, group["lr"], beta1, beta2,
                group["eps"], group["step"], self.adam_w_mode, 1, group["weight_decay"],
            )  # fmt: skip


def l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, in one kernel; the arguments of Megatron's own."""
    return multi_tensor.multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, False)[0], None


def scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Any, factor: float) -> None:
    """Scale all tensors in one kernel; the arguments of Megatron's own."""
    multi_tensor.multi_tensor_scale(chunk_size, noop_flag, tensor_lists, factor)
