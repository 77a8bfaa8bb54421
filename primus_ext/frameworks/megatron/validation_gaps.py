"""What happens right before Megatron validates the arguments of the job (group ``megatron``)."""

from __future__ import annotations

import functools
import os
from typing import Any

from primus_ext.emulate import flash_attention, registry, session
from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError
from primus_ext.plan import is_sharded


@patch("megatron.training.arguments", "validate_args", group="megatron",
       versions="megatron-core 0.19",
       reason="CUDA_DEVICE_MAX_CONNECTIONS must be 1 for tensor parallelism and must not for FSDP: "
              "left open, it is what Megatron demands; attention_backend=local fails with a "
              "TypeError, and flash needs a package whose kernels need a GPU")
def _validation(module: Any) -> None:
    original = module.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        _free_connections(args)
        _choose_attention(args)
        return original(args, *rest, **kwargs)

    module.validate_args = validate_args


def _free_connections(args: Any) -> None:
    if is_sharded(vars(args)) and "CUDA_DEVICE_MAX_CONNECTIONS" in session.chosen:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)


def _choose_attention(args: Any) -> None:
    """Install what a backend needs, or refuse it by name.

    Raises:
        ProgramError: The backend can't be projected.
    """
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    if backend == "flash":
        if args.context_parallel_size > 1:
            raise ProgramError(
                "attention_backend=flash with context_parallel_size="
                f"{args.context_parallel_size} can't be projected by this version; legal: "
                "context_parallel_size=1, or attention_backend=fused"
            )
        registry.apply_all(flash_attention.GROUP)
    if backend == "local":
        raise ProgramError(
            "attention_backend=local is no choice of megatron-core 0.19: it wants --spec local, "
            "which it then can't resolve; legal: auto, flash, fused, unfused"
        )
