"""RMSNorm and LayerNorm that keep input and statistics, as Transformer Engine's kernels do."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te import norm_ops


class _Normalise(torch.autograd.Function):
    """One kernel forward, one backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, eps: float, centered: bool
    ) -> torch.Tensor:
        kwargs = {"eps": eps, "zero_centered_gamma": centered, "out_dtype": x.dtype}
        if bias is None:
            y, rsigma = norm_ops.rmsnorm_fwd(x, weight, None, **kwargs)
            ctx.save_for_backward(x, weight, rsigma)
        else:
            y, mu, rsigma = norm_ops.layernorm_fwd(x, weight, bias, None, **kwargs)
            ctx.save_for_backward(x, weight, rsigma, mu)
        ctx.centered = centered
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, rsigma, *mu = ctx.saved_tensors
        dy = dy.contiguous()
        if not mu:
            dx, dgamma = norm_ops.rmsnorm_bwd(
                dy, x, rsigma, weight, zero_centered_gamma=ctx.centered
            )
            return dx, dgamma, None, None, None
        dx, dgamma, dbeta = norm_ops.layernorm_bwd(
            dy, x, mu[0], rsigma, weight, zero_centered_gamma=ctx.centered
        )
        return dx, dgamma, dbeta, None, None


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, as the config says."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        """Build the norm.

        Args:
            config: Megatron's TransformerConfig.
            hidden_size: Elements to normalise over.
            eps: Added to the variance.

        Raises:
            ProgramError: The config asks for another norm.
        """
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            from primus_ext.emulate.session import ProgramError

            raise ProgramError(
                f"normalization={config.normalization} can't be projected without "
                "transformer-engine; legal: LayerNorm, RMSNorm"
            )
        self.eps, self.centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., hidden]``."""
        return _Normalise.apply(x, self.weight, self.bias, self.eps, self.centered)  # type: ignore[return-value]
