"""Values on which Megatron's own validation stumbles instead of refusing them."""

from __future__ import annotations

import functools
from typing import Any

from primus_ext.emulate.registry import patch
from primus_ext.emulate.session import ProgramError


@patch("megatron.training.arguments", "validate_args", group="megatron",
       versions="megatron-core 0.19",
       reason="attention_backend=local fails with a TypeError, and --spec local can't be resolved")
def _local_attention(module: Any) -> None:
    original = module.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if getattr(args.attention_backend, "name", args.attention_backend) == "local":
            raise ProgramError(
                "attention_backend=local is no choice of megatron-core 0.19: it wants --spec "
                "local, which it then can't resolve; legal: auto, flash, fused, unfused"
            )
        return original(args, *rest, **kwargs)

    module.validate_args = validate_args
