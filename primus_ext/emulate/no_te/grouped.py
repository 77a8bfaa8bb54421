"""Linear layers of all local experts at once, one grouped matrix product each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

_dummies: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}


def _product(
    layout: str, a: list[torch.Tensor], b: list[torch.Tensor], out: list[torch.Tensor],
    sizes: tuple[list[int], list[int], list[int]], *, single: bool, accumulate: bool = False,
) -> None:  # fmt: skip
    nothing = [None] * len(a)
    torch.ops.primus_te.grouped_gemm(
        a, nothing, nothing, b, nothing, nothing, [], out, [], [], layout=layout,
        m=sizes[0], n=sizes[1], k=sizes[2], a_format="plain", b_format="plain",
        a_transposed=False, b_transposed=False, out_dtype=out[0].dtype, single_output=single,
        gelu=False, grad=False, accumulate=accumulate, split_accumulator=False,
    )  # fmt: skip


class _Multiply(torch.autograd.Function):
    """Rows times each expert's weight; weight gradients go into main gradients if they may."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, rows: list[int], fuse: bool, *weights: torch.Tensor
    ) -> torch.Tensor:
        width, depth = weights[0].shape
        out = x.new_empty((x.shape[0], width))
        each = len(rows)
        _product("TN", list(weights), list(x.split(rows)), [out],
                 (rows, [width] * each, [depth] * each), single=True)  # fmt: skip
        ctx.save_for_backward(x, *weights)
        ctx.rows, ctx.fuse, ctx.weights = rows, fuse, weights
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        rows, each = ctx.rows, len(ctx.rows)
        width, depth = weights[0].shape
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        _product("NN", weights, list(dy.split(rows)), [dx],
                 (rows, [depth] * each, [width] * each), single=True)  # fmt: skip
        into: list[Any] = [getattr(w, "main_grad", None) for w in ctx.weights] if ctx.fuse else []
        fused = bool(into) and all(grad is not None for grad in into)
        grads = into if fused else [torch.empty_like(w) for w in weights]
        sizes = [width] * each, [depth] * each, rows
        _product("NT", list(x.split(rows)), list(dy.split(rows)), grads, sizes,
                 single=False, accumulate=fused)  # fmt: skip
        if fused:
            grads = [_already_added(w) for w in ctx.weights]
        return dx, None, None, *grads


def _already_added(weight: Any) -> torch.Tensor:
    """A placeholder gradient, one for all weights of a shape, that Megatron's hook skips."""
    weight.grad_added_to_main_grad = True
    key = (tuple(weight.shape), weight.dtype)
    if key not in _dummies:
        _dummies[key] = torch.empty(key[0], dtype=key[1])
    return _dummies[key].detach()


class GroupedLinear(MegatronModule):
    """Stands for Transformer Engine's grouped linear layer: ``weight0``, ``weight1``, ..."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any,
        init_method: Callable[..., Any], bias: bool, split: str, pg_collection: Any,
    ) -> None:  # fmt: skip
        """Make one weight ``[output_size, input_size]`` for each expert.

        Args:
            num_gemms: Local experts.
            input_size: Of the whole layer.
            output_size: Of the whole layer.
            config: Megatron's TransformerConfig.
            init_method: Fills a weight.
            bias: Must be False.
            split: ``column`` or ``row``: which size the expert-tensor-parallel ranks share.
            pg_collection: Megatron's process groups.

        Raises:
            ProgramError: With a bias.
        """
        super().__init__(config=config)
        if bias:
            from primus_ext.emulate.session import ProgramError

            raise ProgramError(
                "add_bias_linear=True can't be projected for grouped experts without "
                "transformer-engine; legal: --disable-bias-linear"
            )
        parts = pg_collection.expt_tp.size()
        shape = [output_size, input_size]
        dimension = 0 if split == "column" else 1
        shape[dimension] //= parts
        self.experts = num_gemms
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            attributes = {
                "allreduce": config.expert_model_parallel_size == 1,
                "tensor_model_parallel": parts > 1,
                "partition_dim": dimension,
                "partition_stride": 1,
            }
            for name, value in attributes.items():
                setattr(weight, name, value)
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, None]:
        """Multiply.

        Args:
            x: ``[sum(rows), input]``, sorted by expert.
            rows: Of each expert.

        Returns:
            ``[sum(rows), output]`` and no bias.
        """
        weights = [getattr(self, f"weight{index}") for index in range(self.experts)]
        fuse = self.config.gradient_accumulation_fusion
        out: Any = _Multiply.apply(x, list(rows), fuse, *weights)
        return out, None


    def backward_dw(self) -> None:
        """Weight gradients are never put off.

        Raises:
            ProgramError: Always.
        """
        from primus_ext.emulate.session import ProgramError

        raise ProgramError(
            "delay_wgrad_compute=True can't be projected without transformer-engine; legal: False, "
            "or install transformer-engine"
        )


class ColumnGroupedLinear(GroupedLinear):
    """Outputs are shared by the expert-tensor-parallel ranks."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **kwargs: Any) -> None:
        """Take the arguments of ``TEColumnParallelGroupedLinear``."""
        super().__init__(num_gemms, input_size, output_size, split="column", **_needed(kwargs))


class RowGroupedLinear(GroupedLinear):
    """Inputs are shared by the expert-tensor-parallel ranks."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **kwargs: Any) -> None:
        """Take the arguments of ``TERowParallelGroupedLinear``."""
        super().__init__(num_gemms, input_size, output_size, split="row", **_needed(kwargs))


def _needed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("config", "init_method", "bias", "pg_collection")}
