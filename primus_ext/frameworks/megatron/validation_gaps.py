"""Values of attention_backend: one that Megatron stumbles on, one that needs another package."""

from __future__ import annotations

import functools
from typing import Any

from primus_ext.emulate import flash_attention, registry
from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError


@patch("megatron.training.arguments", "validate_args", group="megatron",
       versions="megatron-core 0.19",
       reason="attention_backend=local fails with a TypeError, and --spec local can't be resolved; "
              "flash needs a package whose kernels need a GPU")
def _attention_backend(module: Any) -> None:
    original = module.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
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
                "attention_backend=local is no choice of megatron-core 0.19: it wants --spec "
                "local, which it then can't resolve; legal: auto, flash, fused, unfused"
            )
        return original(args, *rest, **kwargs)

    module.validate_args = validate_args
